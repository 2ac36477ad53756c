"""ppermute and pshuffle; parity with lax is in test_parity, vmap axes in test_vmap_axes."""

import jax
import numpy as np
import pytest

import jaxring

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


@pytest.mark.parametrize(
    "perm",
    [[(0, 1), (1, 2), (2, 3), (3, 0)], [(2, 2)], [(3, 0), (0, 3)], [], ((1, 0), (2, 3))],
    ids=str,
)
def test_pairs(spmd, perm):
    got = spmd(lambda x: jaxring.ppermute(x, "x", perm), X)
    expected = np.zeros_like(X)
    for source, to in perm:
        expected[to] = X[source]
    np.testing.assert_array_equal(got, expected)


def test_negative_ranks_count_from_the_end(spmd):
    got = spmd(lambda x: jaxring.ppermute(x, "x", [(-1, 0)]), X)
    np.testing.assert_array_equal(got[0], X[3])


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")], ids=str)
def test_ranks_are_those_of_axis_index(grid, axes):
    def f(x):
        around = [(i, (i + 1) % 6) for i in range(6)]
        return jaxring.ppermute(jaxring.axis_index(axes), axes, around)

    got = grid(f, np.arange(6))
    ranks = np.arange(6) if axes[0] == "x" else np.arange(6).reshape(3, 2).T.ravel()
    np.testing.assert_array_equal(got, (ranks - 1) % 6)


def test_transpose_is_the_way_back(spmd):
    perm = [(0, 2), (1, 0)]

    def f(x, ct):
        return jax.linear_transpose(lambda x: jaxring.ppermute(x, "x", perm), x)(ct)[0]

    expected = np.zeros_like(X)
    expected[0], expected[1] = X[2], X[0]
    np.testing.assert_array_equal(spmd(f, X, X), expected)


def test_large(make_spmd):
    x = np.arange(4.0 * 70_001, dtype=np.float32).reshape(4, -1)
    got = make_spmd({"x": 4})(lambda x: jaxring.ppermute(x, "x", [(3, 1), (0, 2)]), x)
    np.testing.assert_array_equal(got[[1, 2]], x[[3, 0]])
    assert not got[[0, 3]].any()


@pytest.mark.parametrize(
    ("perm", "text"),
    [
        ([(0, 4)], r"perm names rank 4, but there are 4; use 0\.\.3"),
        ([(-5, 0)], "perm names rank -5"),
        ([(0, 1), (0, 2)], "the sources of perm must differ, but rank 0 is there 2 times"),
        ([(0, 1), (2, 1)], "the destinations of perm must differ, but rank 1 is there 2 times"),
        ([(0, 1), (-4, 2)], "the sources of perm must differ, but rank 0"),
        ([0, 1, 2], r"perm must be pairs of integers .*got \[0, 1, 2\]"),
        ([(0, 1.5)], "perm must be pairs of integers"),
        (None, "perm must be pairs of integers .*got None"),
    ],
)
def test_errors(spmd, perm, text):
    with pytest.raises(jaxring.UsageError, match=f"^jaxring.ppermute: {text}"):
        spmd(lambda x: jaxring.ppermute(x, "x", perm), X)


@pytest.mark.parametrize("perm", [[0, 0, 1, 2], [1, 2, 3, 4]], ids=str)
def test_shuffle_needs_a_permutation(spmd, perm):
    text = r"^jaxring.pshuffle: perm must have each of 0\.\.3 once, got"
    with pytest.raises(jaxring.UsageError, match=text):
        spmd(lambda x: jaxring.pshuffle(x, "x", perm), X)
