"""Buckets of gradients: which leaves travel together, that no bucket waits for the cotangents of
another one, and that deterministic sums are the same bits whatever the buckets."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring

optax: Any = pytest.importorskip("optax")

RANKS, LAYERS, WIDTH = 4, 4, 16
RNG = np.random.default_rng(0)
PARAMS = [RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
BATCH = RNG.normal(size=(2 * RANKS, WIDTH)).astype(np.float32)
LAYER_BYTES = 4 * WIDTH * WIDTH


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def of_parameters(params, batch):
    return jax.grad(lambda p: loss(jaxring.reduce_gradients_of(p, "x"), batch))(params)


def of_gradients(params, batch):
    local = lax.pcast(params, "x", to="varying")
    return jaxring.allreduce(jax.grad(loss)(local, batch), "x", "mean")


def of_updates(params, batch):
    opt = jaxring.optim.allreduce_gradients("x")
    local = lax.pcast(params, "x", to="varying")
    return opt.update(jax.grad(loss)(local, batch), opt.init(params))[0]


def in_two_halves(params, batch):
    local = lax.pcast(params, "x", to="varying")
    handle = jaxring.allreduce_start(jax.grad(loss)(local, batch), "x", "mean")
    return jaxring.allreduce_done(handle)


WAYS = [of_parameters, of_gradients, of_updates, in_two_halves]


def sharded(spmd, f):
    specs = {"in_specs": (P(), P("x")), "out_specs": P(), "check_vma": spmd.check_vma}
    return jax.jit(jax.shard_map(f, mesh=spmd.mesh, **specs))


def entry_of(compiled: str) -> dict[str, tuple[str, list[str]]]:
    """By name: (text, names of its operands) of the instructions of the entry computation."""
    body = compiled[compiled.index("\nENTRY ") :]
    found = {}
    for name, text in re.findall(r"^  (?:ROOT )?%(\S+) = (.*)$", body, re.M):
        found[name] = text, re.findall(r"%([\w.-]+)", text.split(", metadata=")[0])
    return found


def ancestors(entry, names):
    seen, open_names = set(), list(names)
    while open_names:
        name = open_names.pop()
        if name in entry and name not in seen:
            seen.add(name)
            open_names += entry[name][1]
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_no_bucket_waits_for_the_cotangents_of_a_later_one(way, make_spmd):
    """What XLA runs: an edge from a later layer's gradient would hold a bucket up."""
    with jaxring.config.override(bucket_bytes=2 * LAYER_BYTES):
        compiled = sharded(make_spmd({"x": RANKS}), way).lower(PARAMS, BATCH).compile()
    entry = entry_of(str(compiled.as_text()))
    calls = [name for name, (text, _) in entry.items() if "jaxring_collective" in text]
    assert len(calls) == LAYERS / 2
    needed = [ancestors(entry, entry[call][1]) for call in calls]
    sizes = [len(n) for n in needed]
    assert sizes == sorted(sizes)  # the last layers' bucket comes first …
    assert sizes[0] < sizes[-1]
    products = {name for name, (text, _) in entry.items() if f"f32[{WIDTH},{WIDTH}]" in text}
    gradients = [set(entry[call][1]) & products for call in calls]
    assert all(len(g) == 2 for g in gradients)  # of one bucket
    for i, later in enumerate(gradients[1:], 1):
        assert not needed[0] & later, f"bucket 0 waits for bucket {i}"


@pytest.mark.parametrize("way", WAYS)
def test_buckets(way, make_spmd, carried):
    """Operations of a tree of two dtypes, with a leaf that is larger than a bucket."""
    params = {
        "a": np.ones(10, np.float32),  # 40 bytes
        "b": np.ones(2, np.float32),  # 8
        "c": np.ones(3, jnp.bfloat16),  # 6
        "d": np.ones(100, np.float32),  # 400
        "e": np.ones(6, np.float32),  # 24
        "f": np.ones(5, np.float32),  # 20
    }
    rows = np.arange(RANKS, dtype=np.float32)

    def linear(params, x):  # gradients are the rank
        return sum(jnp.sum(p.astype(np.float32)) for p in params.values()) * jnp.sum(x)

    spmd = make_spmd({"x": RANKS})
    with jaxring.config.override(bucket_bytes=48), pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "loss", linear)
        f = sharded(spmd, way)
        lowered = f.lower(params, rows).as_text()
        got = jax.device_get(f(params, rows))
    shapes = re.findall(r"@jaxring_collective.*?: \((.*?)\) -> ", lowered)
    leaves = [re.findall(r"tensor<(\d+x\w+)>", s) for s in shapes]
    # From the last leaf on, each bucket as full as it gets: f and e; d by itself; c; b and a.
    assert leaves == [["6xf32", "5xf32"], ["100xf32"], ["3xbf16"], ["10xf32", "2xf32"]]
    assert sum(carried().values()) == RANKS * len(leaves)
    for k, p in params.items():
        assert got[k].dtype == p.dtype
        np.testing.assert_array_equal(np.float32(got[k]), rows.mean())


@pytest.mark.parametrize("way", [of_parameters, of_updates])
def test_same_bits_for_all_buckets(way, make_spmd):
    """Of sums whose bits depend on their order."""
    spmd = make_spmd({"x": RANKS})
    results = set()
    for bucket_bytes in (1, 2 * LAYER_BYTES, 32 << 20):
        with jaxring.config.override(deterministic=True, bucket_bytes=bucket_bytes):
            got = sharded(spmd, way)(PARAMS, BATCH)
        results.add(b"".join(np.asarray(g).tobytes() for g in got))
    assert len(results) == 1


def test_what_moves_is_packed_in_order(make_spmd):
    """all_gather of parameters: the first ones are needed first."""
    spmd = make_spmd({"x": RANKS})

    def f(params, batch):
        rows = jax.tree.map(lambda p: p[:4], params)
        return jax.tree.map(jnp.sum, jaxring.all_gather(rows, "x", to="invarying"))

    params = [np.ones((4, i + 1), np.float32) for i in range(3)]
    with jaxring.config.override(bucket_bytes=1):
        text = sharded(spmd, f).lower(params, BATCH).as_text()
    shapes = re.findall(r"@jaxring_collective.*?: \(tensor<i32>, tensor<4x(\d)xf32>", text)
    assert shapes == ["1", "2", "3"]
