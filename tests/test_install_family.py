"""Each of lax's collectives under replacing_lax() gives what it gives outside, derivatives too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxring

SHAPE = (2, 3)  # of the mesh over "x" and "y"
RANKS = 6
PAIRS = [[0, 3], [1, 5], [4, 2]]


def rows(shape=(12, 6, 4), dtype=np.float32):
    """Distinct small integers, exact in every sum."""
    numbers = np.arange(RANKS * np.prod(shape)).reshape(RANKS, *shape)
    return (numbers * 7919 % 509).astype(dtype)


# name -> (function of a row of shape (12, 6, 4), collective that carries it)
CASES = {
    "psum": (lambda x: lax.psum(x, "x"), "allreduce"),
    "psum over both": (lambda x: lax.psum(x, ("y", "x")), "allreduce"),
    "psum of a tree": (lambda x: lax.psum({"a": x, "b": [x[0], 2]}, "y"), "allreduce"),
    "pmean": (lambda x: lax.pmean(x, ("x", "y")), "allreduce"),
    "pmax": (lambda x: lax.pmax(x, "y"), "allreduce"),
    "pmin": (lambda x: lax.pmin(x, ("x", "y")), "allreduce"),
    "psum_scatter": (lambda x: lax.psum_scatter(x[:2], "x"), "reduce_scatter"),
    "psum_scatter dim": (
        lambda x: lax.psum_scatter(x, ("x", "y"), scatter_dimension=1),
        "reduce_scatter",
    ),
    "psum_scatter tiled": (
        lambda x: lax.psum_scatter(x, ("y", "x"), scatter_dimension=0, tiled=True),
        "reduce_scatter",
    ),
    "psum_scatter groups": (
        lambda x: lax.psum_scatter(
            x, ("x", "y"), scatter_dimension=2, axis_index_groups=PAIRS, tiled=True
        ),
        "reduce_scatter",
    ),
    "all_gather": (lambda x: lax.all_gather(x, "y"), "all_gather"),
    "all_gather axis": (lambda x: lax.all_gather(x, ("x", "y"), axis=2), "all_gather"),
    "all_gather last axis": (lambda x: lax.all_gather(x, ("y", "x"), axis=3), "all_gather"),
    "all_gather tiled": (lambda x: lax.all_gather(x, ("y", "x"), axis=1, tiled=True), "all_gather"),
    "all_gather groups": (
        lambda x: lax.all_gather(x, ("x", "y"), axis_index_groups=PAIRS),
        "all_gather",
    ),
    "all_to_all": (lambda x: lax.all_to_all(x, ("x", "y"), 1, 2), "all_to_all"),
    "all_to_all back": (lambda x: lax.all_to_all(x[:, :3], "y", 1, 0), "all_to_all"),
    "all_to_all tiled": (lambda x: lax.all_to_all(x, "y", 0, 2, tiled=True), "all_to_all"),
    "all_to_all tiled same": (
        lambda x: lax.all_to_all(x, ("y", "x"), 0, 0, tiled=True),
        "all_to_all",
    ),
    "all_to_all groups": (
        lambda x: lax.all_to_all(x, ("x", "y"), 0, 1, axis_index_groups=PAIRS, tiled=True),
        "all_to_all",
    ),
    "ppermute": (lambda x: lax.ppermute(x, "y", [(0, 2), (2, 1)]), "ppermute"),
    "ppermute over both": (
        lambda x: lax.ppermute(x, ("x", "y"), [(i, (i + 4) % 6) for i in range(6)]),
        "ppermute",
    ),
    "pshuffle": (lambda x: lax.pshuffle(x, "y", [2, 0, 1]), "ppermute"),
    "pswapaxes": (lambda x: lax.pswapaxes(x[:3], "y", 0), "all_to_all"),
}


# lax's own derivative fails: "Expected cotangent type float32[1,12,3,4] but got float32[12,1,3,4]"
NO_GRADIENT = {"all_to_all", "all_to_all back"}
COLLECTIVES = sorted({collective for _, collective in CASES.values()})


def cases_of(collective):
    return {name: f for name, (f, c) in CASES.items() if c == collective}


def operations(collective):
    return sum(
        row["operations"] for row in jaxring.stats(reset=True) if row["collective"] == collective
    )


def equal(got, expected):
    assert jax.tree.map(lambda y: y.dtype, got) == jax.tree.map(lambda y: y.dtype, expected)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(path))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_values(grid, collective, dtype):
    """All cases of a collective in one program: compiling takes longest."""
    cases = cases_of(collective)

    def f(x):
        return {name: case(x) for name, case in cases.items()}

    x = rows(dtype=dtype)
    expected = grid(f, x)
    operations(collective)
    with jaxring.replacing_lax():
        got = grid(f, x)
    equal(got, expected)
    assert operations(collective) >= RANKS * len(cases)


def sum_of_squares(tree):
    return sum(jnp.sum(jnp.asarray(y, np.float32) ** 2) for y in jax.tree.leaves(tree))


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_gradients(grid, collective):
    """Those that AD inserts go through us too; the values stay those of lax."""
    cases = {
        name: f
        for name, f in cases_of(collective).items()
        if name not in {"pmax", "pmin", *NO_GRADIENT}
    }

    def gradients(x):
        return {
            name: jax.grad(lambda x, case=case: sum_of_squares(case(x)))(x)
            for name, case in cases.items()
        }

    x = rows()
    expected = grid(gradients, x)
    with jaxring.replacing_lax():
        got = grid(gradients, x)
    equal(got, expected)


@pytest.mark.parametrize("name", ["psum", "psum_scatter dim", "all_gather axis", "ppermute"])
def test_under_vmap(grid, name):
    f, _ = CASES[name]
    x = rows((2, 12, 6, 4))
    batched = jax.vmap(f, 0, 1)
    expected = grid(batched, x)
    with jaxring.replacing_lax():
        got = grid(batched, x)
    equal(got, expected)


def test_gradients_through_scan_remat_and_custom_vjp(spmd):
    @jax.custom_vjp
    def halved(x):
        return lax.psum(x, "x")

    halved.defvjp(lambda x: (lax.psum(x, "x"), None), lambda _, ct: (spmd.vary(ct) / 2,))

    def loss(x):
        @jax.checkpoint
        def layer(carry, _):
            return spmd.vary(jnp.tanh(lax.pmean(carry, "x") + halved(carry * 1e-3))), None

        return jnp.sum(lax.scan(layer, x * 1e-2, None, length=3, unroll=2)[0] ** 2)

    x = rows((3,))[:4]

    def f(x):
        return loss(x), jax.grad(loss)(x), jax.hessian(lambda x: jnp.sum(lax.pmean(x, "x") ** 3))(x)

    expected = spmd(f, x)
    operations("allreduce")
    with jaxring.replacing_lax():
        got = spmd(f, x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert operations("allreduce") > 12


def test_pullback_called_outside_the_scope(make_spmd):
    """What is called where counts: the backward pass runs when it is called."""
    spmd = make_spmd({"x": 4}, check_vma=False)
    f = spmd.map(lambda x: lax.psum(x, "x"))
    x = rows((3,))[:4]
    operations("allreduce")
    with jaxring.replacing_lax():
        y, pullback = jax.vjp(f, x)
        np.testing.assert_array_equal(y, np.broadcast_to(x.sum(0), x.shape))
    assert operations("allreduce") == 4
    np.testing.assert_array_equal(pullback(y)[0], np.broadcast_to(4 * x.sum(0), x.shape))
    assert operations("allreduce") == 0


@pytest.mark.parametrize("to", ["varying", "invarying", "reduced"])
def test_types_of_all_gather(make_spmd, to):
    """lax's three primitives for it."""
    spmd = make_spmd({"x": 4}, check_vma=True)

    def f(x):
        y = lax.all_gather(x, "x", to=to)
        return lax.pcast(y, "x", to="varying") if to != "varying" else y

    x = rows((3,))[:4]
    expected = spmd(f, x)
    operations("all_gather")
    with jaxring.replacing_lax():
        got = spmd(f, x)
    equal(got, expected)
    assert operations("all_gather") == 4


