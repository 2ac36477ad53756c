"""How processes are joined natively: those of a host by a shared memory segment, those of different
hosts by connections that each side listens for at one address only."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxring import errors
from jaxring._src.interfaces import address_of
from jaxring._src.store import KeyValueStore
from jaxring.config import config


def join(
    native: Any,
    store: KeyValueStore,
    prefix: str,
    key: str,
    rows: Mapping[int, Mapping[str, Any]],
    processes: Sequence[int],
    me: int,
    get: Callable[[str], str],
) -> None:
    """Joins this process to the others of the communicator `key`; they may still be on their way
    when it returns.

    Args:
      prefix: of the names in the store.
      rows: bootstrap.host_identity by process.
      processes: by rank; `me` is this one.
      get: the store's value of this name, once it is there; may raise.
    """
    ids = [rows[p]["id"] for p in processes]
    hosts = [ids.index(i) for i in ids]  # a host goes by its first rank
    host = hosts[processes.index(me)]
    if several := len(set(hosts)) > 1:
        secret = store.secret(
            f"{prefix}/secret", lambda name: _agree(store, processes, me, name, get)
        )
        address = native.links_listen(key, hosts, _provider(), _listening_address(store), secret)
        store.set(f"{prefix}/address/{me}", address)
    if processes[host] == me:
        store.set(f"{prefix}/segment/{host}", native.segment_publish(key))
    else:
        native.segment_attach(key, get(f"{prefix}/segment/{host}"))
    if several:
        there = {p for p, h in zip(processes, hosts, strict=True) if h != host}
        addresses = {p: _checked(get(f"{prefix}/address/{p}"), p) for p in there}
        native.links_connect(key, [addresses.get(p, "") for p in processes])


def _agree(
    store: KeyValueStore, processes: Sequence[int], me: int, name: str, get: Callable[[str], str]
) -> str:
    """A secret that the first process draws; as safe as the store is."""
    if me == processes[0]:
        store.set(name, secrets.token_hex(32))
    return get(name)


def _provider() -> str:
    return "tcp" if config.transport == "auto" else config.transport


def _listening_address(store: KeyValueStore) -> str:
    """The numeric address of this host to listen at, and only there."""
    if config.interface == "auto":
        address, source = _towards(store.coordinator()), "the way to the coordinator"
    else:
        address, source = address_of(config.interface), f"interface={config.interface!r}"
    if ipaddress.ip_address(address).is_loopback:
        raise errors.UsageError(
            f"ranks are on different hosts, but {source} is the loopback ({address}), which no "
            "other host can reach: give the coordinator, or the setting interface, an address of a "
            "network that the hosts share"
        )
    return address


def _towards(coordinator: tuple[str, int] | None) -> str:
    if coordinator is None:
        raise errors.UsageError(
            "several hosts: nothing says at which address this host can be reached; set "
            "JAXRING_INTERFACE to its network interface or address"
        )
    family, _, _, _, target = socket.getaddrinfo(*coordinator, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing, but chooses a route
        return str(probe.getsockname()[0]).partition("%")[0]


def _checked(address: str, process: int) -> str:
    """What another process says that it listens at."""
    match address.split(" "):
        case [host, port] if port.isdigit() and 0 < int(port) < 65536:
            with contextlib.suppress(ValueError):
                return f"{ipaddress.ip_address(host)} {port}"
    raise errors.UsageError(
        f"process {process} gave {address!r} as the address it listens at; do all ranks run the "
        "same jaxring?"
    )
