"""What one injection of the soak does, drawn from its own seed so that it can be replayed alone."""

from __future__ import annotations

import dataclasses
import random

DEATHS = ("kill", "exit", "segfault")
FREEZES = ("stop", "elsewhere")
MISMATCHES = ("shape", "dtype", "op", "algorithm", "order", "calls")
KINDS = (*DEATHS, *DEATHS, *FREEZES, *MISMATCHES, "abort", "leave")  # as often as they stand here
MOMENTS = ("init", "before", "during", "between", "close")
COLLECTIVES = (
    "allreduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "ppermute",
    "barrier",
)
# Elements of float32 on each rank. Up to 16 KiB travel within announcements, more through FIFOs.
ONE_SHOT, FIFO = (12, 720), (120_000, 960_000)
ALGORITHMS = ("ring", "tree", "direct", "halving_doubling", "chain", "reducer")

# In which moments a kind makes sense: what has not begun can't disagree.
_MOMENTS = {
    **dict.fromkeys(DEATHS, MOMENTS),
    **dict.fromkeys(FREEZES, ("before", "during", "between")),
    **dict.fromkeys(MISMATCHES, ("before", "between")),
    "abort": ("before", "during", "between"),
    "leave": ("before", "between"),
}
# Which collectives can differ in it; what a barrier is given may.
_WITH = {
    "shape": COLLECTIVES[:-1],
    "dtype": COLLECTIVES[:-1],
    "op": ("allreduce", "reduce_scatter", "reduce"),
    "algorithm": ("allreduce",),
}


@dataclasses.dataclass(frozen=True)
class Injection:
    """`victim` does `kind` at `moment` while all run `collective` on `size` elements.

    Attributes:
      stage: of a death during init: before it has told anybody, or with others waiting for it.
      delay_s: of what happens during: so long after the first launch.
      launches: of what happens during: how many are in flight.
      deadline_s: the setting timeout_s.
      served: the store is somebody else's, as `jaxring run` does it, not rank 0's.
    """

    number: int
    seed: int
    kind: str
    moment: str
    world_size: int
    victim: int
    collective: str
    size: int
    algorithm: str
    stage: str
    delay_s: float
    launches: int
    deadline_s: float
    served: bool

    @property
    def expected(self) -> tuple[str, ...]:
        """The kinds of error that survivors may raise; empty: none."""
        if self.moment == "init" and self.stage == "silent":
            return ("TimeoutError",)
        if self.moment == "close":
            return ()
        if self.kind in DEATHS:
            return ("PeerError",)
        if self.kind in FREEZES:
            return ("TimeoutError",)
        return ("MismatchError",) if self.kind in MISMATCHES else ("AbortedError",)

    @property
    def kills(self) -> bool:
        return self.kind in DEATHS or self.kind == "stop"


def draw(seed: int, number: int, most_ranks: int = 6) -> Injection:
    """Injection `number` of the soak with this seed: the same whichever others are run."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(KINDS)
    moment = rng.choice(_MOMENTS[kind])
    world_size = rng.randint(2, most_ranks)
    collective = rng.choice(_WITH.get(kind, COLLECTIVES))
    large = moment == "during" or rng.random() < 0.5
    size = rng.choice(FIFO if large else ONE_SHOT)
    return Injection(
        number=number,
        seed=seed,
        kind=kind,
        moment=moment,
        world_size=world_size,
        victim=rng.randrange(world_size),
        collective=collective,
        size=size,
        algorithm=rng.choice(ALGORITHMS) if collective == "allreduce" and large else "auto",
        stage=rng.choice(("silent", "table", "segment")),
        delay_s=rng.uniform(0, 0.03),
        launches=rng.randint(4, 12),
        served=rng.random() < 0.5,
        deadline_s=3.0 if kind in FREEZES or moment == "init" else 30.0,
    )
