import builtins
import pickle

import jax
import jax.numpy as jnp
import pytest

import jaxring
from jaxring import errors
from jaxring._src import native_facts

KINDS = [
    errors.UsageError,
    errors.UnboundAxisError,
    errors.MismatchError,
    errors.TimeoutError,
    errors.PeerError,
    errors.AbortedError,
]


def test_native_kinds_are_ours():
    native = set(native_facts.lists()["error_kinds"])
    # UnboundAxisError is raised while tracing only, so native code doesn't know it.
    assert native == {kind.__name__ for kind in KINDS} - {"UnboundAxisError"}


def test_bases():
    assert issubclass(jaxring.UsageError, ValueError)
    assert issubclass(jaxring.UnboundAxisError, NameError)
    assert issubclass(jaxring.UnboundAxisError, jaxring.UsageError)
    assert issubclass(jaxring.TimeoutError, builtins.TimeoutError)
    assert all(issubclass(kind, jaxring.Error) for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_survive_pickle(kind):
    error = pickle.loads(pickle.dumps(kind("a sentence", missing_ranks=[2, 3], pid=7)))
    assert type(error) is kind
    assert str(error) == error.message == "a sentence"
    assert error.missing_ranks == (2, 3)
    assert error.pid == 7
    assert error.rank is error.host is error.call is error.sequence is error.signatures is None


def test_unknown_attribute():
    with pytest.raises(TypeError, match="colour"):
        errors.Error("a sentence", colour="red")


@pytest.mark.parametrize("kind", KINDS)
def test_from_exception_finds_the_kind(kind):
    text = (
        f"INTERNAL: jaxring.{kind.__name__}: allreduce 'g': 4 expected, 3 came\nmore of XLA's text"
    )
    found = errors.from_exception(jax.errors.JaxRuntimeError(text))
    assert type(found) is kind
    assert str(found) == "allreduce 'g': 4 expected, 3 came"
    assert isinstance(found.__cause__, jax.errors.JaxRuntimeError)


def test_from_exception_looks_at_causes():
    error = RuntimeError("step 3 failed")
    error.__cause__ = RuntimeError("jaxring.PeerError: the process of rank 1 has died")
    assert isinstance(errors.from_exception(error), jaxring.PeerError)


def test_from_exception_leaves_others_alone():
    stranger, typed = KeyError("x"), jaxring.PeerError("y")
    assert errors.from_exception(stranger) is stranger
    assert errors.from_exception(typed) is typed


def test_from_exception_of_a_real_one():
    """Two devices of one process: the second never comes, so the first one's wait ends."""
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )

    def only_first(x):
        first = jax.lax.axis_index("x") == 0
        return jax.lax.cond(first, lambda x: jaxring.allreduce(x, "x"), lambda x: x, x)

    f = jax.jit(
        jax.shard_map(
            only_first,
            mesh=mesh,
            in_specs=jax.P("x"),
            out_specs=jax.P("x"),
            check_vma=False,
        )
    )
    with jaxring.config.override(timeout_s=0.5), pytest.raises(jax.errors.JaxRuntimeError) as e:
        f(jnp.ones(2)).block_until_ready()
    error = errors.from_exception(e.value)
    assert isinstance(error, jaxring.TimeoutError | jaxring.MismatchError)
    if isinstance(error, jaxring.TimeoutError):
        assert error.missing_ranks == (1,)
