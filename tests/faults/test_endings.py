"""How programs end: with operations in flight, on one rank only, with an exception that nobody
catches. None of them may hang, and the rank that is to blame is named."""

import subprocess
import sys
import time

import pytest

BEGIN = """
import os, sys, time
import jax, jax.numpy as jnp, jaxring
comm = jaxring.init()
step = jax.jit(lambda x: jaxring.allreduce(x, comm))
x = jnp.ones(500_000)
step(x).block_until_ready()
"""


def run(tmp_path, program, n=2, **env):
    """(exit code, output, seconds from the first "begin" that a rank prints to the job's end)."""
    path = tmp_path / "program.py"
    path.write_text(BEGIN + "print('begin', time.monotonic(), flush=True)\n" + program)
    command = [sys.executable, "-m", "jaxring", "run", "-n", str(n), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    ended = time.monotonic()
    begins = [float(line.split()[-1]) for line in done.stdout.splitlines() if "begin" in line]
    return done.returncode, done.stdout + done.stderr, ended - min(begins)


def test_operations_in_flight(tmp_path):
    """The script ends right after it has launched its last steps: they still complete."""
    code, output, seconds = run(tmp_path, "ys = [step(x) for _ in range(8)]")
    assert code == 0, output
    assert seconds < 20


def test_operations_in_flight_that_cannot_complete(tmp_path):
    program = "if comm.rank == 0: ys = [step(x) for _ in range(8)]"
    code, output, seconds = run(tmp_path, program)
    assert seconds < 30, output
    assert code in (0, 1), output


@pytest.mark.parametrize("rank", [0, 1])
def test_sys_exit_on_one_rank(tmp_path, rank):
    program = f"if comm.rank == {rank}: sys.exit(7)\nstep(x).block_until_ready()"
    code, output, seconds = run(tmp_path, program)
    assert code == 7, output
    assert "MismatchError" in output
    assert f"rank {rank}, which has closed communicator world" in output
    assert seconds < 20


@pytest.mark.parametrize("rank", [0, 2])
def test_an_exception_that_nobody_catches(tmp_path, rank):
    program = f"if comm.rank == {rank}: raise KeyError('batch')\nstep(x).block_until_ready()"
    code, output, seconds = run(tmp_path, program, n=3)
    assert code == 1, output
    assert (
        f"jaxring.AbortedError: the program of rank {rank} ended with KeyError: 'batch'" in output
    )
    assert output.rstrip().splitlines()[-1].endswith("KeyError: 'batch'"), output[-2000:]
    assert seconds < 20


def test_a_death_with_operations_in_flight(tmp_path):
    program = """
ys = [step(x) for _ in range(4)]
if comm.rank == 1: os.kill(os.getpid(), 9)
for _ in range(200): step(x).block_until_ready()
"""
    code, output, seconds = run(tmp_path, program)
    assert code == 128 + 9, output
    assert "jaxring.PeerError" in output
    assert seconds < 20


LAST_ACT = """
import jax.numpy as jnp, jaxring
comm = jaxring.init()
jaxring.allreduce(jnp.ones(3), comm).block_until_ready()
comm.abort("the last act")
"""


def test_an_error_as_the_last_act():
    """The monitor thread hears of it while the interpreter goes: it must not abort the process."""
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", LAST_ACT], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_a_ctrl_c_that_nobody_catches(tmp_path):
    """While a rank waits: its traceback is printed, and the exit code is that of a Ctrl-C."""
    program = (
        "import signal, threading\n"
        "if comm.rank == 1: time.sleep(30)\n"
        "threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT]).start()\n"
        "step(x).block_until_ready()"
    )
    code, output, seconds = run(tmp_path, program)
    assert code == 130, output
    assert seconds < 15, output  # a second of it is the timer's
    assert "was interrupted (SIGINT) on rank 0" in output
    assert "[0] KeyboardInterrupt" in output


LATE_RANK = """
import jax, numpy as np, time
from jax.sharding import AxisType, PartitionSpec as P
import jaxring
jax.config.update("jax_num_cpu_devices", 2)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

def late(x, rank):
    time.sleep(2 * rank)
    return np.asarray(x)

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False)
def step(x):
    x = jax.pure_callback(late, jax.typeof(x), x, jax.lax.axis_index("x"))
    return jaxring.allreduce(x, "x")

step(np.ones(4, np.float32))
time.sleep(0.5)  # one rank has come
"""


@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise ValueError('enough')", 1)])
def test_a_launch_that_nobody_awaits(last, code):
    """Its late rank still finds the others, whom an exception of the program must not have sent
    away; it would wait for them until the deadline, and JAX's end for it."""
    command = [sys.executable, "-c", LATE_RANK + last]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert ("enough" in done.stderr) == bool(last)
    assert "jaxring." not in done.stderr
