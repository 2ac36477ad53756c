"""What one run of the elastic soak does: drawn from its own seed, so that it can be run alone."""

from __future__ import annotations

import dataclasses
import random

STEPS = 24
GATHER_AT = 18  # before this step those that have been lost are waited for
DEADLINE_S = 4.0  # the setting timeout_s

# Where in a step; or, for those below, in an epoch's beginning or at the training's end.
MOMENTS = ("before", "during", "after", "prepared", "voting", "voted")
FORMING = ("joining", "syncing")
ENDING = ("ending",)


@dataclasses.dataclass(frozen=True)
class Event:
    """`kind` comes over a process: the `again`-th successor (0: the first) of rank `slot`.

    Attributes:
      kind: "kill"; "freeze" for `seconds`, longer than the deadline; "nap", shorter.
      moment: in step number `step`, or when it is for the second time that an epoch is formed.
      delay_s: of those "during" a step or while "voting": so long after its beginning.
    """

    kind: str
    slot: int
    again: int
    moment: str
    step: int
    seconds: float = 0.0
    delay_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """`keeper` is the one rank that nothing happens to: somebody has to keep the state."""

    seed: int
    number: int
    ranks: int
    min_ranks: int
    restarts: int
    keeper: int
    events: tuple[Event, ...]

    @property
    def full(self) -> int:
        """How many ranks there are once the lost ones that can come back have done so."""
        kills = sum(event.kind == "kill" for event in self.events)
        return self.ranks - max(0, kills - self.restarts)


def draw(seed: int, number: int) -> Plan:
    """Run `number` of the soak with this seed: the same whichever others are made."""
    rng = random.Random(f"elastic {seed}/{number}")
    ranks = rng.choice((2, 3, 3, 4, 4))
    min_ranks = rng.randint(1, ranks - 1)
    restarts = rng.randint(1, 3)
    keeper = rng.randrange(ranks)
    victims = [slot for slot in range(ranks) if slot != keeper]
    events: list[Event] = []
    dead = dict.fromkeys(victims, 0)  # how often each has been killed so far
    for _ in range(rng.randint(1, 4)):
        slot, kind = rng.choice(victims), rng.choice(("kill", "kill", "kill", "freeze", "nap"))
        kills = sum(dead.values())
        if kind == "kill" and kills + 1 > restarts + ranks - max(min_ranks, 1):
            kind = "nap"  # else too few would be left for ever
        moment = rng.choice((*MOMENTS, *MOMENTS, *FORMING, *ENDING))
        if moment == "ending" and any((e.slot, e.moment) == (slot, moment) for e in events):
            moment = "before"  # one frozen at the end may be killed when the others have finished,
            # and that is a failure of the job
        # A successor comes when the others have gone on for a while; it takes part from then on.
        first = 1 if dead[slot] == 0 else GATHER_AT
        seconds = {"kill": 0.0, "freeze": DEADLINE_S + rng.uniform(1, 3)}.get(
            kind, rng.uniform(0.1, 1)
        )
        events.append(
            Event(
                kind,
                slot,
                dead[slot],
                moment,
                rng.randint(first, STEPS - 1),
                seconds,
                rng.uniform(0, 0.004),
            )
        )
        if kind == "kill":
            if dead[slot] >= restarts:
                victims.remove(slot)
            dead[slot] += 1
        if not victims:
            break
    return Plan(seed, number, ranks, min_ranks, restarts, keeper, tuple(events))
