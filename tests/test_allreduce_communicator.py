"""allreduce in communicator mode, in a world of one; several processes are in
tests/multiprocess."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)


@pytest.fixture(scope="module")
def comm():
    with jaxring.init() as comm:
        yield comm


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_value(comm, op, jit):
    np.testing.assert_array_equal(jit(lambda x: jaxring.allreduce(x, comm, op))(X), X)


def test_dtypes_and_pytrees(comm):
    tree = {"a": X, "b": X > 2, "c": [np.int8(3), 2.5, None]}
    got = jax.jit(lambda t: jaxring.allreduce(t, comm))(tree)
    assert got["b"].dtype == np.int32
    np.testing.assert_array_equal(got["b"], X > 2)
    assert got["c"][0].dtype == np.int8
    assert jaxring.allreduce(tree, comm, "mean")["b"].dtype == np.float32


def test_nothing_folds(comm):
    text = jax.jit(lambda x: jaxring.allreduce((x, 1), comm)).lower(X).as_text()
    assert text.count("@jaxring_collective") == 2
    assert 'communicator = "world' in text
    assert "group_members = dense<> : tensor<0xi64>" in text


def test_transforms(comm):
    def f(x):
        return jnp.sum(jnp.sin(jaxring.allreduce(x, comm, "mean") * 2))

    expected = 2 * np.cos(2 * X)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(f))(X), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(f, (X,), (X,))[1], (expected * X).sum(), rtol=1e-5)
    text = jax.jit(jax.grad(f)).lower(X).as_text()
    assert text.count("@jaxring_collective") == 2  # the transpose of a mean is a mean


def test_reduce_gradients_of(comm):
    def f(x):
        return jnp.sum(jaxring.reduce_gradients_of(x, comm) ** 2)

    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), 2 * X)
    assert jax.jit(jax.grad(f)).lower(X).as_text().count("@jaxring_collective") == 1


def test_scan(comm):
    def step(carry, x):
        carry = jaxring.allreduce(carry + x, comm)
        return carry, carry

    np.testing.assert_array_equal(
        jax.jit(lambda x: jax.lax.scan(step, x[0] * 0, x))(X)[1][-1], X.sum(0)
    )


def test_symbolic_shapes(comm):
    (size,) = jax.export.symbolic_shape("size")
    exported = jax.export.export(
        jax.jit(jax.grad(lambda x: jaxring.allreduce(2 * x, comm).sum())),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jaxring_collective")],
    )(jax.ShapeDtypeStruct((size, 3), np.float32))
    np.testing.assert_array_equal(exported.call(X), 2 * np.ones_like(X))


def test_groups_are_for_axes(comm):
    with pytest.raises(jaxring.UsageError, match=r"split a Communicator with comm\.split"):
        jaxring.allreduce(X, comm, axis_index_groups=[[0]])


def test_communicator_among_axes(comm, make_spmd):
    with pytest.raises(jaxring.UsageError, match="a Communicator stands alone"):
        make_spmd({"x": 2})(lambda x: jaxring.allreduce(x, ("x", comm)), X)


def test_program_for_several_devices(comm, make_spmd):
    with pytest.raises(
        jaxring.UsageError, match="computes on one device, but this program is for 2"
    ):
        make_spmd({"x": 2})(lambda x: jaxring.allreduce(x, comm), X)
    sharding = jax.NamedSharding(make_spmd({"x": 2}).mesh, jax.P("x"))
    with pytest.raises(jaxring.UsageError, match="this program is for 2"):
        jax.jit(lambda x: jaxring.allreduce(x, comm))(jax.device_put(X, sharding))


def calls_of(text):
    """(operands, results) of each call, by name."""
    found = re.findall(
        r"(%\S+?)(?::\d+)? = stablehlo.custom_call @jaxring_collective\((.*?)\)", text
    )
    return [(operands.split(", "), result) for result, operands in found]


def test_a_call_waits_for_a_result_of_the_one_before(comm):
    """Not for a scalar of its own, whose buffer XLA would give away (docs/training.md)."""

    def f(tree, y):
        first = jaxring.allreduce(tree, comm)
        second = jaxring.allreduce(y, comm)
        third = jaxring.allreduce(second * 0 + y, comm)
        return first, second, third, jaxring.allreduce(third, comm)

    operands = {"empty": np.zeros(0, np.float32), "large": X, "small": np.float32(1)}
    (first, one), (second, two), (third, three), (fourth, _) = calls_of(
        jax.jit(f).lower(operands, X).as_text()
    )
    assert len(first) == 1 + 3
    assert second[1:-1] == [f"{one}#2"]  # its smallest leaf that is not empty
    assert third[1:-1] == [two]
    assert fourth[1:] == [three]  # it is the operand anyway


def test_empty_calls_are_chained_too(comm):
    def f(x, y):
        return jaxring.allreduce(x, comm), jaxring.allreduce(y, comm)

    text = jax.jit(f).lower(np.zeros(0, np.float32), X).as_text()
    (_, one), (second, _) = calls_of(text)
    assert second[1:-1] == [f"{one}#0"]
    assert text.count("ordered = true") == 1
    empty, y = jax.jit(f)(np.zeros(0, np.float32), X)
    assert empty.shape == (0,)
    np.testing.assert_array_equal(y, X)


def test_in_place_where_the_program_computes_the_operand(comm):
    """As gradients are; an argument is copied before it is written over, so it is left alone."""
    aliased = "output_operand_alias"

    def computed(x):
        return jaxring.allreduce_done(jaxring.allreduce_start(jnp.sin(x), comm))

    def given(x):
        return jaxring.allreduce_done(jaxring.allreduce_start(x, comm))

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jaxring.reduce_gradients_of(x, comm) ** 2))(x)

    def plain(x):
        return jaxring.allreduce(jnp.sin(x), comm)

    ways = computed, given, gradient, plain
    found = [aliased in jax.jit(f).lower(X).as_text() for f in ways]
    assert found == [True, False, True, False]
    x = jnp.asarray(X)
    np.testing.assert_allclose(jax.jit(computed)(x), np.sin(X), rtol=1e-6)
    np.testing.assert_array_equal(x, X)
