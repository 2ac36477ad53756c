"""How the processes of a Communicator are joined natively, and how the death of one of them
meanwhile is seen: by its connection to the store, which knows who is present."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from jaxring import bootstrap, errors
from jaxring._src import host_links, monitor

LOOK_S = 0.25  # how often a rank that waits for the others looks whether all still live

_joined: set[str] = set()  # a second segment would replace the one that the others were told of


@contextlib.contextmanager
def naming_the_dead(members: Mapping[int, Mapping[str, Any]]) -> Iterator[None]:
    """Within, a PeerError is about a process of these that has died, if there is one, rather than
    about one that has only noticed it or about the store that it served."""
    try:
        yield
    except errors.PeerError:
        require_alive(members)
        raise


def present(
    store: bootstrap.KeyValueStore | None, group: str, member: int
) -> contextlib.AbstractContextManager[None]:
    """Within, `member`'s end is told to the others of `group`; a world of one has no store."""
    return contextlib.nullcontext() if store is None else store.present(group, member)


def join(
    native: ModuleType,
    store: bootstrap.KeyValueStore | None,
    key: str,
    rows: Mapping[int, Mapping[str, Any]],
    me: int,
    timeout_s: float,
    group: str,
) -> None:
    """Makes the communicator `key` and waits until all have joined it.

    After a TimeoutError it may be called again; any other error closes the communicator. Where the
    system refuses memory or files it is a UsageError that says so.

    Args:
      rows: bootstrap.host_identity by number in the world, in rank order; `me` is this process's.
      group: that in which they are present in the store.
    """
    begin = time.monotonic()
    monitor.start(native)
    try:
        with errors.typed():
            state = native.create_communicator(key, list(rows), me)
            if state == "connecting" and key not in _joined:
                assert store is not None
                _meet(native, store, key, rows, me, timeout_s, group)
                _joined.add(key)
            _wait_ready(native, store, key, begin, timeout_s, group)
    except errors.TimeoutError:
        raise
    except BaseException as e:
        close(native, key)
        if type(e) is RuntimeError:  # the engine's, without a kind
            raise errors.UsageError(f"{key} cannot be joined: {e}") from e
        raise


def require_alive(members: Mapping[int, Mapping[str, Any]]) -> None:
    """PeerError if a process of these (bootstrap.host_identity, in rank order) on this host has
    ended: one that died before it came is in no group of the store."""
    here = bootstrap.host_identity()["id"]
    for rank, who in enumerate(members.values()):
        if who["id"] != here:  # its number says nothing here
            continue
        try:
            fd = os.pidfd_open(who["pid"])
        except ProcessLookupError:
            ended = True
        except OSError:  # no descriptor free: then its absence is seen at the deadline
            continue
        else:
            poll = select.poll()
            poll.register(fd, select.POLLIN)  # also a zombie's
            ended = bool(poll.poll(0))
            os.close(fd)
        if ended:
            raise errors.PeerError(
                f"split: the process of rank {rank} (pid {who['pid']} on {who['host']}) has died; "
                "look at its output",
                rank=rank,
                host=who["host"],
                pid=who["pid"],
                missing_ranks=[rank],
            )


def close(native: ModuleType, key: str) -> None:
    _joined.discard(key)
    with errors.typed():
        native.close_communicator(key)


def close_all(native: ModuleType, rank: int | None) -> None:
    """As the process of this rank of the world ends."""
    # Set where nobody caught an exception: others should not read that we have made fewer calls.
    uncaught = getattr(sys, "last_value", None)
    if uncaught is None:
        return native.close_all()
    what = errors.said(uncaught).splitlines()[0].rstrip()
    what = what.encode(errors="backslashreplace").decode()  # surrogates are no text for C++
    who = "the program" if rank is None else f"the program of rank {rank}"
    return native.close_all(f"{who} ended with {what}")


def _meet(
    native: ModuleType,
    store: bootstrap.KeyValueStore,
    key: str,
    rows: Mapping[int, Mapping[str, Any]],
    me: int,
    timeout_s: float,
    group: str,
) -> None:
    deadline = time.monotonic() + timeout_s

    def get(name: str) -> str:
        try:
            return store.get(name, max(0.001, deadline - time.monotonic()), group)
        except TimeoutError:
            first = next(iter(rows))
            raise errors.TimeoutError(
                f"{key}: no rank has told {name.rpartition(key)[2]} within {timeout_s:.3g} s; see "
                f"what rank {first} and the first rank of this host have printed",
                missing_ranks=[0],
                rank=0,
                host=rows[first]["host"],
                pid=rows[first]["pid"],
            ) from None

    host_links.join(native, store, f"{group}/{key}", key, rows, list(rows), me, get)


def _wait_ready(
    native: ModuleType,
    store: bootstrap.KeyValueStore | None,
    key: str,
    begin: float,
    timeout_s: float,
    group: str,
) -> None:
    while True:
        waited_s = time.monotonic() - begin
        try:
            with errors.typed():
                wait_s = max(0.001, min(LOOK_S, timeout_s - waited_s))
                return native.wait_ready(key, wait_s, waited_s)
        except errors.TimeoutError:
            if time.monotonic() - begin >= timeout_s or store is None:
                raise
        try:
            store.require_all(group)
        except errors.PeerError:
            # All may have joined since, and the one that served the store may have ended after it.
            if native.communicator_state(key) != "ready":
                raise
