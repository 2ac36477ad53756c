"""Communicators: who takes part in a collective, and how its processes are joined natively.

`init` gives the world of processes, `Communicator.split` its subsets. `ensure_mesh` serves mesh
axes: it makes the communicators of a call's groups while the call is lowered, and joins their
processes in the background."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import jax

from jaxring import _native, bootstrap, errors
from jaxring._src import rendezvous
from jaxring._src.mesh_connections import connect_in_background
from jaxring._src.sharding import share_of
from jaxring.config import config

__all__ = ["Communicator", "ensure_mesh", "init", "stats"]

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
        self._members = dict(members)
        self._me = me
        self._store = store
        self._children: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._splits = 0
        self._closed = False
        numbers = list(members)
        here = [n for n in numbers if members[n]["id"] == members[me]["id"]]
        self.rank, self.world_size = numbers.index(me), len(numbers)
        self.local_rank, self.local_world_size = here.index(me), len(here)
        names = {row["id"]: str(row["host"]) for row in members.values()}  # in order of first rank
        self.hosts = tuple(names.values())

    def axis_index(self) -> jax.Array:
        """This process's rank as an int32 scalar, for use in traced code."""
        return jax.numpy.int32(self.rank)

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
        table = {self._me: {"color": color, "key": key}}
        if self._store is not None:
            table = bootstrap.exchange(
                self._store, name, list(self._members), self._me, table[self._me], config.timeout_s
            )
        if color is None:
            return None
        mine = [n for n in self._members if table[n]["color"] == color]
        mine.sort(key=lambda n: table[n]["key"])  # stable: then by rank
        child = Communicator(
            f"{name}.{color}", {n: self._members[n] for n in mine}, self._me, self._store
        )
        child._connect(config.timeout_s)
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

    def abort(self, reason: str) -> None:
        """Makes pending and later operations raise AbortedError with `reason` on every rank."""
        with errors.typed():
            _native.abort_communicator(self.key, reason)

    def close(self) -> None:
        """Releases what it holds, and the communicators split from it. Calling it again does
        nothing."""
        global _world
        if self._closed:
            return
        self._closed = True
        for child in list(self._children):
            child.close()
        with _world_lock:
            if _world is self:
                _world = None
        _joined.discard(self.key)
        with errors.typed():
            _native.close_communicator(self.key)

    def _connect(self, timeout_s: float) -> None:
        """Joins the processes natively; may be called again after a TimeoutError."""
        deadline = time.monotonic() + timeout_s
        with errors.typed():
            state = _native.create_communicator(self.key, list(self._members), self._me)
            if state == "connecting" and self.key not in _joined:
                self._join(self._store, timeout_s)
                _joined.add(self.key)
            _native.wait_ready(self.key, max(0.001, deadline - time.monotonic()))

    def _join(self, store: bootstrap.KeyValueStore | None, timeout_s: float) -> None:
        assert store is not None
        if self.rank == 0:
            store.set(f"{self.key}/segment", _native.segment_publish(self.key))
            return
        try:
            address = store.get(f"{self.key}/segment", timeout_s)
        except TimeoutError:
            raise errors.TimeoutError(
                f"{self.key}: rank 0 did not open its shared memory within {timeout_s:.3g} s; see "
                "what it printed",
                missing_ranks=[0],
            ) from None
        _native.segment_attach(self.key, address)

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise errors.UsageError(
                f"{call}: {self!r} is closed; call jaxring.init() for a new world"
            )

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, exception: BaseException | None, trace: object) -> None:
        if exception is not None and not self._closed:
            # The others may be waiting for this rank, which won't come any more.
            self.abort(f"rank {self.rank} left with {type(exception).__name__}: {exception}")
        self.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Communicator) and other.key == self.key

    def __hash__(self) -> int:
        return hash(("jaxring.Communicator", self.key))

    def __deepcopy__(self, memo: object) -> Communicator:
        return self  # configurations that hold one are copied; a communicator is one thing

    def __repr__(self) -> str:
        return f"<Communicator {self.key!r}: rank {self.rank} of {self.world_size}>"


