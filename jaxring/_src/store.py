"""Key-value stores through which ranks find each other; used for set-up only, never for data.

Two implementations of one interface: the store of an initialised `jax.distributed`, and our own
over TCP, which `jaxring run`'s launcher or rank 0 serves. Ours speaks JSON over the framing of
`multiprocessing.connection`; both sides of every connection prove by an HMAC challenge that they
know the job's secret, messages have a size limit that is checked before memory is taken, and
nothing that comes from the network is ever unpickled. It neither encrypts nor signs what follows:
between hosts use a network that you trust, or WireGuard or IPsec."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

import jax

from jaxring import errors
from jaxring._src import _compat

__all__ = ["JaxStore", "KeyValueStore", "StoreServer", "TcpStore", "parse_address"]

MESSAGE_BYTES_MAX = 1 << 20
KEY_CHARS_MAX = 1024
HANDSHAKE_S = 10.0  # a stranger who connects and then says nothing is dropped after this
WAIT_S_MAX = 30.0  # of one request; a client that waits longer asks again
STRANGERS_MAX = 256  # connections that have not yet proved that they know the secret


class KeyValueStore(Protocol):
    """What set-up needs of a store. Values are text; a second `set` replaces the first."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str, timeout_s: float) -> str:
        """The value, as soon as somebody has set it; builtin TimeoutError at the deadline."""
        ...


class JaxStore:
    """The store of jax.distributed's coordination service."""

    def __init__(self) -> None:
        self._client = _compat.distributed_client()
        if self._client is None:
            raise errors.UsageError(
                "jax.distributed is not initialised: call jax.distributed.initialize() first"
            )

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

    def get(self, key: str, timeout_s: float) -> str:
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
    not block another's."""

    def __init__(self, address: tuple[str, int], secret: str):
        self.address = address
        self._secret = secret.encode()

    def set(self, key: str, value: str) -> None:
        self._request({"op": "set", "key": key, "value": value}, HANDSHAKE_S)

    def get(self, key: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = min(WAIT_S_MAX, max(0.0, deadline - time.monotonic()))
            request = {"op": "get", "key": key, "wait_s": wait_s}
            value = self._request(request, wait_s + HANDSHAKE_S)["value"]
            if value is not None:
                return value
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{key} was not set within {timeout_s:.3g} s")

    def ping(self, timeout_s: float) -> None:
        """Raises OSError, EOFError or AuthenticationError unless a server with our secret
        answers."""
        self._exchange({"op": "ping"}, timeout_s)

    def _request(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            answer = self._exchange(request, timeout_s)
        except (OSError, EOFError, AuthenticationError) as e:
            raise errors.PeerError(
                f"the store at {format_address(*self.address)} is gone "
                f"({e or type(e).__name__}); rank 0, or the launcher that served it, has ended",
                rank=0,
            ) from e
        if "error" in answer:
            raise errors.UsageError(
                f"the store at {format_address(*self.address)} refused {request['op']} of "
                f"{request.get('key')!r}: {answer['error']}"
            )
        return answer

    def _exchange(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with contextlib.closing(_connect(self.address, timeout_s)) as connection:
            answer_challenge(connection, self._secret)
            deliver_challenge(connection, self._secret)
            connection.send_bytes(json.dumps(request).encode())
            return json.loads(connection.recv_bytes(MESSAGE_BYTES_MAX))


def _connect(address: tuple[str, int], timeout_s: float) -> Connection:
    return _connection(socket.create_connection(address, timeout=timeout_s), timeout_s)


def _connection(sock: socket.socket, timeout_s: float) -> Connection:
    """Framing around a socket each of whose reads and writes ends after `timeout_s`
    (BlockingIOError)."""
    sock.setblocking(True)
    timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(sock.detach())


class StoreServer:
    """Serves a store on `host` (only there) and `port` (0: any free one, see `address`) until
    `close`."""

    def __init__(self, host: str, port: int, secret: str):
        self._secret = secret.encode()
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._strangers = threading.BoundedSemaphore(STRANGERS_MAX)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="jaxring-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        # shutdown wakes the thread in accept; close alone would not.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        # Whatever a stranger or a dying rank does ends this connection only.
        with contextlib.suppress(
            OSError, EOFError, AuthenticationError, AssertionError, ValueError
        ):
            try:
                connection = _connection(sock, HANDSHAKE_S)
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
            finally:
                self._strangers.release()
                sock.close()
            with contextlib.closing(connection):
                request = connection.recv_bytes(MESSAGE_BYTES_MAX)
                connection.send_bytes(json.dumps(self._answer(request)).encode())

    def _answer(self, text: bytes) -> dict[str, Any]:
        match _checked(text):
            case {"op": "ping"}:
                return {"ok": True}
            case {"op": "set", "key": key, "value": str(value)}:
                with self._changed:
                    self._values[key] = value
                    self._changed.notify_all()
                return {"ok": True}
            case {"op": "get", "key": key, "wait_s": int() | float() as wait_s} if (
                0 <= wait_s <= WAIT_S_MAX
            ):
                with self._changed:
                    self._changed.wait_for(lambda: key in self._values, wait_s)
                    return {"value": self._values.get(key)}
        return {"error": "expected ping, set (key, value) or get (key, wait_s)"}


def _checked(text: bytes) -> dict[str, Any]:
    """The request in `text`, or an empty one if it isn't one."""
    try:
        request = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(request, dict):
        return {}
    key, wait_s = request.get("key", ""), request.get("wait_s", 0)
    if not isinstance(key, str) or len(key) > KEY_CHARS_MAX:
        return {}
    if isinstance(wait_s, bool) or (isinstance(wait_s, float) and not math.isfinite(wait_s)):
        return {}
    return request
