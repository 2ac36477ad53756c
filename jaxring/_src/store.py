"""Key-value stores through which ranks find each other; used for set-up only, never for data.

Two implementations of one interface: the store of an initialised `jax.distributed`, and our own
over TCP, which `jaxring run`'s launcher or rank 0 serves. Ours speaks JSON over the framing of
`multiprocessing.connection`; both sides of every connection prove by an HMAC challenge that they
know the job's secret, messages have a size limit that is checked before memory is taken, and
nothing that comes from the network is ever unpickled. It neither encrypts nor signs what follows:
between hosts use a network that you trust, or WireGuard or IPsec."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

import jax

from jaxring import errors
from jaxring._src import _compat
from jaxring._src.store_server import (
    GOODBYE,
    HANDSHAKE_S,
    MESSAGE_BYTES_MAX,
    WAIT_S_MAX,
    StoreServer,
    framed,
)

__all__ = [
    "MESSAGE_BYTES_MAX",
    "JaxStore",
    "KeyValueStore",
    "StoreServer",
    "TcpStore",
    "parse_address",
]


_OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class KeyValueStore(Protocol):
    """What set-up needs of a store. Values are text; a second `set` replaces the first."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str, timeout_s: float, group: str = "") -> str:
        """The value, as soon as somebody has set it; builtin TimeoutError at the deadline,
        errors.PeerError when a member of `group` is lost before."""
        ...

    def present(self, group: str, member: int) -> contextlib.AbstractContextManager[None]:
        """While inside, this process's end, or an exception that leaves, is a loss to `group`."""
        ...

    def require_all(self, group: str) -> None:
        """Raises errors.PeerError if a member of `group` has been lost."""
        ...

    def coordinator(self) -> tuple[str, int] | None:
        """Where the store is served, as far as that is known."""
        ...

    def secret(self, name: str, agree: Callable[[str], str]) -> str:
        """A secret of the job for the purpose `name`; `agree(name)` makes one by means of a store
        that has none itself."""
        ...