def test_pbroadcast(spmd):
    """lax lowers it on GPUs only; with us it works on CPUs."""
    f = spmd.map(lambda x: lax.pbroadcast(x, "x", source=2))
    x = rows((3,))[:4]
    with pytest.raises((NotImplementedError, jaxring.UsageError), match="pbroadcast"):
        jax.jit(f)(x)
    with jaxring.replacing_lax():
        np.testing.assert_array_equal(jax.jit(f)(x), np.broadcast_to(x[2], x.shape))
    with pytest.raises(jaxring.UsageError, match=r"use jaxring\.pbroadcast"):
        jax.jit(f)(x)


def test_gradient_outside(grid):
    """Where shard_map's own transpose inserts the sums."""
    x = rows((3,))

    def loss(w, x):
        y = grid.map(lambda x: lax.psum(jnp.tanh(x * 1e-2), "x"))(x * w)
        return jnp.sum(y**2)

    expected = jax.jit(jax.grad(loss, (0, 1)))(2.0, x)
    operations("allreduce")
    with jaxring.replacing_lax():
        got = jax.jit(jax.grad(loss, (0, 1)))(2.0, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)
    assert operations("allreduce") > 0


def test_gradient_of_replicated_parameters(spmd):
    """The psum_invariant that AD inserts under check_vma=True, in a training loop without any
    collective of its own."""
    batch = rows((8,))[:4]

    def gradient(x):
        return jax.grad(lambda w: jnp.mean((w * x - 1) ** 2))(jnp.float32(0.5))

    expected = spmd(gradient, batch)
    operations("allreduce")
    with jaxring.replacing_lax():
        got = spmd(gradient, batch)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert operations("allreduce") == (4 if spmd.check_vma else 0)
