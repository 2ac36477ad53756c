"""A pairwise selection of algorithm x world size x count x op x dtype, each run on that many
devices.

Every pair of levels of two factors occurs in at least one case. The full product runs in tests/cpp.
"""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring._src import native_facts, reductions

LISTS = native_facts.lists()
FACTORS = {
    "algorithm": [a["name"] for a in LISTS["algorithms"]],
    "size": list(range(1, 9)),
    "count": [0, 1, 13, 1021, 70_001],
    "op": LISTS["ops"],
    "dtype": LISTS["dtypes"],
}
MOST = 400


def meaningful(case):
    if case["dtype"] == "bool":
        return case["op"] in ("and", "or")  # the others convert; see test_allreduce
    if case["op"] == "mean" and not jnp.issubdtype(case["dtype"], jnp.inexact):
        return False
    return reductions.has_meaning(case["op"], jnp.dtype(case["dtype"]))


def pairwise():
    """Cases that cover every meaningful pair of levels: greedily, the best of some random
    completions."""
    rng = random.Random(0)
    names = list(FACTORS)

    def pairs(case):
        return {((a, case[a]), (b, case[b])) for a, b in itertools.combinations(names, 2)}

    def complete(fixed):
        for _ in range(200):
            case = {n: fixed.get(n, rng.choice(FACTORS[n])) for n in names}
            if meaningful(case):
                return case
        return None

    todo = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(FACTORS[a], FACTORS[b])
    }
    cases = []
    while todo:
        seed = min(todo, key=repr)
        found = [c for c in (complete(dict(seed)) for _ in range(20)) if c is not None]
        if found:
            best = max(found, key=lambda case: len(pairs(case) & todo))
            cases.append(best)
            todo -= pairs(best)
        todo.discard(seed)
    return cases


CASES = pairwise()


def test_selection_is_small_enough():
    assert len(CASES) <= MOST


def operands(size, count, dtype, op):
    rng = np.random.default_rng(count + size)
    if dtype == "bool":
        return rng.integers(0, 2, (size, count)).astype(bool)
    if op == "prod":  # at most 4: the smallest range is that of an 8-bit float
        place = rng.permuted(np.tile(np.arange(size), (count, 1)), axis=1).T
        return np.where(place < 2, rng.integers(1, 3, (size, count)), 1).astype(jnp.dtype(dtype))
    if jnp.issubdtype(dtype, jnp.integer):
        return rng.integers(0, 100, (size, count)).astype(dtype)
    x = rng.normal(size=(size, count))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * rng.normal(size=x.shape)
    return x.astype(jnp.dtype(dtype))


def reference(x, op):
    wide = x
    if jnp.issubdtype(x.dtype, jnp.floating):
        wide = x.astype(np.float64)
    f = {
        "sum": lambda: wide.sum(0, dtype=wide.dtype),
        "mean": lambda: wide.sum(0, dtype=wide.dtype) / len(x),
        "prod": lambda: wide.prod(0, dtype=wide.dtype),
        "min": lambda: wide.min(0),
        "max": lambda: wide.max(0),
        "and": lambda: wide.all(0),
        "or": lambda: wide.any(0),
    }[op]
    return f()


def tolerance(dtype):
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return 8 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_case(case, make_spmd, carried):
    with jax.enable_x64(True):
        x = operands(case["size"], case["count"], case["dtype"], case["op"])
        spmd = make_spmd({"x": case["size"]}, check_vma=case["count"] != 13)
        got = spmd(lambda x: jaxring.allreduce(x, "x", case["op"], algorithm=case["algorithm"]), x)
    assert got.dtype == x.dtype
    expected = np.broadcast_to(reference(x, case["op"]), x.shape)
    kind = np.complex128 if np.iscomplexobj(x) else None
    kind = np.float64 if kind is None and jnp.issubdtype(x.dtype, jnp.floating) else kind
    if kind is not None:
        limit = tolerance(x.dtype)
        np.testing.assert_allclose(got.astype(kind), expected, rtol=limit, atol=limit)
        assert all((row == got[0]).all() for row in got)  # the same bits on all ranks
    else:
        np.testing.assert_array_equal(got, expected)
    if case["size"] > 1 and case["count"] > 0 and case["algorithm"] != "auto":
        assert carried() == {case["algorithm"]: case["size"]}