class JaxStore:
    """The store of jax.distributed's coordination service; all of them are the same one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JaxStore)

    def __hash__(self) -> int:
        return hash(JaxStore)

    def __init__(self) -> None:
        self._client = _compat.distributed_client()
        if self._client is None:
            raise errors.UsageError(
                "jax.distributed is not initialised: call jax.distributed.initialize() first"
            )

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    # Losses are the coordination service's own affair: it ends the survivors.
    def present(self, group: str, member: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def require_all(self, group: str) -> None:
        pass

    def coordinator(self) -> tuple[str, int] | None:
        address = _compat.distributed_coordinator()
        return None if address is None else parse_address(address)

    def secret(self, name: str, agree: Callable[[str], str]) -> str:
        return agree(name)

    def get(self, key: str, timeout_s: float, group: str = "") -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            # Short waits, because Python can't run signal handlers inside one.
            wait_s = min(1.0, max(0.001, deadline - time.monotonic()))
            try:
                return self._client.blocking_key_value_get(key, max(1, round(wait_s * 1000)))
            except jax.errors.JaxRuntimeError as e:
                if "DEADLINE_EXCEEDED" not in str(e):
                    raise
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{key} was not set within {timeout_s:g} s") from None


def parse_address(text: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6 address]:port"; UsageError for other text."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise errors.UsageError(
            "coordinator: expected host:port with a port in 1…65535, such as node0:5000, got "
            f"{text!r}"
        )
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class TcpStore:
    """Client of a StoreServer. Each request has its own connection, so that one thread's wait does
    not block another's; being present is one more, which closes when the process ends."""

    def __init__(self, address: tuple[str, int], secret: str):
        self.address = address
        self.job_secret = secret

    def set(self, key: str, value: str) -> None:
        self._request({"op": "set", "key": key, "value": value}, HANDSHAKE_S)

    def get(self, key: str, timeout_s: float, group: str = "") -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = min(WAIT_S_MAX, max(0.0, deadline - time.monotonic()))
            request = {"op": "get", "key": key, "wait_s": wait_s, "group": group}
            answer = self._request(request, wait_s + HANDSHAKE_S)
            if answer["value"] is not None:
                return answer["value"]
            _raise_if_lost(answer["lost"])
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{key} was not set within {timeout_s:.3g} s")

    @contextlib.contextmanager
    def present(self, group: str, member: int) -> Iterator[None]:
        who = {"member": member, "host": socket.gethostname(), "pid": os.getpid()}
        with self._explained():
            connection = self._open(HANDSHAKE_S)
            self._ask(connection, {"op": "join", "key": group, **who})
        with contextlib.closing(connection):
            try:
                yield
            except errors.TimeoutError:  # may be tried again
                _say_goodbye(connection)
                raise
            _say_goodbye(connection)

    def lose(self, group: str, member: int, pid: int, how: str) -> None:
        """Tells `group` that another process of this host, which was to be `member`, will not come:
        `how` continues "the process of rank 2 …"."""
        who = {"member": member, "host": socket.gethostname(), "pid": pid, "how": how}
        with self._explained(), contextlib.closing(self._open(HANDSHAKE_S)) as connection:
            self._ask(connection, {"op": "join", "key": group, **who})

    def require_all(self, group: str) -> None:
        _raise_if_lost(self._request({"op": "lost", "key": group}, HANDSHAKE_S)["lost"])

    def coordinator(self) -> tuple[str, int] | None:
        return self.address

    def gather(self, name: str, member: str) -> Connection:
        """A connection that stays: to the gathering of this name (jaxring/_src/elastic_seat.py)."""
        with self._explained():
            connection = self._open(HANDSHAKE_S)
            self._ask(connection, {"op": "gather", "key": name, "member": member})
        return connection

    def secret(self, name: str, agree: Callable[[str], str]) -> str:
        # One for each purpose, so that no code made with one helps with another.
        return hmac.new(self.job_secret.encode(), name.encode(), hashlib.sha256).hexdigest()

    def ping(self, timeout_s: float) -> None:
        """Raises OSError, EOFError or AuthenticationError unless a server with our secret
        answers."""
        self._exchange({"op": "ping"}, timeout_s)

    def _request(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with self._explained():
            answer = self._exchange(request, timeout_s)
        if "error" in answer:
            raise errors.UsageError(
                f"the store at {format_address(*self.address)} refused {request['op']} of "
                f"{request.get('key')!r}: {answer['error']}"
            )
        return answer

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, AuthenticationError) as e:
            if isinstance(e, errors.Error):
                raise
            if isinstance(e, OSError) and e.errno in _OWN_LIMITS:
                raise errors.UsageError(
                    f"this process cannot open a connection to the store ({e}); raise its limits "
                    "(ulimit -n) or close files"
                ) from e
            raise errors.PeerError(
                f"the store at {format_address(*self.address)} is gone "
                f"({e or type(e).__name__}); rank 0, or the launcher that served it, has ended",
                rank=0,
            ) from e

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with contextlib.closing(self._open(timeout_s)) as connection:
            return self._ask(connection, request)

    def _open(self, timeout_s: float) -> Connection:
        connection = _connect(self.address, timeout_s)
        try:
            answer_challenge(connection, self.job_secret.encode())
            deliver_challenge(connection, self.job_secret.encode())
        except BaseException:
            connection.close()
            raise
        return connection

    def _ask(self, connection: Connection, request: dict[str, Any]) -> dict[str, Any]:
        connection.send_bytes(json.dumps(request).encode())
        return json.loads(connection.recv_bytes(MESSAGE_BYTES_MAX))


def _connect(address: tuple[str, int], timeout_s: float) -> Connection:
    return framed(socket.create_connection(address, timeout=timeout_s), timeout_s)


def _say_goodbye(connection: Connection) -> None:
    with contextlib.suppress(OSError):  # the server may have ended
        connection.send_bytes(GOODBYE)


def _raise_if_lost(lost: list[dict[str, Any]]) -> None:
    for row in lost:
        how = row.get("how") or "ended, or left with an error, before all ranks had joined"
        raise errors.PeerError(
            f"the process of rank {row['member']} (pid {row['pid']} on {row['host']}) {how}; look "
            "at its output",
            rank=row["member"],
            host=row["host"],
            pid=row["pid"],
            missing_ranks=[row["member"]],
        )
