"""What users of other libraries met when something went wrong; the source stands with each. Case 2
is in test_freezes.py, 5 in test_deaths.py, 6 in multiprocess/test_retrace.py."""

import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from soak_world import free_port

import jaxring
from jaxring.testing import spawn

FOUR = np.ones(4, np.float32)
SQUARE = np.ones((3, 3), np.float32)
LARGE = np.ones(2_000_000, np.float32)


def differing_calls(comm):
    """Everything in which rank 1 can differ, each time in a new world; what ranks then read."""
    pairs = {
        "shape": (lambda c: jaxring.allreduce(FOUR, c), lambda c: jaxring.allreduce(FOUR[:2], c)),
        "dtype": (
            lambda c: jaxring.allreduce(FOUR, c),
            lambda c: jaxring.allreduce(FOUR.astype(np.int32), c),
        ),
        "op": (lambda c: jaxring.allreduce(FOUR, c), lambda c: jaxring.allreduce(FOUR, c, "max")),
        "algorithm": (
            lambda c: jaxring.allreduce(FOUR, c, algorithm="direct"),
            lambda c: jaxring.allreduce(FOUR, c, algorithm="ring"),
        ),
        "collective": (lambda c: jaxring.reduce(FOUR, c), lambda c: jaxring.broadcast(FOUR, c)),
        "barrier": (lambda c: jaxring.allreduce(FOUR, c), lambda c: jaxring.barrier(c)),
        "root": (lambda c: jaxring.broadcast(FOUR, c), lambda c: jaxring.broadcast(FOUR, c, 1)),
        "dimension": (
            lambda c: jaxring.reduce_scatter(SQUARE, c),
            lambda c: jaxring.reduce_scatter(SQUARE, c, scatter_dimension=1),
        ),
        "split": (
            lambda c: jaxring.all_to_all(SQUARE, c, 0, 0),
            lambda c: jaxring.all_to_all(SQUARE, c, 1, 0),
        ),
        "order": (
            lambda c: [jaxring.allreduce(FOUR, c), jaxring.broadcast(FOUR, c)],
            lambda c: [jaxring.broadcast(FOUR, c), jaxring.allreduce(FOUR, c)],
        ),
        # Rank 2 is still in the first when the others disagree about the second.
        "late": (
            lambda c: [jaxring.reduce(LARGE, c, root=2), jaxring.allreduce(FOUR, c)],
            lambda c: [jaxring.reduce(LARGE, c, root=2), jaxring.allreduce(FOUR[:2], c)],
        ),
    }
    seen = {}
    for what, (usual, strange) in pairs.items():
        error = None
        try:
            jax.block_until_ready((strange if comm.rank == 1 else usual)(comm))
        except (jax.errors.JaxRuntimeError, ValueError) as e:
            error = jaxring.errors.from_exception(e)
        assert isinstance(error, jaxring.MismatchError), (what, error)
        seen[what] = sorted(error.signatures or ()), str(error)
        comm.close()
        comm = jaxring.init()
        np.testing.assert_array_equal(jaxring.allreduce(FOUR, comm), FOUR * comm.world_size)
    return seen


def test_ranks_that_differ(ranks):
    """Case 3, pytorch #97191: NCCL hung or returned garbage. All ranks raise with both
    signatures."""
    first, *others = [seen for seen, _ in ranks]
    assert ": barrier()" in first["barrier"][1]
    for what, (signatures, text) in first.items():
        assert len(signatures) == 2, (what, signatures)
        assert all(signature in text for signature in signatures)
        for other in others:
            assert other[what][0] == signatures


def one_batch_fewer(comm, then):
    """Rank 1 has 5 batches, the others 6."""
    step = jax.jit(lambda x: jaxring.allreduce(x, comm, "mean", name="gradients"))
    begin = 0.0
    try:
        for _ in range(5 if comm.rank == 1 else 6):
            begin = time.monotonic()
            step(FOUR).block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        return str(e), time.monotonic() - begin
    if then == "goes on":  # to something that the others reach later
        try:
            jaxring.broadcast(FOUR, comm, name="best epoch").block_until_ready()
        except (jax.errors.JaxRuntimeError, ValueError) as e:
            return str(e), 0.0
    return "", 0.0


def in_three_processes(comm):
    seen, fewer = differing_calls(comm), {}
    for then in ("ends", "goes on"):
        comm = jaxring.init()
        fewer[then] = one_batch_fewer(comm, then)
        comm.close()
    return seen, fewer


@pytest.fixture(scope="module")
def ranks():
    return spawn(in_three_processes, 3)


@pytest.mark.parametrize("then", ["ends", "goes on"])
def test_one_batch_fewer(then, ranks):
    """Case 10, pytorch #141069: the other ranks hung until a watchdog killed them."""
    for rank, (text, waited_s) in enumerate(fewer[then] for _, fewer in ranks):
        if rank == 1 and then == "ends":
            assert text == ""
            continue
        assert "jaxring.MismatchError: " in text
        assert "gradients" in text
        assert waited_s < 15  # far from the deadline
        if then == "ends":
            assert "waits for rank 1, which has closed communicator world" in text
            assert "different numbers of calls" in text
        else:
            assert "best epoch" in text


PROGRAM = """
import jax.numpy as jnp, jaxring
comm = jaxring.init()
print("sum", float(jaxring.allreduce(jnp.ones(500_000), comm)[-1]))
"""


def can_mount():
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("how", ["small", pytest.param("read-only", marks=pytest.mark.slow)])
def test_hardly_any_dev_shm(tmp_path, how):
    """Case 9, JAX-Toolbox #183: SIGBUS in containers, whose /dev/shm has 64 MiB. Ours is not
    used."""
    if not can_mount():
        pytest.skip("mounting needs root; tests/cpp/shm_test.cc tests the ways without /dev/shm")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    options = {"small": "size=4k", "read-only": "ro"}[how]
    run = f"exec {sys.executable} -m jaxring run -n 2 {path}"
    script = f"mount -t tmpfs -o {options} tmpfs /dev/shm && {run}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


def test_leftovers_of_a_killed_job(tmp_path):
    """Case 9, nccl #290. A job that is killed leaves no segment; of its meeting place a file may
    stay, which the next job neither trusts nor keeps."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    killed = "import jaxring; jaxring.init(0, 2, '%s')"
    with subprocess.Popen([sys.executable, "-c", killed % free_port()], env=env) as process:
        folder = tmp_path / f"jaxring-{os.getuid()}"
        deadline = time.monotonic() + 60
        while not list(folder.glob("*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    assert len(list(folder.glob("*.json"))) == 1
    script = f"import jaxring; jaxring.init(%d, 2, '{free_port()}'); print('joined')"
    ranks = [subprocess.Popen([sys.executable, "-c", script % rank], env=env) for rank in range(2)]
    assert [process.wait(60) for process in ranks] == [0, 0]
    assert list(folder.glob("*.json")) == []
