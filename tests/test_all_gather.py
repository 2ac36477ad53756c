"""all_gather against numpy: dimensions, types, groups, dtypes, algorithms, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring

X = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)


def rows(y):
    """What each of 4 ranks gets."""
    return np.broadcast_to(y, (4, *y.shape))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_axis(spmd, axis):
    got = spmd(lambda x: jaxring.all_gather(x, "x", axis=axis), X)
    np.testing.assert_array_equal(got, rows(np.stack(list(X), axis)))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_tiled(spmd, axis):
    got = spmd(lambda x: jaxring.all_gather(x, "x", axis=axis, tiled=True), X)
    np.testing.assert_array_equal(got, rows(np.concatenate(X, axis)))


@pytest.mark.parametrize("groups", [[[0, 2], [3, 1]], [[3, 2, 1, 0]]], ids=str)
def test_groups(spmd, groups):
    got = spmd(lambda x: jaxring.all_gather(x, "x", axis_index_groups=groups), X)
    for group in groups:
        np.testing.assert_array_equal(
            got[group], np.broadcast_to(X[group], (len(group), *X[group].shape))
        )


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
def test_order_of_the_axes(grid, axes):
    x = np.arange(6.0)[:, None].astype(np.float32)
    got = grid(lambda x: jaxring.all_gather(x, axes, tiled=True), x)
    order = x.ravel() if axes[0] == "x" else x.reshape(2, 3).T.ravel()
    np.testing.assert_array_equal(got, np.broadcast_to(order, (6, 6)))


def all_dtypes():
    from jaxring._src import native_facts

    return native_facts.lists()["dtypes"]


@pytest.mark.parametrize("dtype", all_dtypes())
def test_every_dtype_moves_bit_for_bit(make_spmd, dtype):
    with jax.enable_x64(True):
        bits = np.random.default_rng(0).integers(0, 256, (4, 64), np.uint8)
        x = bits % 2 == 0 if dtype == "bool" else bits.view(jnp.dtype(dtype))

        def f(x):
            moved = jaxring.all_gather(x, "x")
            return moved, jaxring.all_to_all(moved, "x", 0, 0), jaxring.ppermute(x, "x", [(1, 2)])

        gathered, exchanged, permuted = make_spmd({"x": 4}, False)(f, x)

    def raw(y):
        return np.ascontiguousarray(y).view(np.uint8)

    np.testing.assert_array_equal(raw(gathered), raw(rows(x)))
    np.testing.assert_array_equal(raw(exchanged), raw(np.repeat(x[:, None], 4, 1)))
    np.testing.assert_array_equal(
        raw(permuted), raw(np.where(np.arange(4)[:, None] == 2, x[1], np.zeros_like(x[1])))
    )


def test_prng_keys(spmd):
    def f(seed):
        keys = jax.random.split(jax.random.key(seed), 2)
        gathered = jaxring.all_gather(keys, "x", axis=-1)
        assert gathered.shape == (2, 4)
        assert jnp.issubdtype(gathered.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(gathered), jax.random.key_data(jaxring.broadcast(keys, "x", 2))

    seeds = np.arange(4)
    gathered, root = spmd(f, seeds)
    keys = np.stack([jax.random.key_data(jax.random.split(jax.random.key(s), 2)) for s in seeds], 1)
    np.testing.assert_array_equal(gathered, rows(keys))
    np.testing.assert_array_equal(root, rows(keys[:, 2]))


def test_types(make_spmd):
    def f(x):
        def varies(**kw):
            kind = jax.typeof(jaxring.all_gather(x, "x", **kw)).manual_axis_type
            return set(kind.varying), set(kind.reduced)

        assert varies() == ({"x", "y"}, set())
        assert varies(to="varying") == ({"x", "y"}, set())
        assert varies(to="invarying") == ({"y"}, set())
        assert varies(to="reduced") == ({"y"}, {"x"})
        return x

    make_spmd({"x": 2, "y": 2}, True)(f, X)


def test_gradient_through_reduced():
    """As in lax, the transpose is a reduce_scatter of what is not reduced yet."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.device_put(X[:, 0], jax.NamedSharding(mesh, jax.P("x")))

    def loss(gather, x):
        gathered = jax.shard_map(
            lambda x: gather(x, "x", tiled=True, to="reduced"),
            mesh=mesh,
            in_specs=jax.P("x"),
            out_specs=jax.P(None, reduced=frozenset({"x"})),
        )(x)
        return jax.shard_map(
            lambda y: jnp.sin(y) * jax.lax.axis_index("x"),
            mesh=mesh,
            in_specs=jax.P(None, reduced=frozenset({"x"})),
            out_specs=jax.P("x"),
        )(gathered).sum()

    ours, theirs = (
        jax.jit(jax.grad(lambda x, g=g: loss(g, x)))(x)
        for g in (jaxring.all_gather, jax.lax.all_gather)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["auto", "direct", "ring"])
