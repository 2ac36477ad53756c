"""Joins the processes of a mesh's communicators while their programs compile.

Processes lower the same program at different times, so nothing here has a deadline of its own: the
first execution waits, natively, for `timeout_s`. The store is jax.distributed's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Sequence
from types import ModuleType

from jaxring import bootstrap, errors
from jaxring._src.store import JaxStore

POLL_S = 2.0  # after each of these the state is looked at again

_begun: set[str] = set()
_lock = threading.Lock()


def connect_in_background(native: ModuleType, key: str, processes: Sequence[int], me: int) -> None:
    """Begins to join `processes` (by rank) to the communicator `key`, unless that was begun before.

    Once only: a second segment would replace the one that the others have been told of."""
    with _lock:
        if key in _begun:
            return
        _begun.add(key)
    members = list(dict.fromkeys(processes))
    # One thread for each: with a common one, two leaders could wait for each other.
    threading.Thread(
        target=_connect, args=(native, key, members, me), name="jaxring-connect", daemon=True
    ).start()


def _connect(native: ModuleType, key: str, members: list[int], me: int) -> None:
    prefix = "jaxring/mesh/" + hashlib.sha256(key.encode()).hexdigest()[:32]
    try:
        store = JaxStore()
    except errors.Error as e:
        native.fail_communicator(key, "UsageError", e.message)
        return
    try:
        _join(native, store, prefix, key, members, me)
        _watch(native, store, prefix, key)
    except (
        Exception
    ) as e:  # whatever it is, it must reach the calls that wait for this communicator
        if native.communicator_state(key) == "missing":
            return  # closed, as the process ends
        error = e if isinstance(e, errors.Error) else errors.parse(str(e))
        kind = type(error).__name__ if error is not None else "PeerError"
        message = error.message if error is not None else f"{key} cannot be joined: {e}"
        native.fail_communicator(key, kind, message)
        with contextlib.suppress(Exception):  # jax.distributed may have been shut down
            store.set(f"{prefix}/failure", json.dumps([kind, message]))


def _join(
    native: ModuleType,
    store: bootstrap.KeyValueStore,
    prefix: str,
    key: str,
    members: list[int],
    me: int,
) -> None:
    identity = bootstrap.host_identity()
    table = None
    while table is None and native.communicator_state(key) == "connecting":
        with contextlib.suppress(errors.TimeoutError):
            table = bootstrap.exchange(store, prefix, members, me, identity, POLL_S)
    if table is None:
        return
    bootstrap.require_one_host(table)
    if me == members[0]:
        store.set(f"{prefix}/segment", native.segment_publish(key))
        return
    while native.communicator_state(key) == "connecting":
        try:
            address = store.get(f"{prefix}/segment", POLL_S)
        except TimeoutError:
            continue
        native.segment_attach(key, address)
        return


def _watch(native: ModuleType, store: bootstrap.KeyValueStore, prefix: str, key: str) -> None:
    """Until all have joined: learns of another member's failure to do so."""
    while native.communicator_state(key) == "connecting":
        with contextlib.suppress(TimeoutError):
            kind, message = json.loads(store.get(f"{prefix}/failure", POLL_S))
            native.fail_communicator(key, kind, message)
