"""all_to_all against numpy; parity with lax is in test_parity."""

import jax
import numpy as np
import pytest

import jaxring

X = np.random.default_rng(0).normal(size=(4, 4, 8, 3)).astype(np.float32)


def test_rows(spmd):
    got = spmd(lambda x: jaxring.all_to_all(x, "x", 0, 0), X)
    np.testing.assert_array_equal(got, np.swapaxes(X, 0, 1))


@pytest.mark.parametrize("concat", [0, 1, 2, -1])
def test_to_another_dimension(spmd, concat):
    got = spmd(lambda x: jaxring.all_to_all(x, "x", 0, concat), X)
    expected = np.stack([np.stack(list(np.swapaxes(X, 0, 1)[r]), concat) for r in range(4)])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("split", "concat"), [(1, 0), (1, 2), (1, 1), (-2, -1)])
def test_tiled(spmd, split, concat):
    got = spmd(lambda x: jaxring.all_to_all(x, "x", split, concat, tiled=True), X)
    parts = [np.split(x, 4, split) for x in X]
    expected = [np.concatenate([parts[s][r] for s in range(4)], concat) for r in range(4)]
    np.testing.assert_array_equal(got, np.stack(expected))


def test_groups(spmd):
    groups = [[0, 2], [3, 1]]

    def f(x):
        return jaxring.all_to_all(x[:2], "x", 0, 0, axis_index_groups=groups)

    got = spmd(f, X)
    for group in groups:
        np.testing.assert_array_equal(got[group], np.swapaxes(X[group, :2], 0, 1))


def test_twice_is_the_identity(spmd):
    def f(x):
        there = jaxring.all_to_all(x, "x", 1, 0, tiled=True)
        return jaxring.all_to_all(there, "x", 0, 1, tiled=True)

    np.testing.assert_array_equal(spmd(f, X), X)


def test_transpose_twice_is_the_map(spmd):
    def f(x):
        return jaxring.all_to_all(x, "x", 1, 0, tiled=True)

    def twice(x):
        once = jax.linear_transpose(f, x)
        return f(x), jax.linear_transpose(lambda ct: once(ct)[0], f(x))(x)[0]

    expected, got = spmd(twice, X)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("size", [1, 70_000])
def test_sizes(make_spmd, size):
    x = np.arange(16.0 * size, dtype=np.float32).reshape(4, 4, size)
    got = make_spmd({"x": 4})(lambda x: jaxring.all_to_all(x, "x", 0, 0), x)
    np.testing.assert_array_equal(got, np.swapaxes(x, 0, 1))


@pytest.mark.parametrize("shape", [(4,), (4, 0)], ids=str)
def test_odd_shapes(spmd, shape):
    x = np.ones((4, *shape), np.float32)
    np.testing.assert_array_equal(spmd(lambda x: jaxring.all_to_all(x, "x", 0, 0), x), x)


@pytest.mark.parametrize(
    ("args", "kw", "text"),
    [
        (
            (1, 0),
            {},
            (
                "dimension 1 has size 8, but tiled=False needs one element for each of 4 ranks;"
                " pass tiled=True to cut it into 4 parts, or another split_axis"
            ),
        ),
        (
            (2, 0),
            {"tiled": True},
            (
                "dimension 2 has size 3, not divisible by the number of ranks 4; pad x to 4 or pass"
                " another split_axis"
            ),
        ),
        ((3, 0), {}, r"split_axis=3 names no dimension of 3; pass one of 0\.\.2"),
        ((0, -4), {}, r"concat_axis=-4 names no dimension of 3"),
    ],
)
def test_errors(spmd, args, kw, text):
    with pytest.raises(jaxring.UsageError, match=f"^jaxring.all_to_all: {text}"):
        spmd(lambda x: jaxring.all_to_all(x, "x", *args, **kw), X)