@pytest.mark.parametrize("size", [5, 70_000])
def test_algorithms(make_spmd, carried, algorithm, size):
    x = np.random.default_rng(0).normal(size=(4, size)).astype(np.float32)
    got = make_spmd({"x": 4})(lambda x: jaxring.all_gather(x, "x", algorithm=algorithm), x)
    np.testing.assert_array_equal(got, rows(x))
    assert algorithm == "auto" or set(carried()) == {algorithm}


def test_a_setting_that_serves_others_means_auto(make_spmd, carried):
    with jaxring.config.override(algorithm="tree"):
        got = make_spmd({"x": 4})(
            lambda x: (jaxring.all_gather(x, "x"), jaxring.allreduce(x, "x")), X
        )
    np.testing.assert_array_equal(got[0], rows(X))
    assert carried().pop("tree") == 4  # the allreduce's, on four devices


def test_summing_order_is_of_no_concern(make_spmd):
    with jaxring.config.override(deterministic=True, algorithm="direct"):
        make_spmd({"x": 4})(lambda x: jaxring.all_gather(x, "x", algorithm="ring"), X)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)], ids=str)
def test_odd_shapes(spmd, shape):
    x = np.ones((4, *shape), np.float32)
    np.testing.assert_array_equal(spmd(lambda x: jaxring.all_gather(x, "x"), x), rows(x))


@pytest.mark.parametrize(
    ("kw", "text"),
    [
        ({"axis": 3}, r"axis=3 names no dimension of 3; pass one of 0\.\.2"),
        ({"axis": 2, "tiled": True}, r"axis=2 names no dimension of 2; pass one of 0\.\.1"),
        ({"axis": None}, "axis must be an integer, got None"),
        ({"to": "invariant"}, "unknown to='invariant'; use varying, invarying or reduced"),
        (
            {"algorithm": "chain"},
            "algorithm 'chain' does not serve all_gather; use auto, direct, ring or hierarchical",
        ),
        ({"axis_index_groups": [[0], [1, 2, 3]]}, r"axis_index_groups have the sizes \[1, 3\]"),
    ],
)
def test_errors(spmd, kw, text):
    with pytest.raises(jaxring.UsageError, match=f"^jaxring.all_gather: {text}"):
        spmd(lambda x: jaxring.all_gather(x, "x", **kw), X)


def test_groups_with_an_equal_result(spmd):
    text = "check_vma=True cannot type" if spmd.check_vma else "cannot be invarying"
    with pytest.raises(jaxring.UsageError, match=text):
        spmd(
            lambda x: jaxring.all_gather(
                x, "x", to="invarying", axis_index_groups=[[0, 1], [2, 3]]
            ),
            X,
        )


def test_reduced_over_a_vmap_axis(make_spmd):
    f = jax.vmap(lambda x: jaxring.all_gather(x, ("v", "x"), to="reduced"), axis_name="v")
    with pytest.raises(jaxring.UsageError, match=r"name the mesh axes \('x',\) alone"):
        make_spmd({"x": 2}, True)(f, X)


def test_dtype_that_we_lack(spmd):
    with pytest.raises(jaxring.UsageError, match="int4 cannot be moved; convert to bool, int8"):
        spmd(lambda x: jaxring.all_gather(x.astype(jnp.int4), "x"), X)
