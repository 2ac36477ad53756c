"""A rank of the elastic soak: trains, and lets come over it what the plan says.

`python elastic_rank.py SEED NUMBER`, under `jaxring run --restarts`."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import elastic_steps as steps
import jax
import jax.numpy as jnp
from elastic_plan import GATHER_AT, STEPS, Event, draw

import jaxring
from jaxring._src import elastic_run

PLAN = draw(int(sys.argv[1]), int(sys.argv[2]))
SLOT, AGAIN = int(os.environ["JAXRING_RANK"]), int(os.environ.get("JAXRING_RESTART", "0"))
PACE_S = 0.03  # of a step, so that a new process comes before the others have finished
WAITS_MAX = 600  # commits before GATHER_AT, 0.05 s or more each


def tell(**row: Any) -> None:
    # One write: two threads and a death do not tear it apart.
    os.write(1, (json.dumps({"slot": SLOT, "again": AGAIN, **row}) + "\n").encode())


class Fate:
    """The events of this process that have not come yet."""

    def __init__(self) -> None:
        self.events = [e for e in PLAN.events if (e.slot, e.again) == (SLOT, AGAIN)]
        self.step = 0
        self.formed = 0

    def at(self, moment: str) -> None:
        for event in list(self.events):
            if event.moment == moment and self.is_due(event):
                self.events.remove(event)
                if moment in ("during", "voting"):
                    threading.Timer(event.delay_s, self.come, (event,)).start()
                else:
                    self.come(event)

    def is_due(self, event: Event) -> bool:
        if event.moment in ("joining", "syncing"):
            return self.formed == 2
        return event.moment == "ending" or self.step >= event.step

    def come(self, event: Event) -> None:
        tell(event=event.kind, moment=event.moment, step=self.step)
        if event.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        command = ["sh", "-c", f"sleep {event.seconds}; kill -CONT {os.getpid()}"]
        subprocess.Popen(command, start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


fate = Fate()


def between(agree: Any) -> Any:
    """The moments of a commit's second phase, and of the training's end."""

    @functools.wraps(agree)
    def wrapped(comm: Any, finishing: bool, *numbers: Any) -> Any:
        for moment in ("ending",) if finishing else ("prepared", "voting"):
            fate.at(moment)
        result = agree(comm, finishing, *numbers)
        if not finishing:
            fate.at("voted")
        return result

    return wrapped


def before_sync(synchronise: Any) -> Any:
    @functools.wraps(synchronise)
    def wrapped(*args: Any) -> None:
        fate.at("syncing")
        synchronise(*args)

    return wrapped


def count_and_join(join: Any) -> Any:
    @functools.wraps(join)
    def wrapped(self: Any, epoch: Any) -> Any:
        fate.formed += 1
        fate.at("joining")
        return join(self, epoch)

    return wrapped


@functools.partial(jax.jit, static_argnums=0)
def mean(comm: Any, x: Any) -> Any:
    return jaxring.allreduce(x, comm, "mean", name="gradients")


@jaxring.elastic.run(min_ranks=PLAN.min_ranks, timeout_s=90)
def train(state: Any, comm: Any) -> int:
    origin = state.origin  # after a re-forming: whose residual all have now
    while state.step < STEPS:
        if state.step == GATHER_AT and comm.world_size < PLAN.full and state.waits < WAITS_MAX:
            state.waits += 1
            time.sleep(0.05)
            state.commit()
            continue
        fate.step = state.step
        time.sleep(PACE_S)
        fate.at("before")
        fate.at("during")
        sent, state.residual = steps.gradient(state.params, state.residual, state.step, comm.rank)
        reduced = mean(comm, sent)
        state.params, state.momentum = steps.update(state.params, state.momentum, reduced)
        state.history[state.step] = comm.world_size, origin
        origin, state.origin = -1, comm.rank
        state.step += 1
        fate.at("after")
        state.commit()
        tell(committed=state.step, digest=steps.digest(state.params, state.momentum))
    return comm.rank


def main() -> None:
    jaxring.config.update("deterministic", True)
    elastic_run._agree = between(elastic_run._agree)
    elastic_run.synchronise = before_sync(elastic_run.synchronise)
    elastic_run.World._join = count_and_join(elastic_run.World._join)
    values = steps.initial()
    x = jnp.zeros(steps.SIZE)
    jax.block_until_ready((steps.gradient(x, x, 0, 0), steps.update(x, x, x)))  # compiled
    state = jaxring.elastic.State(**values)
    rank = train(state)
    tell(
        finished=rank,
        digest=steps.digest(state.params, state.momentum),
        residual=steps.digest(state.residual),
        origin=state.origin,  # another rank, if the world has been formed anew since the last step
        history=state.history.tolist(),
    )


if __name__ == "__main__":
    main()
