"""Ctrl-C while a rank waits for a peer that does not come."""

import asyncio
import os
import signal
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import jaxring
from jaxring.testing import spawn


def press_ctrl_c_after(delay_s):
    def press():
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def wait_for(reduce):
    try:
        reduce(jnp.ones(3)).block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError):
        time.sleep(1)  # the wait has ended; Python's handler runs at its next chance


def interrupted(comm, jitted):
    reduce = lambda x: jaxring.allreduce(x, comm, name="loss")  # noqa: E731
    reduce = jax.jit(reduce) if jitted else reduce
    reduce(jnp.ones(3)).block_until_ready()
    if comm.rank == 1:  # alive, but elsewhere; then it learns what has happened
        time.sleep(3)
        try:
            reduce(jnp.ones(3)).block_until_ready()
        except Exception as e:
            return str(jaxring.errors.from_exception(e))
    press_ctrl_c_after(0.5)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait_for(reduce)
    waited_s = time.monotonic() - start
    # The communicator is broken and says why; the process goes on.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"AbortedError: .*SIGINT"):
        reduce(jnp.ones(3)).block_until_ready()
    return waited_s


def between_operations(comm):
    jaxring.allreduce(jnp.ones(3), comm).block_until_ready()
    press_ctrl_c_after(0.1)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)
    return float(jaxring.allreduce(jnp.ones(3), comm)[0])


def after_asyncio(comm):
    """asyncio.run, like each cell of a notebook, puts Python's own handler back in ours' place."""

    async def nothing():
        pass

    reduce = jax.jit(lambda x: jaxring.allreduce(x, comm))
    reduce(jnp.ones(3)).block_until_ready()
    asyncio.run(nothing())
    if comm.rank == 1:
        time.sleep(4)
        return 0.0
    press_ctrl_c_after(0.7)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait_for(reduce)
    return time.monotonic() - start


def in_turn(comm):
    between = between_operations(comm)
    waits = {jitted: interrupted(comm.split(0), jitted) for jitted in (True, False)}
    return between, waits, after_asyncio(comm.split(0))


@pytest.fixture(scope="module")
def ranks():
    return spawn(in_turn, 2)


def test_between_operations_breaks_nothing(ranks):
    assert [total for total, *_ in ranks] == [2.0, 2.0]


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_ends_the_wait_at_once(jitted, ranks):
    waited_s, other = (waits[jitted] for _, waits, _ in ranks)
    assert waited_s < 2
    assert "allreduce 'loss'" in other
    assert "was interrupted (SIGINT) on rank 0" in other


def test_after_another_handler_has_come_and_gone(ranks):
    assert ranks[0][-1] < 3
