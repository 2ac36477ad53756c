"""Makes the communicators of mesh axes and joins their processes while their programs compile.

Processes lower the same program at different times, so nothing here has a deadline of its own: the
first execution waits, natively, for `timeout_s`. The store is jax.distributed's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from jaxring import bootstrap, errors
from jaxring._src import host_links, members, monitor, threads
from jaxring._src.store import JaxStore

POLL_S = 2.0  # after each of these the state is looked at again

_begun: dict[str, tuple[Sequence[int], int]] = {}  # what was joined, by key: processes by rank, me
_epoch = 0  # how often this process has joined anew
_lock = threading.Lock()
_threads: list[threading.Thread] = []


def ensure(
    native: ModuleType, groups: Sequence[Sequence[int]], process_of: Mapping[int, int]
) -> None:
    """Makes the communicators of those groups that have a device of this process; called while
    lowering.

    It never blocks: processes are joined in the background, and the first execution waits for that,
    natively.

    Args:
      groups: global device ids, in the order of their ranks.
      process_of: the process of each device.
    """
    monitor.start(native)
    me = jax.process_index()
    for group in groups:
        processes = [process_of[device] for device in group]
        if me not in processes:
            continue
        key = "mesh:" + ",".join(map(str, group))
        with errors.typed():
            state = native.create_communicator(key, processes, me)
        if set(processes) == {me}:
            members.note(key, [bootstrap.host_identity()] * len(processes))
        if state == "connecting":
            connect_in_background(native, key, processes, me)


def connect_in_background(native: ModuleType, key: str, processes: Sequence[int], me: int) -> None:
    """Begins to join `processes` (by rank) to the communicator `key`, unless that was begun before.

    Once only: a second segment would replace the one that the others have been told of."""
    with _lock:
        if key in _begun:
            return
        joining = _Joining(native, key, processes, me, _epoch)
        # One thread for each: with a common one, two leaders could wait for each other.
        thread = threads.start(joining.run, "jaxring-connect")
        _begun[key] = processes, me
        _threads[:] = [t for t in _threads if t.is_alive()] + [thread]


def stop() -> None:
    """Waits for the threads, once all communicators are closed, as the process ends: see
    monitor.stop for what one would do that came back later."""
    deadline = time.monotonic() + POLL_S + 1.0
    for thread in _threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def rejoin(native: ModuleType) -> None:
    """See jaxring.rejoin."""
    global _epoch
    with _lock:
        _epoch += 1  # before another thread lowers a program
        begun = dict(_begun)
        _begun.clear()
    for key, (processes, me) in begun.items():
        with errors.typed():
            native.close_communicator(key)
            native.create_communicator(key, list(processes), me)
        connect_in_background(native, key, processes, me)


class _Overtaken(Exception):
    """The communicator is not, or no longer, to be joined."""


class _Current:
    """The native module, for as long as `rejoin` has not overtaken this joining."""

    def __init__(self, joining: _Joining):
        self.joining = joining

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.joining.if_current(name, *args)


class _Joining:
    """One communicator as its process joins it, in a thread that `rejoin` may have overtaken."""

    def __init__(self, native: ModuleType, key: str, processes: Sequence[int], me: int, epoch: int):
        self.native, self.key, self.me, self.epoch = native, key, me, epoch
        self.processes = list(processes)  # by rank
        self.members = list(dict.fromkeys(processes))
        self.prefix = f"jaxring/mesh/{epoch}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    def run(self) -> None:
        try:
            store = JaxStore()
        except errors.Error as e:
            self.fail("UsageError", e.message)
            return
        try:
            self.join(store)
            self.watch(store)
        except Exception as e:  # it must reach the calls that wait for this communicator
            error = e if isinstance(e, errors.Error) else errors.parse(str(e))
            kind = type(error).__name__ if error is not None else "PeerError"
            message = error.message if error is not None else f"{self.key} cannot be joined: {e}"
            if self.fail(kind, message):
                with contextlib.suppress(Exception):  # jax.distributed may have been shut down
                    store.set(f"{self.prefix}/failure", json.dumps([kind, message]))

    def fail(self, kind: str, message: str) -> bool:
        """Whether there was one to fail: it may have been closed, as the process ends."""
        with _lock:
            missing = self.native.communicator_state(self.key) == "missing"
            if missing or self.epoch != _epoch:
                return False
            self.native.fail_communicator(self.key, kind, message)
            return True

    def connecting(self) -> bool:
        state = self.native.communicator_state(self.key)
        return self.epoch == _epoch and state == "connecting"

    def if_current(self, name: str, *args: Any) -> Any:
        """The native function's result, unless `rejoin` has put another communicator in the place
        of ours."""
        with _lock:
            if self.epoch != _epoch:
                raise _Overtaken
            return getattr(self.native, name)(*args)

    def join(self, store: bootstrap.KeyValueStore) -> None:
        identity, table = bootstrap.host_identity(), None
        while table is None and self.connecting():
            with contextlib.suppress(errors.TimeoutError):
                table = bootstrap.exchange(
                    store, self.prefix, self.members, self.me, identity, POLL_S
                )
        if table is None:
            return
        members.note(self.key, [table[process] for process in self.processes])

        def get(name: str) -> str:
            while self.connecting():
                with contextlib.suppress(TimeoutError):
                    return store.get(name, POLL_S)
            raise _Overtaken

        with contextlib.suppress(_Overtaken):
            host_links.join(
                _Current(self), store, self.prefix, self.key, table, self.processes, self.me, get
            )

    def watch(self, store: bootstrap.KeyValueStore) -> None:
        """Until all have joined: learns of another member's failure to do so."""
        while self.connecting():
            with contextlib.suppress(TimeoutError):
                self.fail(*json.loads(store.get(f"{self.prefix}/failure", POLL_S)))
