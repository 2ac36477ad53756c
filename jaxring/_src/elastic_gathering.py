"""Who belongs to an elastic world: the rules, as one state machine that the store's server runs.

Processes enter and offer themselves for the next epoch; when it is time an epoch is formed of those
that wait. Old and new ones come the same way. Who has died is known from its connection; who is
frozen, from the others' errors, or because it does not come."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

Send = Callable[[str, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a process says when it asks for the next epoch.

    Attributes:
      number: its rank in the job as it was started, by which new members are ordered.
      world_size: how many processes the job was started with.
      min_ranks: how few may form an epoch.
      wait_s: how long to wait for members that neither come nor are known to be gone.
      suspects: members of its last epoch that did not come to a collective.
      row: what the others are to know of it; not looked at here.
    """

    number: int
    world_size: int
    min_ranks: int
    wait_s: float
    suspects: tuple[str, ...] = ()
    row: dict[str, Any] = dataclasses.field(default_factory=dict)


class Gathering:
    """Not thread-safe; `send(member, message)` is called for what members are to be told."""

    def __init__(self, send: Send, clock: Callable[[], float] = time.monotonic):
        self.epoch = 0
        self.roster: list[str] = []  # of the epoch, in rank order
        self.finished = False  # a member has left since all had done their work
        self._send, self._clock = send, clock
        self._present: set[str] = set()
        self._offers: dict[str, tuple[Offer, float]] = {}  # with the time at which it came

    def enter(self, member: str) -> None:
        self._present.add(member)

    def leave(self, member: str, finished: bool = False) -> None:
        """Its connection has ended, or it has said that all are done."""
        self._present.discard(member)
        self._offers.pop(member, None)
        if finished and member in self.roster:
            self.finished = True
            for waiting in list(self._offers):
                self._dismiss(waiting)

    def offer(self, member: str, offer: Offer) -> None:
        if self.finished:
            self._dismiss(member)
            return
        self._offers[member] = offer, self._clock()
        if member not in self.roster:
            for other in self._running():
                if other not in self._offers:
                    self._send(other, {"newcomers": True})

    def withdraw(self, member: str) -> None:
        if self._offers.pop(member, None) is not None:
            others = [m for m in self._running() if m != member and m not in self._offers]
            self._send(member, {"withdrawn": {"running": len(others)}})

    def look(self, gone: int = 0) -> None:
        """Forms the next epoch if it is time; `gone` processes of the job have ended for good."""
        if not self._offers:
            return
        running = self._running()
        offers = [offer for offer, _ in self._offers.values()]
        if running:
            waiting = [self._offers[member] for member in running if member in self._offers]
            if not waiting:
                return  # they take new members in at their next commit
            begun = [at for _, at in waiting]
            # Of theirs alone: one that was left out speaks of an earlier epoch.
            suspects = {s for offer, _ in waiting for s in offer.suspects}
            complete = all(m in self._offers or m in suspects for m in running)
        else:  # the first epoch, or all members of the last one have died
            begun = [at for _, at in self._offers.values()]
            complete = len(offers) >= max(offer.world_size for offer in offers) - gone
        late = self._clock() >= min(begun) + max(offer.wait_s for offer in offers)
        if (complete or late) and len(offers) >= max(offer.min_ranks for offer in offers):
            self._form()

    def _running(self) -> list[str]:
        return [member for member in self.roster if member in self._present]

    def _form(self) -> None:
        old = [member for member in self.roster if member in self._offers]
        new = [member for member in self._offers if member not in self.roster]
        new.sort(key=lambda member: self._offers[member][0].number)
        self.epoch += 1
        self.roster = old + new
        members = [{"member": m, "row": self._offers[m][0].row} for m in self.roster]
        self._offers.clear()
        for member in self.roster:
            self._send(member, {"formed": {"epoch": self.epoch, "members": members}})

    def _dismiss(self, member: str) -> None:
        """Whether it is of the epoch that has finished: one that was left out has no result."""
        self._offers.pop(member, None)
        self._send(member, {"finished": member in self.roster})
