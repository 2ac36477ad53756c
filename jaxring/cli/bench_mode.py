"""The machine's two modes, and how `jaxring bench` keeps to one of them.

Two cores hand a cache line to and fro in about 100 ns on one socket, in 280 where they are far from
each other. A virtual machine can fall from 100 to 400 ns, for seconds at a time, and shared-memory
traffic is then 3 to 10 times slower. Times of the two modes don't compare, so a round counts if
process 0 found the fast mode before and after it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from jaxring._src import native_facts

SLOW_ROUND_TRIP_NS = 200  # where the usual one is shorter
OBSERVED_S = 2.0  # longer than most spells of the slow mode
PAUSE_S = 0.05

PatienceOption = Annotated[
    float,
    typer.Option(
        "--patience-s",
        min=0,
        help="Seconds in all to wait for the end of the machine's slow mode; rounds in it don't"
        " count before they have passed.",
    ),
]


def slow_round_trip_ns() -> float:
    """Above which the machine is in its slow mode: 200, or half as much again as the median of two
    seconds where most round trips are longer."""
    end = time.perf_counter() + OBSERVED_S
    trips_ns = [native_facts.cache_line_round_trip_ns() for _ in range(3)]
    while statistics.median(trips_ns) > SLOW_ROUND_TRIP_NS and time.perf_counter() < end:
        time.sleep(PAUSE_S)
        trips_ns.append(native_facts.cache_line_round_trip_ns())
    usual_ns = statistics.median(trips_ns)
    return SLOW_ROUND_TRIP_NS if usual_ns <= SLOW_ROUND_TRIP_NS else 1.5 * usual_ns


@dataclass
class Mode:
    """
    Attributes:
      patience_s: how much time may be lost to the slow mode, in all rounds of all sizes; after that
        rounds are taken as they come.
      agreed: gives process 0's word to every process; all call it in the same order.
      is_first: whether this is process 0.
      slow_ns: what `slow_round_trip_ns` said.
    """

    patience_s: float
    agreed: Callable[[int], int]
    is_first: bool
    slow_ns: float

    def rounds(self, wanted: int, run: Callable[[], None], forget: Callable[[], None]) -> int:
        """Runs `wanted` rounds, those that met the slow mode again. On process 0: how many met it
        and count nevertheless, since patience was over."""
        slow = kept = 0
        while kept < wanted:
            fast = self.agreed(self.is_first and self._wait())
            start = time.perf_counter()
            run()
            fell = self.is_first and bool(fast) and not self._is_fast()
            self.patience_s -= time.perf_counter() - start if fell else 0
            if self.agreed(fell and self.patience_s > 0):
                forget()
                continue
            slow += fell or not fast
            kept += 1
        return slow

    def _is_fast(self) -> bool:
        return native_facts.cache_line_round_trip_ns() <= self.slow_ns

    def _wait(self) -> bool:
        """Until the mode is fast; False if it is not and patience is over."""
        start = time.perf_counter()
        while not (fast := self._is_fast()) and time.perf_counter() - start < self.patience_s:
            time.sleep(PAUSE_S)
        self.patience_s -= time.perf_counter() - start
        return fast
