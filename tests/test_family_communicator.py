"""Every collective in communicator mode, in a world of one; several processes are in
tests/multiprocess."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring

X = np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32)
CALLS = {
    "reduce_scatter": lambda x, c: jaxring.reduce_scatter(x, c, "mean"),
    "all_gather": lambda x, c: jaxring.all_gather(x, c),
    "all_gather_invarying": lambda x, c: jaxring.all_gather(x, c, to="invarying"),
    "all_to_all": lambda x, c: jaxring.all_to_all(x, c, 0, 1),
    "broadcast": lambda x, c: jaxring.broadcast(x, c),
    "reduce": lambda x, c: jaxring.reduce(x, c, "mean"),
    "reduce_max": lambda x, c: jaxring.reduce(x, c, "max"),
    "ppermute": lambda x, c: jaxring.ppermute(x, c, [(0, 0)]),
    "barrier": lambda x, c: jaxring.barrier(c, x),
    "psum": lambda x, c: jaxring.psum(x, c),
    "pmean": lambda x, c: jaxring.pmean(x, c),
    "pmax": lambda x, c: jaxring.pmax(x, c),
    "psum_scatter": lambda x, c: jaxring.psum_scatter(x, c, tiled=True),
    "pbroadcast": lambda x, c: jaxring.pbroadcast(x, c, 0),
    "pshuffle": lambda x, c: jaxring.pshuffle(x, c, [0]),
    "pswapaxes": lambda x, c: jaxring.pswapaxes(x, c, 0),
}
every_call = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(scope="module")
def comm():
    with jaxring.init() as comm:
        yield comm


def expected(name):
    if name.startswith("all_gather"):
        return X[None]
    return {"reduce_scatter": X[0], "all_to_all": X.T}.get(name, X)


@every_call
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_value(comm, name, jit):
    np.testing.assert_array_equal(jit(lambda x: CALLS[name](x, comm))(X), expected(name))


@every_call
def test_a_call_is_always_emitted(comm, name):
    text = jax.jit(lambda x: CALLS[name](x, comm)).lower(X).as_text()
    assert text.count("@jaxring_collective") == 1
    assert 'communicator = "world' in text


@every_call
def test_derivatives(comm, name):
    def f(x):
        return jnp.sum(jnp.sin(CALLS[name](x, comm)) ** 2)

    gradient = np.sin(2 * X)
    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), gradient, rtol=1e-4, atol=1e-6)
    _, tangent = jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(X)
    np.testing.assert_allclose(tangent, (gradient * X).sum(), rtol=1e-4)


@every_call
def test_vmap_and_scan(comm, name):
    batch = np.stack([X, 2 * X])
    f = lambda x: CALLS[name](x, comm)  # noqa: E731
    both = np.stack([expected(name), 2 * expected(name)])
    np.testing.assert_array_equal(jax.vmap(f)(batch), both)
    np.testing.assert_array_equal(
        jax.jit(lambda b: jax.lax.scan(lambda c, x: (c, f(x)), 0, b)[1])(batch), both
    )


def test_constants_do_not_fold(comm):
    got = jaxring.psum((1, np.float16(2)), comm)
    assert all(isinstance(y, jax.Array) for y in got)
    assert got[1].dtype == np.float16


def test_errors(comm):
    with pytest.raises(jaxring.UsageError, match="root 1 is out of range for 1 ranks"):
        jaxring.broadcast(X, comm, 1)
    with pytest.raises(jaxring.UsageError, match="dimension 1 has size 4, but tiled=False"):
        jaxring.reduce_scatter(X, comm, scatter_dimension=1)
