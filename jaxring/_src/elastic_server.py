"""The store's server lets processes gather here: one connection for each, open as long as it takes
part, over which both sides speak JSON. jaxring/_src/elastic_seat.py is the other side."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jaxring._src.elastic_gathering import Gathering, Offer

MESSAGE_BYTES_MAX = 1 << 16
SUSPECTS_MAX = 4096
WAIT_S_MAX = 1e9


class Gatherings:
    """All gatherings of a server, by name. `gone()`: how many processes have ended for good."""

    def __init__(self, gone: Callable[[], int]):
        self._gone = gone
        self._lock = threading.Lock()
        self._by_name: dict[str, tuple[Gathering, dict[str, Connection]]] = {}

    def attend(self, connection: Connection, request: dict[str, Any]) -> None:
        """Serves one member until its connection ends, whatever ends it."""
        name, member = request["key"], request["member"]
        with self._lock:
            gathering, connections = self._by_name.get(name) or self._new(name)
            if member in connections:
                return  # a name is a random number: this is no member of ours
            connections[member] = connection
            gathering.enter(member)
            connection.send_bytes(json.dumps({"ok": True}).encode())
        finished = False
        try:
            while not finished:
                with contextlib.suppress(BlockingIOError):  # the limit of one read
                    message = connection.recv_bytes(MESSAGE_BYTES_MAX)
                    with self._lock:
                        finished = self._hear(gathering, member, _parsed(message))
        finally:
            with self._lock:
                del connections[member]
                gathering.leave(member, finished)
                gathering.look(self._gone())

    def _new(self, name: str) -> tuple[Gathering, dict[str, Connection]]:
        connections: dict[str, Connection] = {}

        def send(member: str, message: dict[str, Any]) -> None:
            # One that has just died is about to leave.
            with contextlib.suppress(OSError, KeyError):
                connections[member].send_bytes(json.dumps(message).encode())

        self._by_name[name] = Gathering(send), connections
        return self._by_name[name]

    def _hear(self, gathering: Gathering, member: str, message: Any) -> bool:
        """True if the member says that all have finished; ValueError for what means nothing."""
        match message:
            case {"do": "form", "offer": dict() as offer}:
                gathering.offer(member, _checked(offer))
            case {"do": "look"}:
                pass
            case {"do": "withdraw"}:
                gathering.look(self._gone())  # it may be time at this very moment
                gathering.withdraw(member)
            case {"do": "finish"}:
                return True
            case _:
                raise ValueError(f"unknown message {message!r}")
        gathering.look(self._gone())
        return False


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError as e:
        raise ValueError("a message of too many levels") from e


def _checked(offer: dict[str, Any]) -> Offer:
    match offer:
        case {
            "number": int() as number,
            "world_size": int() as world_size,
            "min_ranks": int() as min_ranks,
            "wait_s": int() | float() as wait_s,
            "suspects": list() as suspects,
            "row": dict() as row,
        } if (
            0 <= wait_s <= WAIT_S_MAX
            and len(suspects) <= SUSPECTS_MAX
            and all(isinstance(s, str) for s in suspects)
        ):
            return Offer(number, world_size, min_ranks, wait_s, tuple(suspects), row)
    raise ValueError(f"not an offer: {offer!r}")
