"""A vmap axis in a call's axes does what a mesh axis in its place does, in every position."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring

# Of an operand (8, 8, 3) on each of p ranks, at most 8.
FUNCTIONS = {
    **{
        f"reduce_scatter_{op}": lambda x, a, p, op=op: jaxring.reduce_scatter(x[:p], a, op)
        for op in ("sum", "mean", "prod", "min", "max")
    },
    **{
        f"reduce_{op}": lambda x, a, p, op=op: jaxring.reduce(x, a, op, root=p - 1)
        for op in ("sum", "mean", "prod", "min", "max")
    },
    "reduce_scatter_tiled": lambda x, a, p: jaxring.reduce_scatter(
        x, a, scatter_dimension=1, tiled=True
    ),
    "all_gather": lambda x, a, p: jaxring.all_gather(x, a, axis=1),
    "all_gather_tiled": lambda x, a, p: jaxring.all_gather(x, a, axis=2, tiled=True),
    "all_to_all": lambda x, a, p: jaxring.all_to_all(x[:p], a, 0, 1),
    "all_to_all_tiled": lambda x, a, p: jaxring.all_to_all(x, a, 1, 0, tiled=True),
    "barrier": lambda x, a, p: jaxring.barrier(a, x),
    "all_gather_invarying": lambda x, a, p: jaxring.all_gather(x, a, to="invarying"),
    "broadcast": lambda x, a, p: jaxring.broadcast(x, a, p - 2),
    "pbroadcast": lambda x, a, p: jaxring.pbroadcast(x, a, p // 2),
    "psum": lambda x, a, p: jaxring.psum(x, a),
    "pmean": lambda x, a, p: jaxring.pmean(x, a),
    "pmax": lambda x, a, p: jaxring.pmax(x, a),
}
INVARIANT = {"all_gather_invarying", "broadcast", "psum", "pmean", "pmax"}
AXES = [("v",), ("y", "v"), ("v", "x", "y"), ("x", "v", "y"), ("y", "x", "v")]
X = np.random.default_rng(0).normal(size=(2, 2, 2, 8, 8, 3)).astype(np.float32)  # x, y, v


def on_mesh(make_spmd, check_vma, f, x):
    """Results by (x, y, v), all of them mesh axes."""
    spmd = make_spmd({"x": 2, "y": 2, "v": 2}, check_vma)
    return spmd(f, x.reshape(8, *x.shape[3:]))


def under_vmap(make_spmd, check_vma, f, x, in_axes: Any = 1, **kw):
    spmd = make_spmd({"x": 2, "y": 2}, check_vma)
    mapped = jax.vmap(f, in_axes=in_axes, axis_name="v", **kw)
    rows = x.reshape(4, *x.shape[2:])
    got = spmd(mapped, np.moveaxis(rows, 1, 2) if in_axes == 1 else rows)
    return jax.tree.map(lambda y: y.reshape(8, *y.shape[2:]), got)


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), a, b)


@pytest.mark.parametrize("axes", AXES, ids="".join)
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_values(make_spmd, check_vma, axes):
    def f(x):
        return {name: g(x, axes, 2 ** len(axes)) for name, g in FUNCTIONS.items()}

    close(under_vmap(make_spmd, check_vma, f, X), on_mesh(make_spmd, check_vma, f, X))


@pytest.mark.parametrize("axes", [("v",), ("x", "v", "y")], ids="".join)
def test_operand_without_the_axis(make_spmd, axes):
    """What all ranks of the vmap axis have in common is not batched."""

    def f(x):
        return {name: g(x, axes, 2 ** len(axes)) for name, g in FUNCTIONS.items()}

    same = np.broadcast_to(X[:, :, :1], X.shape)
    got = under_vmap(make_spmd, False, f, X[:, :, 0], in_axes=None, axis_size=2)
    close(got, on_mesh(make_spmd, False, f, same))


@pytest.mark.parametrize("axes", [("x", "v", "y"), ("v", "x")], ids="".join)
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_derivatives(make_spmd, check_vma, axes):
    # Under check_vma=True the transpose of an invariant result depends on whether its axis has a
    # type, which a vmap axis has not.
    names = [n for n in FUNCTIONS if not (check_vma and n in INVARIANT)]

    def f(x):
        def derivatives(g):
            def loss(x):
                y = g(x, axes, 2 ** len(axes))
                return jnp.sum(jnp.sin(y) * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

            pulled = jax.grad(loss)
            return pulled(x), jax.jvp(functools.partial(g, a=axes, p=2 ** len(axes)), (x,), (x**2,))

        return {name: derivatives(FUNCTIONS[name]) for name in names}

    close(under_vmap(make_spmd, check_vma, f, X), on_mesh(make_spmd, check_vma, f, X))


def test_ppermute_over_a_vmap_axis():
    x = X[0, 0].reshape(4, -1)
    perm = [(0, 2), (3, 1)]
    got = jax.vmap(lambda x: jaxring.ppermute(x, "v", perm), axis_name="v")(x)
    expected = np.zeros_like(x)
    expected[[2, 1]] = x[[0, 3]]
    np.testing.assert_array_equal(got, expected)
    back = jax.vmap(
        jax.grad(lambda x: jnp.sum(jaxring.ppermute(x, "v", perm) ** 2)), axis_name="v"
    )(x)
    expected = np.zeros_like(x)
    expected[[0, 3]] = 2 * x[[0, 3]]
    np.testing.assert_allclose(back, expected)


def test_ppermute_over_several_axes(make_spmd):
    with pytest.raises(jaxring.UsageError, match=r"the vmap axis 'v' cannot be permuted together"):
        under_vmap(make_spmd, False, lambda x: jaxring.ppermute(x, ("v", "x"), [(0, 1)]), X)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, g: jaxring.all_gather(x, "v", axis_index_groups=g),
        lambda x, g: jaxring.reduce_scatter(x, "v", axis_index_groups=g),
        lambda x, g: jaxring.all_to_all(x, "v", 0, 0, axis_index_groups=g),
    ],
)
def test_groups_of_a_vmap_axis(call):
    with pytest.raises(
        jaxring.UsageError, match=r"do not go with the vmap axis 'v'; split the axis"
    ):
        jax.vmap(lambda x: call(x, [[0, 1], [2, 3]]), axis_name="v")(np.ones((4, 2, 3)))


@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (2, 0), (3, 2)], ids=str)
def test_plain_vmap(make_spmd, dims):
    """Batch dimensions in every place, against a loop."""
    x = X[..., :4, :4, :].reshape(4, 2, 4, 4, 3)  # rank, batch, (4, 4, 3)
    spmd = make_spmd({"x": 4}, False)
    names = [n for n in FUNCTIONS if n != "barrier"]

    def f(x):
        return {name: FUNCTIONS[name](x, "x", 4) for name in names}

    got = spmd(jax.vmap(f, *dims), np.moveaxis(x, 1, 1 + dims[0]))
    for i in range(2):
        expected = spmd(f, x[:, i])
        close(jax.tree.map(lambda y, i=i: np.take(y, i, 1 + dims[1]), got), expected)
