"""Joins the processes of a mesh's communicators while their programs compile.

Processes lower the same program at different times, so nothing here has a deadline of its own: the
first execution waits, natively, for `timeout_s`. The store is jax.distributed's."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from types import ModuleType

from jaxring import bootstrap, errors
from jaxring._src.store import JaxStore

POLL_S = 5.0  # after each of these the state is looked at again

_connecting: set[str] = set()
_lock = threading.Lock()


def connect_in_background(native: ModuleType, key: str, processes: Sequence[int], me: int) -> None:
    """Begins to join `processes` (by rank) to the communicator `key`, unless that has begun
    already."""
    with _lock:
        if key in _connecting:
            return
        _connecting.add(key)
    members = list(dict.fromkeys(processes))
    # One thread for each: with a common one, two leaders could wait for each other.
    threading.Thread(
        target=_connect, args=(native, key, members, me), name="jaxring-connect", daemon=True
    ).start()


def _connect(native: ModuleType, key: str, members: list[int], me: int) -> None:
    try:
        store = JaxStore()
        prefix = "jaxring/mesh/" + hashlib.sha256(key.encode()).hexdigest()[:32]
        _join(native, store, prefix, key, members, me)
    except errors.Error as e:
        native.fail_communicator(key, type(e).__name__, e.message)
    except (
        Exception
    ) as e:  # e.g. jax.distributed has been shut down: the waiting call has to say so
        native.fail_communicator(key, "PeerError", f"{key}: its processes cannot be joined ({e})")
    finally:
        with _lock:
            _connecting.discard(key)


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
        try:
            table = bootstrap.exchange(store, prefix, members, me, identity, POLL_S)
        except errors.TimeoutError:
            continue
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
