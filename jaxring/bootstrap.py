"""How a process learns its rank and how ranks meet, before any collective can run.

`discover` reads the environment, `connect` opens the store, `exchange` is the one gathering on
which everything else stands: each rank tells who and where it is, and all get the same table."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxring import errors
from jaxring._src import rendezvous
from jaxring._src.placement import Placement, discover, multi_host
from jaxring._src.store import (
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
    "require_one_host",
]

# Server and secret live as long as the process, so that a later world of the same job finds them.
_servers: dict[Placement, StoreServer] = {}
_stores: dict[Placement, KeyValueStore] = {}


def connect(placement: Placement, timeout_s: float) -> KeyValueStore:
    """The store of a job of several ranks; rank 0 begins to serve it where nothing else does.

    Raises:
      TimeoutError: nobody with our secret answered in time.
      UsageError: rank 0 cannot listen there.
    """
    if placement.source == "jax.distributed":
        return JaxStore()
    if placement not in _stores:
        serves = placement.rank == 0 and not placement.served
        _stores[placement] = _serve(placement) if serves else _find(placement, timeout_s)
    return _stores[placement]


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
    if placement.secret is None:
        rendezvous.write(_file_name(placement), server.address, secret)
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


def exchange(
    store: KeyValueStore,
    prefix: str,
    members: Sequence[int],
    me: int,
    mine: Mapping[str, Any],
    timeout_s: float,
) -> dict[int, dict[str, Any]]:
    """Gathers one small JSON object from each member; all get the same table, by member.

    Raises:
      TimeoutError: not all came in time; `missing_ranks` names them.
      UsageError: another process has come as this member.
    """
    deadline = time.monotonic() + timeout_s
    store.set(f"{prefix}/member/{me}", json.dumps(dict(mine)))
    try:
        if me == members[0]:
            rows = {}
            for member in members:
                left_s = max(0.0, deadline - time.monotonic())
                rows[member] = json.loads(store.get(f"{prefix}/member/{member}", left_s))
            store.set(f"{prefix}/table", json.dumps(rows))
        else:
            rows = json.loads(store.get(f"{prefix}/table", timeout_s))
    except TimeoutError:
        raise _missing(store, prefix, members, timeout_s) from None
    table = {int(m): row for m, row in rows.items()}
    if table[me] != dict(mine):
        raise errors.UsageError(
            f"rank {me} is taken: process {table[me].get('pid')} came as rank {me} before process "
            f"{os.getpid()}; each rank is one process that calls init once"
        )
    return table


def _missing(
    store: KeyValueStore, prefix: str, members: Sequence[int], timeout_s: float
) -> errors.TimeoutError:
    missing = []
    for member in members:
        try:
            store.get(f"{prefix}/member/{member}", 0.0)
        except TimeoutError:
            missing.append(member)
    who = (
        f"ranks {missing} of {len(members)} have not come"
        if missing
        else f"rank {members[0]} did not answer"
    )
    return errors.TimeoutError(
        f"init: {who} within {timeout_s:.3g} s; check that they run and reach jaxring.init(), or "
        "raise timeout_s",
        missing_ranks=missing or [members[0]],
    )


def require_one_host(table: Mapping[int, Mapping[str, Any]]) -> None:
    """UsageError unless all rows of an `exchange` of host_identity() lie on one host."""
    if len({row["id"] for row in table.values()}) > 1:
        names = sorted({str(row["host"]) for row in table.values()})
        raise errors.UsageError(
            f"ranks are on different hosts or in different containers ({', '.join(names)}): "
            f"{multi_host(len(table))}"
        )


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