_world: Communicator | None = None
_world_lock = threading.RLock()
_joined: set[str] = set()  # a second segment would replace the one that the others were told of
_worlds_begun = 0  # ranks open and close worlds alike, so this names the same world on all of them


def init(
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: str | None = None,
    timeout_s: float | None = None,
) -> Communicator:
    """Joins this process's world, or returns the one that it has joined.

    Without arguments, rank and world size come from `jaxring run`, an initialised
    `jax.distributed`, Slurm, Open MPI or PMI, in this order; with none of them it is a world of
    one.

    Args:
      rank, world_size: this process's place; they go together.
      coordinator: "host:port" at which rank 0 listens and the others look; needed with world_size >
        1.
      timeout_s: how long to wait for the other ranks, in seconds; by default the setting
        `timeout_s`.

    Raises:
      UsageError: the place is incomplete, taken, or on another host.
      TimeoutError: ranks have not come in time; `missing_ranks` names them. Calling init again goes
        on waiting.
    """
    global _world, _worlds_begun
    timeout_s = config.timeout_s if timeout_s is None else timeout_s
    deadline = time.monotonic() + timeout_s
    with _world_lock:
        if _world is not None:
            if (rank, world_size) not in ((None, None), (_world.rank, _world.world_size)):
                raise errors.UsageError(
                    f"init: this process is rank {_world.rank} of {_world.world_size} already; "
                    f"close() that world before it becomes rank {rank} of {world_size}"
                )
            return _world
        placement = bootstrap.discover(rank, world_size, coordinator)
        key = "world" if _worlds_begun == 0 else f"world#{_worlds_begun + 1}"
        me, members, store = placement.rank, range(placement.world_size), None
        table = {me: bootstrap.host_identity()}
        if placement.world_size > 1:
            store = bootstrap.connect(placement, timeout_s)
            left_s = max(0.001, deadline - time.monotonic())
            table = bootstrap.exchange(store, key, members, me, table[me], left_s)
            bootstrap.require_one_host(table)
        world = Communicator(key, {n: table[n] for n in members}, me, store)
        world._connect(max(0.001, deadline - time.monotonic()))
        rendezvous.remove_all()
        _worlds_begun += 1
        _world = world
        return world


def ensure_mesh(groups: Sequence[Sequence[int]], process_of: Mapping[int, int]) -> None:
    """Makes the communicators of those groups that have a device of this process; called while
    lowering.

    It never blocks: processes are joined in the background, and the first execution waits for that,
    natively.

    Args:
      groups: global device ids, in the order of their ranks.
      process_of: the process of each device.
    """
    me = jax.process_index()
    for group in groups:
        processes = [process_of[device] for device in group]
        if me not in processes:
            continue
        key = "mesh:" + ",".join(map(str, group))
        with errors.typed():
            state = _native.create_communicator(key, processes, me)
        if state == "connecting":
            connect_in_background(_native, key, processes, me)


def stats(reset: bool = False) -> list[dict[str, Any]]:
    """What the engine has done in this process, one dict for each kind of operation.

    Args:
      reset: begin counting anew.

    Returns: Dicts with the keys collective, algorithm, transport, communicator, operations,
      bytes_sent, bytes_received (of all ranks in this process) and wait_s (seconds spent waiting
      for peers).
    """
    return _native.stats(reset)


# Before JAX's own: a script may end right after it has launched its last step.
atexit.register(_native.close_all)
errors.add_details_source(cast(Any, _native.error_details))
config.subscribe("timeout_s", lambda value: _native.set_setting("timeout_s", value))
config.subscribe("warn_s", lambda value: _native.set_setting("warn_s", value))
config.subscribe("log_level", lambda value: logging.getLogger("jaxring").setLevel(value.upper()))
