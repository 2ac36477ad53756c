"""What an elastic job has lost, and what the launcher does about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxring._src.launched import RESTART_VARIABLE, Command, Process
from jaxring._src.outcomes import is_usage_error


@dataclasses.dataclass
class Losses:
    """Of one host.

    Attributes:
      restarts: how many more failures will be made good.
      on_gone: called with the number of processes that are missing for good.
      failed: the processes that have failed, in this order.
    """

    restarts: int
    on_gone: Callable[[int], None]
    failed: list[Process] = dataclasses.field(default_factory=list)
    gone: int = 0

    def next_of(self, process: Process) -> tuple[Command | None, str]:
        """(what to start in place of a process that has failed, what to say of it)"""
        self.failed.append(process)
        how = f"this process {process.failure().how}"
        usage = is_usage_error(process.tail)
        if usage or self.restarts == 0:
            self.gone += 1
            self.on_gone(self.gone)
            why = "; no restart is left"
            if usage:
                why = " by a UsageError, which it would meet again: it is not started again"
            return None, f"{how}{why}, the others go on without it"
        self.restarts -= 1
        times = str(process.command.restarts + 1)
        env = {**process.command.env, RESTART_VARIABLE: times}
        again = dataclasses.replace(process.command, env=env)
        return again, f"{how}; it is started again ({self.restarts} restarts left)"
