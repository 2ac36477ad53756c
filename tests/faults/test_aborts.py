"""An operator's or a program's own end of a communicator, and what a broken one says."""

import os
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import jaxring
from jaxring.testing import spawn

JITTED = (jax.errors.JaxRuntimeError, ValueError)


def error_of(call):
    try:
        jax.block_until_ready(call())
    except Exception as e:
        return jaxring.errors.from_exception(e)
    return None


def aborted(comm, size):
    """Rank 1 aborts while the others wait: small messages on their thread, large ones elsewhere."""
    reduce = jax.jit(lambda x: jaxring.allreduce(x, comm))
    x = jnp.ones(size)
    reduce(x).block_until_ready()
    begin = time.monotonic()
    if comm.rank == 1:
        time.sleep(1)
        comm.abort("the loss is NaN")
    first = error_of(lambda: reduce(x))
    waited_s = time.monotonic() - begin
    # It stays broken, says so and why, also to what is traced only now.
    again = error_of(lambda: reduce(x))
    eager = error_of(lambda: jaxring.all_gather(x, comm))
    return [(type(e).__name__, str(e)) for e in (first, again, eager)], waited_s


@pytest.mark.parametrize("size", [3, 500_000])
def test_abort_wakes_all_and_stays(size, three_ranks):
    for results in three_ranks:
        errors, waited_s = results["aborted"][size]
        assert errors == [("AbortedError", "the loss is NaN")] * 3
        assert waited_s < 8


def leaves_by_exception(comm):
    """Rank 1 leaves `with comm`; the others wait. Then all go on in a new world."""
    kinds = []
    for number in range(3):
        try:
            with comm:
                jaxring.allreduce(jnp.ones(3), comm).block_until_ready()
                if comm.rank == 1:
                    raise OverflowError(f"step {number}")
                jaxring.allreduce(jnp.ones(3), comm).block_until_ready()
        except OverflowError:
            kinds.append("own")
        except JITTED as e:
            error = jaxring.errors.from_exception(e)
            assert isinstance(error, jaxring.AbortedError)
            assert f"rank 1 left with OverflowError: step {number}" in str(error)
            kinds.append("told")
        comm = jaxring.init()
        assert float(jaxring.allreduce(jnp.float32(comm.rank), comm)) == 3
    return kinds


def test_an_exception_that_leaves_the_block(three_ranks):
    kinds = [results["left"] for results in three_ranks]
    assert kinds == [["told"] * 3, ["own"] * 3, ["told"] * 3]


def two_worlds(comm):
    """A sub-communicator breaks; that of all ranks does not."""
    pair = comm.split(comm.rank // 2)
    assert pair is not None
    if comm.rank == 0:
        pair.abort("only ours")
    if comm.rank < 2:
        error = error_of(lambda: jaxring.allreduce(jnp.ones(3), pair))
        assert isinstance(error, jaxring.AbortedError), error
    else:
        assert float(jaxring.allreduce(jnp.ones(3), pair)[0]) == 2
    return float(jaxring.allreduce(jnp.ones(3), comm)[0])


def test_what_breaks_is_one_communicator():
    assert spawn(two_worlds, 4) == [4.0] * 4


def closes_while_others_wait(comm):
    reduce = jax.jit(lambda x: jaxring.allreduce(x, comm))
    if comm.rank == 0:
        threading.Timer(1, comm.close).start()
    if comm.rank == 2:
        time.sleep(2)
    error = error_of(lambda: reduce(jnp.ones(3)))
    assert isinstance(error, jaxring.AbortedError), error
    return os.getpid(), error.rank, error.pid, error.host is not None, str(error)


def in_three_processes(comm):
    return {
        "aborted": {size: aborted(comm.split(0), size) for size in (3, 500_000)},
        "left": leaves_by_exception(comm),
        "closed": closes_while_others_wait(jaxring.init()),
    }


@pytest.fixture(scope="module")
def three_ranks():
    return spawn(in_three_processes, 3)


def test_a_close_while_others_wait_says_whose(three_ranks):
    results = [results["closed"] for results in three_ranks]
    for _, rank, pid, has_host, text in results:
        assert (rank, pid, has_host) == (0, results[0][0], True)
        assert "was closed on rank 0 (pid" in text


REASONS = ["two\nlines", "", "a\0b", "é" * 5000, "\udcff, which is no UTF-8", "x" * 3_000_000]
WHATS = ["two lines", "", "a b", "é" * 2048, "\\udcff, which is no UTF-8", "x" * 4096]


def odd_texts(comm):
    for reason, expected in zip(REASONS, WHATS, strict=True):
        own = comm.split(0)
        if comm.rank == 1:
            own.abort(reason)
        error = error_of(lambda own=own: jaxring.allreduce(jnp.ones(3), own))
        assert isinstance(error, jaxring.AbortedError), error
        assert error.rank == 1
        assert error.missing_ranks is error.signatures is None
        assert str(error).startswith(expected[:4000])
        # A broken communicator says so before it waits for anybody.
        for call in (lambda own=own: own.split(0), lambda own=own: own.all_gather_object(1)):
            again = error_of(call)
            assert isinstance(again, jaxring.AbortedError)
            assert again.rank == 1
    for name in ("é" * 300, "a" + "é" * 300, "漢" * 30_000, "two\nlines"):
        own = comm.split(0)
        error = error_of(
            lambda own=own, name=name: jaxring.allreduce(jnp.ones(2 + comm.rank), own, name=name)
        )
        assert isinstance(error, jaxring.MismatchError), error
        assert len(error.signatures or ()) == 2
        own.close()
    return [t.name for t in threading.enumerate()].count("jaxring-monitor")


def leaves_by_exit(comm, code):
    try:
        with comm:
            jaxring.allreduce(jnp.ones(3), comm).block_until_ready()
            if comm.rank == 1:
                sys.exit(code)
            time.sleep(0.5)
            jaxring.allreduce(jnp.ones(3), comm).block_until_ready()
    except SystemExit:
        return "own"
    except JITTED as e:
        return type(jaxring.errors.from_exception(e)).__name__
    return None


def in_two_processes(comm):
    return odd_texts(comm), leaves_by_exit(comm, 0), leaves_by_exit(jaxring.init(), 3)


@pytest.fixture(scope="module")
def two_ranks():
    return spawn(in_two_processes, 2)


def test_texts_that_are_no_single_line_of_utf8(two_ranks):
    """Half a character in an error was a UnicodeDecodeError, and the end of the monitor thread."""
    assert [monitors for monitors, *_ in two_ranks] == [1, 1]


def test_a_program_that_ends_well_aborts_nothing(two_ranks):
    assert [kinds for _, *kinds in two_ranks] == [["MismatchError", "AbortedError"], ["own"] * 2]
