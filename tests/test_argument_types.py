"""Arguments of a wrong type are a UsageError that says what was expected and what came, not a
TypeError from somewhere below."""

import threading
from typing import Any

import jax.numpy as jnp
import pytest

import jaxring as typed

jaxring: Any = typed  # what a type checker would refuse is the point here
elastic, optim, testing = jaxring.elastic, jaxring.optim, jaxring.testing
optax: Any = pytest.importorskip("optax")
SGD = optax.sgd(0.1)
CALLS = {
    "elastic min_ranks": (lambda: elastic.run(min_ranks="2"), "integer min_ranks >= 1"),
    "elastic timeout_s": (lambda: elastic.run(timeout_s=-1), "timeout_s: expected a number of sec"),
    "elastic function": (
        lambda: elastic.run(3),
        r"expected a function train\(state, comm\)",
    ),
    "elastic state": (
        lambda: elastic.run(lambda state, comm: 1)({"step": 0}),
        "as a jaxring.elastic.State, got dict; make one: State",
    ),
    "elastic batches": (
        lambda: next(elastic.join(3, None)),
        "an iterable of batches first, got int",
    ),
    "tuned function": (lambda: jaxring.tuning.tune_step(3), "expected a function first, got 3"),
    "state lock": (
        lambda: elastic.State(step=0, own={"lock": threading.Lock()}),
        r"\['own'\]\['lock'\], a lock, cannot be pickled",
    ),
    "state function": (lambda: elastic.State(f=lambda x: x), r"\['f'\], a function, cannot be"),
    "optim swapped": (lambda: optim.distributed("dp", SGD), "a transformation of optax first"),
    "optim axis": (
        lambda: optim.distributed(SGD, None),
        "the name of an axis, .* got None",
    ),
    "optim chain": (lambda: optim.allreduce_gradients(SGD), "got a transformation"),
    "init timeout_s": (lambda: jaxring.init(timeout_s=-1), "init: timeout_s: expected a number"),
    "init rank": (
        lambda: jaxring.init("0", 2, "h:1"),
        "rank and world_size as integers",
    ),
    "init coordinator": (
        lambda: jaxring.init(0, 2, 5000),
        'coordinator as "host:port"',
    ),
    "config file": (lambda: jaxring.config.load(None), "None is no file of settings"),
    "spawn": (lambda: testing.spawn(threading.Lock, "2"), "n >= 1 processes, got '2'"),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_a_wrong_type(call):
    function, sentence = CALLS[call]
    with pytest.raises(jaxring.UsageError, match=sentence):
        function()


@pytest.mark.parametrize("collective", ["allreduce", "all_gather", "broadcast", "barrier"])
def test_arguments_of_a_collective(collective):
    call = getattr(jaxring, collective)
    x = jnp.ones(3)
    with jaxring.init() as comm:
        arguments = (comm, x) if collective == "barrier" else (x, comm)
        with pytest.raises(jaxring.UsageError, match="expected name as a string or None, got 5"):
            call(*arguments, name=5)
        with pytest.raises(jaxring.UsageError, match="after the operand, got an array"):
            call(*((x, x) if collective == "barrier" else (comm, x)))


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_abort_without_a_reason_aborts(reason):
    """As of an exception without a message, comm.abort(str(e)): the others wait."""
    with jaxring.init() as comm:
        comm.abort(reason)
        assert "no reason given" in comm.state()


def test_elastic_run_without_parentheses():
    @elastic.run
    def train(state, comm):
        """Counts."""
        return state.step + comm.world_size

    assert (train(elastic.State(step=3)), train.__doc__) == (4, "Counts.")
