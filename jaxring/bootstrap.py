"""How a process learns its rank and how ranks meet, before any collective can run.

`discover` reads the environment, `connect` opens the store, `exchange` is the one gathering on
which everything else stands: each rank tells who and where it is, and all get the same table."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections import Counter
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from typing import Any

import jax

from jaxring import errors
from jaxring._src import rendezvous
from jaxring._src.exchange import exchange
from jaxring._src.placement import Placement, discover
from jaxring._src.store import (
    HANDSHAKE_S,
    JaxStore,
    KeyValueStore,
    StoreServer,
    TcpStore,
    format_address,
    parse_address,
)
from jaxring.config import config

__all__ = [
    "KeyValueStore",
    "Placement",
    "connect",
    "discover",
    "exchange",
    "host_identity",
    "initialize_jax_distributed",
    "tell_left",
    "world_group",
]

WORLDS_KEY = "init/worlds"

# Server and secret live as long as the process, so that a later world of the same job finds them.
_servers: dict[Placement, StoreServer] = {}
_stores: dict[Placement, TcpStore] = {}
_worlds_over: Counter[KeyValueStore] = Counter()  # as far as this process knows


def connect(placement: Placement, timeout_s: float) -> KeyValueStore:
    """The store of a job of several ranks; rank 0 begins to serve it where nothing else does.

    Raises:
      TimeoutError: nobody with our secret answered in time.
      UsageError: rank 0 cannot listen there.
    """
    if placement.source == "jax.distributed":
        return JaxStore()
    store = _stores.get(placement)
    if store is None and placement.source == "arguments":
        _drop_stores_of_arguments(placement.coordinator)
    if placement.rank == 0 and not placement.served:
        store = store or _serve(placement)
        if placement.secret is None:  # for each world anew: a replaced rank has not seen it yet
            rendezvous.write(_file_name(placement), store.address, store.job_secret)
    elif store is None or not _answers(store):  # rank 0 may be another process now
        store = _find(placement, timeout_s)
    _stores[placement] = store
    return store


def _answers(store: TcpStore) -> bool:
    try:
        store.ping(HANDSHAKE_S)
    except (OSError, EOFError, AuthenticationError):
        return False
    return True


def _drop_stores_of_arguments(but: str | None) -> None:
    """A process that goes from world to world with a new coordinator each time keeps one only."""
    for old in [p for p in _stores if p.source == "arguments" and p.coordinator != but]:
        _worlds_over.pop(_stores.pop(old), None)
        if (server := _servers.pop(old, None)) is not None:
            server.close()


def _find(placement: Placement, timeout_s: float) -> TcpStore:
    def look() -> tuple[tuple[str, int], str] | None:
        if placement.coordinator is not None and placement.secret is not None:
            return parse_address(placement.coordinator), placement.secret
        return rendezvous.read(_file_name(placement))

    look()  # says at once if the address is no address
    return rendezvous.wait_for_server(look, placement.rank, placement.coordinator, timeout_s)


def _serve(placement: Placement) -> TcpStore:
    secret = placement.secret or secrets.token_hex(16)
    host, port = parse_address(placement.coordinator) if placement.coordinator else ("127.0.0.1", 0)
    try:
        server = StoreServer(host, port, secret)
    except OSError as e:
        raise errors.UsageError(
            f"coordinator: rank 0 cannot listen on {format_address(host, port)} "
            f"({os.strerror(e.errno or 0)}); give an address of its host and a free port"
        ) from None
    _servers[placement] = server
    return TcpStore(server.address, secret)


def _file_name(placement: Placement) -> str:
    return (
        f"coordinator {placement.coordinator}" if placement.coordinator else f"job {placement.job}"
    )


def host_identity() -> dict[str, Any]:
    """Who and where this process is. Two processes share a host, for us, if their "id" is equal.

    The kernel's boot id tells machines apart where host names repeat; other pid or network
    namespaces (containers) cannot reach each other's memory, so they count as other hosts."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    return {
        "host": socket.gethostname(),
        "id": f"{boot}/{spaces[0]}/{spaces[1]}",
        "pid": os.getpid(),
    }


@contextlib.contextmanager
def world_group(store: KeyValueStore | None, rank: int) -> Iterator[str]:
    """The group in which the store's next world joins: "init/3" is its fourth.

    The store counts: a process that replaces a dead rank has met none of the worlds that the others
    have been in. A world is over for newcomers once it has formed, or has lost a rank; after a
    deadline its ranks may go on waiting, and who is refused leaves it to the others.
    """
    if store is None:
        yield "init/0"
        return
    number = max(_worlds_over[store], _told_over(store))
    try:
        yield f"init/{number}"
    except errors.PeerError:
        _worlds_over[store] = number + 1
        _tell_over(store, number + 1)
        raise
    _worlds_over[store] = number + 1
    if rank == 0:  # the others know; they need no store any more
        _tell_over(store, number + 1)


def _told_over(store: KeyValueStore) -> int:
    try:
        return int(store.get(WORLDS_KEY, 0.0))
    except TimeoutError:
        return 0


def _tell_over(store: KeyValueStore, count: int) -> None:
    with contextlib.suppress(errors.PeerError):  # the store has gone, and with it the need to tell
        if _told_over(store) < count:
            store.set(WORLDS_KEY, str(count))


def tell_left(store: TcpStore, rank: int, pid: int) -> None:
    """By the launcher: this rank's process has ended with exit code 0. Where it has joined no world
    of the others, they need not wait for it until their deadline."""
    number = _told_over(store)
    for world in range(number + 1):
        with contextlib.suppress(TimeoutError):
            store.get(f"init/{world}/member/{rank}", 0.0)
            return
    how = "ended with exit code 0 without a call of jaxring.init(), which every rank must make"
    store.lose(f"init/{number}", rank, pid, how)


def initialize_jax_distributed() -> None:
    """Joins jax.distributed under the rank that `jaxring run` gave; rank 0 finds a free port."""
    placement = discover()
    if placement.coordinator is None:
        raise errors.UsageError("no coordinator: start this process by `jaxring run --distributed`")
    store = connect(placement, config.timeout_s)
    if placement.rank == 0:
        host, _ = parse_address(placement.coordinator)
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, 0), family=family) as free:
            store.set("jax.distributed", format_address(host, free.getsockname()[1]))
    # Several processes of a host share its GPUs: each takes the one of its number.
    several = int(os.environ.get("JAXRING_LOCAL_WORLD_SIZE", "1")) > 1
    jax.distributed.initialize(
        store.get("jax.distributed", config.timeout_s),
        num_processes=placement.world_size,
        process_id=placement.rank,
        local_device_ids=[int(os.environ["JAXRING_LOCAL_RANK"])] if several else None,
        cluster_detection_method="deactivate",
    )
