"""allreduce under differentiation and control flow, against lax and numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxring

X = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
LAX = {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax, "min": lax.pmin}


def close(a, b, **kw):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6, **kw), a, b)


# -- Derivatives -----------------------------------------------------------------------------------


def quadratic(reduce, op):
    """A nonlinear function around a reduction, of a row."""
    return lambda x: jnp.sum(jnp.sin(reduce(x * x[::-1], op)) * x)


def ours(x, op):
    return jaxring.allreduce(x, "x", op)


def theirs(x, op):
    return LAX[op](x, "x")


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_derivatives_inside_equal_lax(spmd, op):
    t = np.cos(X)

    def all_derivatives(reduce):
        f = quadratic(reduce, op)

        def g(x, t):
            return (
                jax.grad(f)(x),
                jax.jvp(f, (x,), (t,)),
                jax.linearize(f, x)[1](t),
                jax.vjp(lambda x: reduce(x, op), x)[1](spmd_invariant(t, spmd))[0],
                jax.jvp(jax.grad(f), (x,), (t,))[1],
            )

        return g

    close(spmd(all_derivatives(ours), X, t), spmd(all_derivatives(theirs), X, t))


def spmd_invariant(t, spmd):
    """A cotangent of the type that a reduced value has."""
    return lax.pmax(t, "x") if spmd.check_vma else t


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_gradient_outside_equals_lax(spmd, op):
    def gradient(reduce):
        f = spmd.map(lambda x: reduce(x**2, op) * x)
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))))(X)

    close(gradient(ours), gradient(theirs))


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_hessian_equals_lax(spmd, op):
    def hessian(reduce):
        return spmd(jax.hessian(quadratic(reduce, op)), X[:, 0])

    close(hessian(ours), hessian(theirs))


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("axes", ["x", ("x", "y"), ("y", "x")], ids=str)
def test_transpose_twice_is_the_map(grid, op, axes):
    x = np.arange(12.0, dtype=np.float32).reshape(6, 2)

    def twice(x):
        def f(z):
            y = jaxring.allreduce(z, axes, op)
            return grid.vary(y) if grid.check_vma else y

        once = jax.linear_transpose(f, x)
        back = jax.linear_transpose(lambda ct: once(ct)[0], f(x))
        return f(x), back(x)[0]

    expected, got = grid(twice, x)
    close(got, expected)


@pytest.mark.parametrize("op", ["max", "min"])
def test_ordered_ops_split_the_tangent_over_ties(spmd, op):
    sign = 1 if op == "max" else -1
    x = sign * np.array([[3, 1, 2], [3, 5, 2], [0, 5, 2], [3, 4, 2]], np.float32)
    t = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    f = functools.partial(ours, op=op)
    y, dy = spmd(lambda x, t: jax.jvp(f, (x,), (t,)), x, t)
    winners = x == getattr(x, op)(0)
    np.testing.assert_array_equal(y, np.broadcast_to(getattr(x, op)(0), x.shape))
    close(dy, np.broadcast_to((t * winners).sum(0) / winners.sum(0), x.shape))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(spmd.map(f)(x)[0])))(x)
    close(gradient, winners / winners.sum(0))


def test_product_rule_with_zeros(spmd):
    x = np.array([[2, 0, 0], [3, 4, 0], [5, 6, 7], [1, 2, 3]], np.float32)
    t = np.ones_like(x)
    _, dy = spmd(lambda x, t: jax.jvp(lambda x: ours(x, "prod"), (x,), (t,)), x, t)
    _, expected = jax.jvp(lambda x: jnp.prod(x, 0), (x,), (t,))
    close(dy, np.broadcast_to(expected, x.shape))


def test_tangents_that_are_zero_cost_nothing(spmd):
    def f(x, y):
        def g(x):
            a, b, _ = jaxring.allreduce([x, y, (y > 0).astype(jnp.int32)], "x")
            return jnp.sum(a * b)

        return jax.grad(g)(x)

    text = jax.jit(spmd.map(f)).lower(X[:, 0], X[:, 1]).as_text()
    calls = re.findall(r"custom_call @jaxring_collective.*?: \((.*)\) ->", text)
    # Forward a and b together (the third is unused); backward, where a sum's transpose is a sum,
    # only the cotangent of x.
    assert [call.count("tensor<5xf32>") for call in calls] == ([2] if spmd.check_vma else [2, 1])


def test_complex_gradient(spmd):
    z = (X[:, 0] + 1j * X[:, 1]).astype(np.complex64)

    def gradient(reduce):
        return spmd(jax.grad(lambda z: jnp.sum(jnp.abs(reduce(z, "sum")) ** 2)), z)

    close(gradient(ours), gradient(theirs))


def test_grad_inside_vmap_axis():
    def gradient(reduce):
        f = lambda x: jnp.sum(jnp.sin(reduce(x, "v")))  # noqa: E731
        return jax.vmap(jax.grad(f), axis_name="v")(X)

    close(gradient(jaxring.allreduce), gradient(lax.psum))


def test_grad_over_vmap_and_mesh_axes(spmd):
    def f(x):
        return jnp.sum(jnp.sin(jaxring.allreduce(x, ("v", "x"), "mean")))

    def reference(x):  # over one axis at a time, which lax can do
        return jnp.sum(jnp.sin(jaxring.allreduce(jax.lax.pmean(x, "v"), "x", "mean")))

    if spmd.check_vma:  # lax.psum over a vmap axis crashes there
        y = spmd(jax.vmap(jax.grad(f), axis_name="v"), X)
        assert np.isfinite(y).all()
    else:
        close(
            spmd(jax.vmap(jax.grad(f), axis_name="v"), X),
            spmd(jax.vmap(jax.grad(reference), axis_name="v"), X),
        )


# -- Control flow and other transforms -------------------------------------------------------------


def scanned(reduce, unroll=1):
    def step(carry, x):
        carry = jnp.tanh(reduce(carry * x, "mean") + x)
        return carry, reduce(carry, "sum")

    return lambda x: lax.scan(step, x[0], x, unroll=unroll)


@pytest.mark.parametrize("unroll", [1, 3])
def test_scan_and_its_gradient(spmd, unroll):
    def values(reduce):
        f = scanned(reduce, unroll)
        return lambda x: (f(x), jax.grad(lambda x: jnp.sum(f(x)[0]))(x))

    close(spmd(values(ours), X), spmd(values(theirs), X))


def test_while_loop(spmd):
    def f(x):
        def body(state):
            i, total = state
            return i + 1, total + jaxring.allreduce(spmd.vary(total) + x, "x")

        start = jaxring.allreduce(jnp.zeros_like(x) * x, "x")
        return lax.while_loop(lambda state: state[0] < 3, body, (0, start))[1]

    expected = np.zeros_like(X[0])
    for _ in range(3):
        expected = expected + (4 * expected + X.sum(0))
    close(spmd(f, X), np.broadcast_to(expected, X.shape))


@pytest.mark.parametrize("positive", [True, False])
def test_cond_with_a_uniform_predicate(spmd, positive):
    def f(x):
        flag = jaxring.allreduce(jnp.abs(x).sum(), "x") > (0 if positive else 1e9)
        return lax.cond(flag, lambda: ours(x, "sum"), lambda: ours(x, "max"))

    close(spmd(f, X), np.broadcast_to(X.sum(0) if positive else X.max(0), X.shape))


def test_remat_and_custom_vjp(spmd):
    def gradient(reduce, wrap):
        return spmd(jax.grad(lambda x: jnp.sum(wrap(lambda x: jnp.sin(reduce(x, "sum")))(x))), X)

    def double_backward(f):
        wrapped = jax.custom_vjp(f)
        wrapped.defvjp(
            lambda x: jax.vjp(f, x), lambda pull, ct: jax.tree.map(lambda g: 2 * g, pull(ct))
        )
        return wrapped

    expected = gradient(theirs, lambda f: f)
    close(gradient(ours, jax.checkpoint), expected)
    close(gradient(ours, double_backward), 2 * expected)


def test_inner_jit_called_twice(spmd):
    inner = jax.jit(lambda x: ours(x, "sum"))
    close(spmd(lambda x: inner(x) + 2 * inner(x * 2), X), np.broadcast_to(5 * X.sum(0), X.shape))


def test_many_independent_calls_keep_apart(spmd):
    got = spmd(lambda x: [jaxring.allreduce(x * k, "x") for k in range(12)], X)
    for k, y in enumerate(got):
        close(y, np.broadcast_to(k * X.sum(0), X.shape))
