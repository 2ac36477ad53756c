"""A process's place in the gathering that decides who belongs to an elastic world."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol

from jaxring import errors
from jaxring._src.store import MESSAGE_BYTES_MAX, TcpStore

LOOK_S = 0.1  # how often the server is asked whether it is time, which deadlines may have made it
ANSWER_S = 10.0


@dataclasses.dataclass(frozen=True)
class Member:
    """Of an epoch: its name, and what it has told the others of itself."""

    name: str
    row: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Epoch:
    """`members` in rank order; this process is `rank`."""

    number: int
    members: tuple[Member, ...]
    rank: int


class Seat(Protocol):
    """A place in a gathering."""

    def form(
        self, row: Mapping[str, Any], suspects: list[str], min_ranks: int, timeout_s: float
    ) -> Epoch | None:
        """Waits for the next epoch; None if this one has finished, on all of its ranks.

        Raises:
          AbortedError: an epoch that this process is not of has finished.
          TimeoutError: too few have come in time.
          PeerError: the store has gone.
        """
        ...

    def newcomers(self) -> bool:
        """Whether processes wait to be taken in; does not block."""
        ...

    def leave(self, finished: bool) -> None:
        """Ends it; `finished`: since all have done their work."""
        ...


class LonelySeat:
    """Of a job of one process, which has no store."""

    def __init__(self) -> None:
        self._epochs = 0

    def form(
        self, row: Mapping[str, Any], suspects: list[str], min_ranks: int, timeout_s: float
    ) -> Epoch | None:
        if min_ranks > 1:
            raise errors.UsageError(
                f"elastic.run: min_ranks is {min_ranks}, but this is a job of one process; start "
                f"it by `jaxring run -n {min_ranks} …`"
            )
        self._epochs += 1
        return Epoch(self._epochs, (Member("", dict(row)),), 0)

    def newcomers(self) -> bool:
        return False

    def leave(self, finished: bool) -> None:
        pass


class StoreSeat:
    """In the gathering `name` of a store."""

    def __init__(self, store: TcpStore, name: str, number: int, world_size: int, wait_s: float):
        """See elastic_gathering.Offer for the numbers."""
        self._member = secrets.token_hex(8)
        self._connection = store.gather(name, self._member)
        self._place = {"number": number, "world_size": world_size, "wait_s": wait_s}
        self._newcomers = False

    def form(
        self, row: Mapping[str, Any], suspects: list[str], min_ranks: int, timeout_s: float
    ) -> Epoch | None:
        offer = {**self._place, "min_ranks": min_ranks, "suspects": suspects, "row": dict(row)}
        end, withdrawn = time.monotonic() + timeout_s, False
        self._tell({"do": "form", "offer": offer})
        while True:
            match self._hear(LOOK_S):
                case {"formed": {"epoch": number, "members": rows}}:
                    return self._epoch(number, rows)
                case {"finished": True}:
                    return None
                case {"finished": False}:
                    raise errors.AbortedError(
                        "elastic.run: the other ranks have finished the training without this "
                        "process, which came too late or was frozen; it has no result"
                    )
                case {"withdrawn": {"running": running}}:
                    raise _too_few(running, min_ranks, timeout_s)
            if time.monotonic() < end:
                self._tell({"do": "look"})
            elif not withdrawn:  # it may have been formed at this moment: the server knows
                self._tell({"do": "withdraw"})
                withdrawn = True
            elif time.monotonic() > end + ANSWER_S:
                raise _gone(TimeoutError(f"no answer within {ANSWER_S:g} s"))

    def newcomers(self) -> bool:
        with contextlib.suppress(errors.PeerError):  # matters when an epoch is to be formed
            while self._hear(0) is not None:
                pass
        return self._newcomers

    def leave(self, finished: bool) -> None:
        with contextlib.suppress(OSError):  # the store may have ended
            if finished:
                self._connection.send_bytes(json.dumps({"do": "finish"}).encode())
        self._connection.close()

    def _epoch(self, number: int, rows: list[dict[str, Any]]) -> Epoch:
        self._newcomers = False  # who comes from now on is told of again
        names = [row["member"] for row in rows]
        members = tuple(Member(row["member"], row["row"]) for row in rows)
        return Epoch(number, members, names.index(self._member))

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._connection.send_bytes(json.dumps(message).encode())
        except OSError as e:
            raise _gone(e) from e

    def _hear(self, wait_s: float) -> dict[str, Any] | None:
        try:
            if not self._connection.poll(wait_s):
                return None
            message = json.loads(self._connection.recv_bytes(MESSAGE_BYTES_MAX))
        except (OSError, EOFError) as e:
            raise _gone(e) from e
        if "newcomers" in message:
            self._newcomers = True
        return message


def _gone(e: BaseException) -> errors.PeerError:
    return errors.PeerError(
        f"elastic.run: the store in which ranks meet is gone ({e or type(e).__name__}); it lives "
        "as long as `jaxring run` on host 0, or without it as rank 0",
        rank=0,
    )


def _too_few(running: int, min_ranks: int, timeout_s: float) -> errors.TimeoutError:
    if running:
        return errors.TimeoutError(
            f"elastic.run: {running} ranks are at work and have not committed within "
            f"{timeout_s:.3g} s, so that this process could not join them; commit more often or "
            "raise timeout_s"
        )
    return errors.TimeoutError(
        f"elastic.run: fewer than min_ranks={min_ranks} ranks have come within {timeout_s:.3g} s; "
        "start others, raise timeout_s or lower min_ranks"
    )
