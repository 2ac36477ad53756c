"""The serving half of our own key-value store: values, and who of a group is present.

See jaxring/_src/store.py for the protocol and for what it protects against."""

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
from typing import Any

from jaxring import errors
from jaxring._src import threads
from jaxring._src.elastic_server import Gatherings

MESSAGE_BYTES_MAX = 1 << 20
KEY_CHARS_MAX = 1024
HANDSHAKE_S = 10.0  # a stranger who connects and then says nothing is dropped after this
WAIT_S_MAX = 30.0  # of one request; a client that waits longer asks again
RETRY_S = 0.05  # after an accept that has failed
STRANGERS_MAX = 256  # connections that have not yet proved that they know the secret
GONE_KEY = "elastic/gone/"  # and a launcher's name: how many of its processes have ended for good
GOODBYE = b"goodbye"  # of a member that is present; without it, its end is a loss


def framed(sock: socket.socket, timeout_s: float) -> Connection:
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
        self._present: dict[tuple[str, int], object] = {}  # the connection that tells of a member
        self._lost: dict[str, dict[int, dict[str, Any]]] = {}  # by group
        self._gatherings = Gatherings(self._gone)
        self._changed = threading.Condition()
        self._closed = False
        self._strangers = threading.BoundedSemaphore(STRANGERS_MAX)
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        try:
            self._thread = threads.start(self._accept, "jaxring-store")
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        self._closed = True
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
                if self._closed:
                    return
                time.sleep(RETRY_S)  # no descriptor free, or a client that has gone again
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            while not self._closed:
                with contextlib.suppress(errors.UsageError):
                    threads.start(self._serve, "jaxring-store-client", sock)
                    break
                time.sleep(RETRY_S)  # the system may give one when others have ended
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        # Whatever a stranger or a dying rank does ends this connection only.
        with contextlib.suppress(
            OSError, EOFError, AuthenticationError, AssertionError, ValueError
        ):
            try:
                connection = framed(sock, HANDSHAKE_S)
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
            finally:
                self._strangers.release()
                sock.close()
            with contextlib.closing(connection):
                request = _checked(connection.recv_bytes(MESSAGE_BYTES_MAX))
                if request.get("op") == "join" and _names_a_member(request):
                    self._attend(connection, request)
                elif request.get("op") == "gather" and _names_a_gathering(request):
                    self._gatherings.attend(connection, request)
                else:
                    connection.send_bytes(json.dumps(self._answer(request)).encode())

    def _attend(self, connection: Connection, request: dict[str, Any]) -> None:
        """Until the member says goodbye, or its process ends without, which is a loss."""
        group, member = request["key"], request["member"]
        with self._changed:
            self._present[group, member] = connection
            self._lost.get(group, {}).pop(member, None)  # it has been started again
        said = b""
        try:
            connection.send_bytes(json.dumps({"ok": True}).encode())
            while not said:
                with contextlib.suppress(BlockingIOError):  # the limit of one read
                    said = connection.recv_bytes(MESSAGE_BYTES_MAX)
        except (OSError, EOFError):
            pass
        with self._changed:
            if self._present.get((group, member)) is not connection:
                return
            del self._present[group, member]
            if said != GOODBYE:
                who = {name: request.get(name) for name in ("member", "host", "pid", "how")}
                self._lost.setdefault(group, {})[member] = who
                self._changed.notify_all()

    def _gone(self) -> int:
        with self._changed:
            counts = [text for key, text in self._values.items() if key.startswith(GONE_KEY)]
        return sum(int(text) for text in counts if text.isdecimal())

    def _lost_of(self, group: object) -> list[dict[str, Any]]:
        return list(self._lost.get(str(group), {}).values())

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
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
                group = request.get("group", "")
                with self._changed:
                    self._changed.wait_for(
                        lambda: key in self._values or self._lost_of(group), wait_s
                    )
                    return {"value": self._values.get(key), "lost": self._lost_of(group)}
            case {"op": "lost", "key": group}:
                with self._changed:
                    return {"lost": self._lost_of(group)}
        return {
            "error": "expected ping, set (key, value), get (key, wait_s), lost (key), join (key, "
            "member, host, pid) or gather (key, member)"
        }


def _names_a_member(request: dict[str, Any]) -> bool:
    match request:
        case {"key": str(), "member": int(), "host": str() as host, "pid": int()}:
            how = request.get("how", "")
            return isinstance(how, str) and max(len(host), len(how)) <= KEY_CHARS_MAX
    return False


def _names_a_gathering(request: dict[str, Any]) -> bool:
    match request:
        case {"key": str(), "member": str() as member}:
            return len(member) <= KEY_CHARS_MAX
    return False


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
