"""Deaths and freezes of processes that meet on a mesh axis, under jax.distributed."""

import json
import os
import signal
import subprocess
import sys

import pytest
from soak_world import free_port

WORLD_SIZE, VICTIM = 3, 1

# Each survivor prints what it learnt, then goes on with the other in communicator mode.
PROCESS = """
import json, os, signal, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import jaxring

me, coordinator, again, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
jax.distributed.initialize(coordinator, 3, me)
mesh = jax.make_mesh((3,), ("x",), axis_types=(AxisType.Auto,))
f = jax.shard_map(lambda x: jaxring.allreduce(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
step = jax.jit(f)
sharding = jax.sharding.NamedSharding(mesh, P("x"))
rows = np.ones((3, 50_000), np.float32)
x = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])
assert float(step(x).addressable_shards[0].data[0, 0]) == 3
jaxring.config.update("timeout_s", 3.0 if kind == "SIGSTOP" else 60.0)
error = None
for i in range(1000):
    if me == 1 and i == 5:
        os.kill(os.getpid(), getattr(signal, kind))
    try:
        step(x).block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        error = jaxring.errors.from_exception(e)
        break
assert error is not None
with jaxring.init(me // 2, 2, again) as comm:
    total = jaxring.allreduce(np.float32(me + 1), comm)
print(json.dumps([type(error).__name__, error.missing_ranks, error.pid, float(total)]), flush=True)
os._exit(0)  # XLA's coordination service would wait for the dead
"""


@pytest.mark.parametrize(("kind", "error"), [("SIGKILL", "PeerError"), ("SIGSTOP", "TimeoutError")])
def test_survivors_learn_who(kind, error):
    coordinator, again = free_port(), free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), coordinator, again, kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": ""},
            start_new_session=True,  # a stopped process of an orphaned group would be continued
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        for rank in {*range(WORLD_SIZE)} - {VICTIM}:
            out, err = processes[rank].communicate(timeout=90)
            assert processes[rank].returncode == 0, err
            name, missing_ranks, pid, total = json.loads(out.splitlines()[-1])
            assert (name, missing_ranks, total) == (error, [VICTIM], 4.0)
            assert pid == processes[VICTIM].pid
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
