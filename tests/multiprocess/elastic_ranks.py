"""What the ranks of test_elastic.py run: `python elastic_ranks.py SCENARIO`, under `jaxring run`.

Each step adds 1 of rank 0, 10 of rank 1, … to `total`, which so tells who was there."""

import functools
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxring

SLOT = int(os.environ["JAXRING_RANK"])  # as it was started
AGAIN = int(os.environ.get("JAXRING_RESTART", "0"))
compiled = []


def note(event: str, duration_secs: float, **_: str | int) -> None:
    if "backend_compile" in event:
        compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(note)


@functools.partial(jax.jit, static_argnums=0)
def step(comm, total):
    own = jnp.power(10, comm.axis_index())
    return total + jaxring.allreduce(own, comm), jaxring.axis_index(comm), jaxring.axis_size(comm)


def tell(**row):
    print("ROW " + json.dumps({"slot": SLOT, "again": AGAIN, **row}), flush=True)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(seconds):
    # Its own session: the launcher ends what processes leave behind.
    command = ["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]
    subprocess.Popen(command, start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def fault(scenario, step_number):
    """What goes wrong before this step's commit."""
    if AGAIN:
        return
    match scenario, SLOT, step_number:
        case ("death", 1, 3) | ("minimum", 0, 3):
            kill()
        case "freeze", 2, 3:
            freeze(8)
        case "raises", 1, 3:
            raise ValueError("this rank's data are bad")


def wait_for_the_end_of(pid):
    while True:
        with open(f"/proc/{pid}/stat") as f:
            if f.read().rpartition(")")[2].split()[0] == "Z":  # until the launcher reaps it
                return
        time.sleep(0.05)


def main(scenario, steps, full):
    """Trains for `steps` steps, but lets new ranks come until there are `full` before the last."""
    state = jaxring.elastic.State(
        total=jnp.int32(0), step=0, worlds=np.zeros(steps, np.int32), key=jax.random.key(SLOT)
    )
    programs = {}  # compiled until the end of the first step
    pids = []

    @jaxring.elastic.run(min_ranks=1 if scenario == "raises" else 2)
    def train(state, comm):
        if scenario == "raises" and not pids:
            pids.extend(comm.all_gather_object(os.getpid()))
        while state.step < steps:
            if scenario == "raises" and state.step == steps - 1:
                wait_for_the_end_of(pids[1])  # else it would fail when this rank has ended well
            if state.step == steps - 1 and comm.world_size < full:
                time.sleep(0.05)
                state.commit()  # ends by calling train again once somebody has come
                continue
            state.total, rank, size = step(comm, state.total)
            assert (int(rank), int(size)) == (comm.rank, comm.world_size)
            state.worlds[state.step] = comm.world_size
            state.step += 1
            fault(scenario, state.step)
            state.commit()
            programs.setdefault("first step", len(compiled))
        return comm

    comm = train(state)
    tell(
        rank=comm.rank,
        total=int(state.total),
        worlds=state.worlds.tolist(),
        key=jax.random.key_data(state.key).tolist(),
        compiled_later=len(compiled) - programs["first step"],
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
