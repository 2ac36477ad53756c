"""Operands that JAX types as unreduced: what lax makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring

X = (np.arange(4 * 8 * 3).reshape(4, 8, 3) * 7919 % 251).astype(np.float32)

# name -> (ours, lax's)
CASES = {
    "sum": (lambda x: jaxring.allreduce(x, "x"), lambda x: lax.psum(x, "x")),
    "psum": (lambda x: jaxring.psum(x, "x"), lambda x: lax.psum(x, "x")),
    "mean": (lambda x: jaxring.allreduce(x, "x", "mean"), lambda x: lax.pmean(x, "x")),
    "reduce_scatter": (
        lambda x: jaxring.reduce_scatter(x, "x", tiled=True),
        lambda x: lax.psum_scatter(x, "x", tiled=True),
    ),
}


@pytest.fixture
def checked(make_spmd):
    return make_spmd({"x": 4}, check_vma=True)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(checked, name, carried):
    def value_and_gradient(f):
        def terms(x):
            return f(lax.pcast(x, "x", to="unreduced"))

        def g(x):
            return terms(x), jax.grad(lambda x: jnp.sum(terms(x) ** 2))(x)

        return checked(g, X)

    ours, theirs = CASES[name]
    expected = value_and_gradient(theirs)
    assert carried() == {}
    got = value_and_gradient(ours)
    assert sum(carried().values()) > 0
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-6)


def test_between_shard_maps():
    """An unreduced array that comes in from outside, and the type of its gradient."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        a = jax.device_put(X.reshape(4, -1), P(None, "x"))
        b = jax.device_put(X.reshape(-1, 4), P("x", None))

        def loss(reduce, a, b):
            product = jnp.dot(a, b, out_sharding=P(unreduced=frozenset({"x"})))
            reduced = jax.shard_map(reduce, in_specs=P(unreduced=frozenset({"x"})), out_specs=P())(
                product
            )
            return jnp.sum(reduced**2)

        for ours, theirs in (CASES["sum"], CASES["mean"]):
            expected, got = (
                jax.jit(jax.value_and_grad(lambda a, b, f=f: loss(f, a, b), (0, 1)))(a, b)
                for f in (theirs, ours)
            )
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, expected)
            assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, expected)


def test_other_ops_cannot_complete_a_sum(checked):
    with pytest.raises(jaxring.UsageError, match=r"unreduced sum over .*, which op 'max' cannot"):
        checked(lambda x: jaxring.allreduce(lax.pcast(x, "x", to="unreduced"), "x", "max"), X)
