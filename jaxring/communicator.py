"""Communicators: who takes part in a collective. `jaxring.init` gives the world of processes
(jaxring/_src/world.py), `Communicator.split` its subsets; jaxring/_src/joining.py joins them
natively. The communicators of mesh axes are made by jaxring/_src/mesh_connections.py."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from jaxring import _native, bootstrap, errors
from jaxring._src import cuda, joining
from jaxring._src import members as places
from jaxring._src.sharding import share_of
from jaxring.config import config

__all__ = ["Communicator"]

T = TypeVar("T")


class Communicator:
    """An ordered set of ranks, each of them a process; made by `jaxring.init` and `split`.

    Give it to a collective in place of an axis name, also inside `jax.jit`, which may close over it
    or take it as a static argument: it is hashable, and equal to the communicator of the same name
    only.

    Attributes:
      rank: this process's rank, a Python int in 0 … world_size - 1.
      world_size: the number of ranks.
      local_rank, local_world_size: the same among the ranks of this host.
      hosts: the names of the hosts, in the order of their first rank.
      key: the name that all ranks know it by.
    """

    def __init__(
        self,
        key: str,
        members: Mapping[int, Mapping[str, Any]],
        me: int,
        store: bootstrap.KeyValueStore | None,
    ):
        """For init and split. `members`: bootstrap.host_identity by number in the world, in rank
        order."""
        self.key = key
        self._children: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._when_closed: Callable[[Communicator], None] | None = None  # a world's
        self._set_members(members, me, store, "")
        _by_key[key] = self

    def _set_members(
        self,
        members: Mapping[int, Mapping[str, Any]],
        me: int,
        store: bootstrap.KeyValueStore | None,
        epoch: str,
    ) -> None:
        """Its ranks, for the first time or others than before; `epoch` tells in the store."""
        self._members = dict(members)
        self._me = me
        self._store = store
        self._epoch = epoch
        self._splits = 0
        self._closed = False
        numbers = list(members)
        here = [n for n in numbers if members[n]["id"] == members[me]["id"]]
        self.rank, self.world_size = numbers.index(me), len(numbers)
        self.local_rank, self.local_world_size = here.index(me), len(here)
        places.note(self.key, list(members.values()))
        names = {row["id"]: str(row["host"]) for row in members.values()}  # in order of first rank
        self.hosts = tuple(names.values())

    def _join(self, timeout_s: float, group: str) -> None:
        """Waits until all ranks, who are present in `group` of the store, have joined it."""
        joining.join(_native, self._store, self.key, self._members, self._me, timeout_s, group)

    def place(self) -> tuple[list[int], int, bootstrap.KeyValueStore | None]:
        """(numbers of the processes in rank order, this one's, the store they share); internal."""
        return list(self._members), self._me, self._store

    def state(self) -> str:
        """ "missing", "connecting", "ready" or "broken: …"; internal."""
        return _native.communicator_state(self.key)

    def axis_index(self) -> jax.Array:
        """This process's rank as an int32 scalar that a program reads when it runs: it is right
        after elastic training has lost or won ranks, too."""
        return _extensions["axis_index"](self)

    def split(self, color: int | str | None, key: int = 0) -> Communicator | None:
        """The communicator of all ranks that give the same `color`, ordered by `key`, then by rank
        here.

        Every rank of this communicator must call it. A rank that gives None gets None.

            evens_or_odds = comm.split(comm.rank % 2)
        """
        if (
            isinstance(color, bool)
            or not isinstance(color, int | str | None)
            or not isinstance(key, int)
        ):
            raise errors.UsageError(
                "split: expected color as an int, a string or None and key as an int, got "
                f"{color!r} and {key!r}"
            )
        self._require_open("split")
        self._splits += 1
        name = f"{self.key}/{self._splits}"
        group = name + self._epoch  # what was told in an earlier epoch is not meant
        me, members, timeout_s = self._me, list(self._members), config.timeout_s
        table: dict[int, dict[str, Any]] = {me: {"color": color, "key": key}}
        with (
            joining.naming_the_dead(self._members),
            joining.present(self._store, group, me),
        ):
            if self._store is not None:
                table = bootstrap.exchange(
                    self._store,
                    group,
                    members,
                    me,
                    table[me],
                    timeout_s,
                    lambda: joining.require_alive(self._members),
                    known=self._members,
                )
            if color is None:
                return None
            chosen = [n for n in members if table[n]["color"] == color]
            chosen.sort(key=lambda n: table[n]["key"])  # stable: then by rank
            rows = {n: self._members[n] for n in chosen}
            # Quoted where it is a string: 1 is another color than "1", and "a/1.b" no path.
            child = Communicator(f"{name}.{color!r}", rows, me, self._store)
            child._epoch = self._epoch
            child._join(timeout_s, group)
        self._children.add(child)
        return child

    def shard(self, dataset: T) -> T:
        """This rank's share of `dataset`: one contiguous part, the sizes differing by at most one.

        Args:
          dataset: an array (cut along its first dimension), a list or other sequence, or a dict,
            tuple or other pytree of arrays that have the same first dimension.

        Example: 10 rows on 4 ranks give 3, 3, 2 and 2.
        """
        return share_of(dataset, self.rank, self.world_size)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """`root`'s object, on every rank; every rank must call it, outside traced code.

        Args:
          obj: anything that can be pickled; what other ranks than `root` give is not looked at.

        Example: ``config = comm.broadcast_object(config if comm.rank == 0 else None)``
        """
        self._require_open("broadcast_object")
        return _extensions["broadcast_object"](self, obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """All ranks' objects, in rank order; every rank must call it, outside traced code."""
        self._require_open("all_gather_object")
        return _extensions["all_gather_object"](self, obj)

    def all_gather_uneven(self, array: Any) -> jax.Array:
        """All ranks' arrays in rank order, joined along the first dimension, which may differ.

        Every rank must call it, outside traced code, with the same dtype and other dimensions.
        Raises MismatchError where they differ, UsageError for a scalar.
        """
        self._require_open("all_gather_uneven")
        return _extensions["all_gather_uneven"](self, array)

    def abort(self, reason: str) -> None:
        """Makes pending and later operations raise AbortedError with `reason` on every rank."""
        # As an exception's text may hold: a file's name that is not UTF-8 comes as surrogates.
        text = str(reason or "").encode(errors="backslashreplace").decode()
        text = text if text.strip() else "no reason given"  # as of an exception without a message
        cuda.fail(self.key, "AbortedError", text)
        with errors.typed():
            _native.abort_communicator(self.key, text)

    def close(self) -> None:
        """Releases what it holds, and the communicators split from it. Calling it again does
        nothing."""
        if self._closed:
            return
        self._closed = True
        for child in list(self._children):
            child.close()
        if self._when_closed is not None:
            self._when_closed(self)
        cuda.close(self.key)
        joining.close(_native, self.key)

    def _require_open(self, call: str) -> None:
        """Where one is closed, forked or broken, before others are waited for."""
        if self._closed:
            raise errors.UsageError(
                f"{call}: {self!r} is closed; call jaxring.init() for a new world"
            )
        if os.getpid() != self._members[self._me]["pid"]:
            raise errors.UsageError(
                f"{call}: process {os.getpid()} was forked from one that uses jaxring and has no "
                "place among the ranks; start processes with spawn or forkserver"
            )
        with errors.typed():
            state = _native.communicator_state(self.key)
            if state.startswith("broken: "):
                raise RuntimeError(state)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, exception: BaseException | None, trace: object) -> None:
        # sys.exit(main(comm)) is how a program ends that has made all its calls.
        done = isinstance(exception, SystemExit) and exception.code in (None, 0)
        if exception is not None and not done and not self._closed:
            # The others may be waiting for this rank, which won't come any more.
            self.abort(f"rank {self.rank} left with {errors.said(exception)}")
        self.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Communicator) and other.key == self.key

    def __hash__(self) -> int:
        return hash(("jaxring.Communicator", self.key))

    def __deepcopy__(self, memo: object) -> Communicator:
        return self  # configurations that hold one are copied; a communicator is one thing

    def __repr__(self) -> str:
        return f"<Communicator {self.key!r}: rank {self.rank} of {self.world_size}>"


# Methods that need the collectives, which need this module: jaxring/_src/objects.py gives them.
_extensions: dict[str, Callable[..., Any]] = {}


_by_key: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


def find(key: str) -> Communicator:
    """The communicator of this name, of which a traced call keeps the name only."""
    found = _by_key.get(key)
    if found is None:
        raise errors.UsageError(f"communicator {key} is closed; make a new one with jaxring.init()")
    return found


def extend(**functions: Callable[..., Any]) -> None:
    """Gives the functions behind the methods of these names."""
    _extensions.update(functions)
