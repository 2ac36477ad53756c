"""What takes turns in `jaxring bench`: a compiled call, its operand and its times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

# For each of a contender's programs, at least two calls. Long enough for the scheduler, which may
# have put the processes on one core while they waited for each other in the peer's turn.
TURN_S = 0.03
SETTLING_CALLS = 5  # untimed, at a turn's beginning


@dataclass
class Contender:
    """One implementation, compiled, with its input in place."""

    name: str
    call: Callable[[Any], Any]
    operand: Any
    once: Callable[[Any], Any] | None = None  # of a slope: the same with one operation
    consumes: bool = False  # the operand, so that a result is the next one
    times_s: list[float] = field(default_factory=list)
    once_s: list[float] = field(default_factory=list)
    calls: int = 2  # in a turn, of each program; equal in all processes

    def warm_up(self, calls: int) -> None:
        for call in filter(None, (self.call, self.once)):
            for _ in range(calls):
                self.run(call)

    def run(self, call: Callable[[Any], Any]) -> None:
        result = call(self.operand)
        if isinstance(result, tuple):
            jax.block_until_ready(result)
        else:  # the way through a pytree takes microseconds
            result.block_until_ready()
        if self.consumes:
            self.operand = result

    def calls_in_a_turn(self) -> int:
        """As long as this process's calls take now."""
        times_s = []
        for _ in range(SETTLING_CALLS):
            start = time.perf_counter()
            self.run(self.call)
            times_s.append(time.perf_counter() - start)
        return max(2, int(TURN_S / statistics.median(times_s)))

    def take_turn(self) -> None:
        """Times each call until its result is there, and the freeing of that result."""
        for call, times_s in ((self.call, self.times_s), (self.once, self.once_s)):
            if call is None:
                continue
            for _ in range(min(SETTLING_CALLS, self.calls)):
                self.run(call)
            for _ in range(self.calls):
                start = time.perf_counter()
                self.run(call)
                times_s.append(time.perf_counter() - start)

    def forget_turn(self) -> None:
        """The latest one."""
        for times_s in (self.times_s, self.once_s):
            del times_s[-self.calls :]

    def median_us(self, chain: int) -> float:
        return self._per_operation_us(statistics.median(self.times_s), chain)

    def spread_us(self, chain: int) -> tuple[float, float]:
        first, _, third = statistics.quantiles(self.times_s, n=4)
        return self._per_operation_us(first, chain), self._per_operation_us(third, chain)

    def _per_operation_us(self, time_s: float, chain: int) -> float:
        """Of a slope: what one of the operations adds to the program that has a single one."""
        if not chain:
            return 1e6 * time_s
        return 1e6 * max(0.0, time_s - statistics.median(self.once_s)) / (chain - 1)
