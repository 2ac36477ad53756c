"""Compressed reductions: what they lose comes back, how many bytes travel, what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring
from jaxring._src import compression as compressions

optax: Any = pytest.importorskip("optax")

RANKS = 4
RNG = np.random.default_rng(0)
SHAPES = {"w": (40, 50), "b": (7,), "empty": (0,), "s": ()}
NAMES = compressions.NAMES


def gradients():
    """One row for each rank, of magnitudes that differ between leaves."""
    return {
        k: (10.0**i * RNG.normal(size=(RANKS, *shape))).astype(np.float32)
        for i, (k, shape) in enumerate(SHAPES.items())
    }


def repeated(spmd, compression, op, steps, **settings):
    """(sum of the results of `steps` reductions of the same gradients, errors at the end)."""
    opt: Any = jaxring.optim.allreduce_gradients("x", op, compression=compression)

    def f(rows):
        def step(carry, _):
            total, state = carry
            own = jax.tree.map(lambda x: x[0], rows)
            updates, state = opt.update(own, state)
            return (jax.tree.map(jnp.add, total, updates), state), None

        zeros = {k: jnp.zeros(shape) for k, shape in SHAPES.items()}
        (total, state), _ = lax.scan(step, (zeros, opt.init(zeros)), None, length=steps)
        errors = jax.tree.map(lambda e: spmd.vary(e)[None], state.error)
        return total, errors

    f = jax.shard_map(
        f,
        mesh=spmd.mesh,
        in_specs=P("x"),
        out_specs=(P(), P("x")),
        check_vma=spmd.check_vma,
    )
    with jaxring.config.override(**settings):
        return jax.device_get(jax.jit(f)(gradients_once))


gradients_once = gradients()


@pytest.mark.parametrize(
    ("compression", "op"), [("bf16", "mean"), ("fp16", "sum"), ("int8", "mean"), ("int8", "sum")]
)
def test_nothing_is_lost_for_good(compression, op, spmd):
    """The results of all steps and what the ranks still hold add up to what was given."""
    steps = 10
    total, errors = repeated(spmd, compression, op, steps)
    for k, rows in gradients_once.items():
        exact = steps * getattr(rows, op)(0)
        held = getattr(errors[k], op)(0)
        scale = np.abs(rows).max(initial=1e-9)
        if compression == "int8":  # also what the ranks' sum has lost is held
            np.testing.assert_allclose(total[k] + held, exact, rtol=1e-5, atol=1e-4 * scale)
        else:  # each step's result is rounded once
            digits = {"bf16": 2.0**-8, "fp16": 2.0**-11}[compression]
            bound = steps * digits * scale * (RANKS if op == "sum" else 1)
            np.testing.assert_allclose(total[k] + held, exact, rtol=0, atol=bound)
        if rows.size > 4:
            assert (errors[k] != 0).any()  # or it was not compressed at all


@pytest.mark.parametrize("compression", NAMES)
def test_buckets_do_not_change_the_numbers(compression, make_spmd):
    """Of int8 in the first step only: which rank holds what the sum has lost depends on them."""
    spmd, steps = make_spmd({"x": RANKS}), 1 if compression == "int8" else 2
    whole, _ = repeated(spmd, compression, "mean", steps, deterministic=True)
    small, _ = repeated(spmd, compression, "mean", steps, deterministic=True, bucket_bytes=64)
    for k in SHAPES:
        np.testing.assert_allclose(whole[k], small[k], rtol=1e-6)


@pytest.mark.parametrize(
    ("compression", "least", "most"),
    [("bf16", 0.49, 0.51), ("fp16", 0.49, 0.51), ("int8", 0.25, 0.27)],
)
def test_bytes(compression, least, most, make_spmd):
    """Bytes that ranks send, against float32, from the engine's own count."""
    spmd = make_spmd({"x": RANKS})
    x = np.ones((RANKS, 1 << 17), np.float32)

    def sent(compression):
        opt: Any = jaxring.optim.allreduce_gradients("x", compression=compression, algorithm="auto")
        jaxring.stats(reset=True)
        spmd(lambda row: opt.update(row, opt.init(row))[0], x)
        return sum(row["bytes_sent"] for row in jaxring.stats())

    assert least <= sent(compression) / sent(None) <= most


@pytest.mark.parametrize("compression", NAMES)
def test_nan_and_infinity_show_and_do_not_stay(compression, make_spmd):
    spmd = make_spmd({"x": RANKS})
    opt: Any = jaxring.optim.allreduce_gradients("x", compression=compression)
    bad = np.ones((RANKS, 1000), np.float32)
    bad[1, 3], bad[2, 700] = np.nan, np.inf

    def f(row):
        state = opt.init(row)
        first, state = opt.update(row, state)
        second, _ = opt.update(jnp.ones_like(row), state)
        return first, second

    first, second = spmd(f, bad)
    assert not np.isfinite(first[:, [3, 700]]).any()
    np.testing.assert_allclose(second, 1, rtol=1e-2)


def test_fp16_sends_what_is_too_large_in_parts(make_spmd):
    spmd = make_spmd({"x": RANKS})
    opt: Any = jaxring.optim.allreduce_gradients("x", compression="fp16")

    def f(row):
        state, results = opt.init(row), []
        for i in range(4):
            y, state = opt.update(row if i == 0 else jnp.zeros_like(row), state)
            results.append(y)
        return jnp.stack(results)

    got = spmd(f, np.full((RANKS, 2), 150_000, np.float32))
    np.testing.assert_allclose(got.sum(1), 150_000, rtol=1e-3)
    assert (got <= 65504).all()


def test_accumulated_half_precision_gradients(make_spmd):
    """The sum goes into the compression in float32, the update comes in the gradients' dtype."""
    spmd = make_spmd({"x": RANKS})
    opt: Any = jaxring.optim.distributed(optax.identity(), "x", every=2, compression="int8")

    def f(row):
        state = opt.init(row)
        for _ in range(2):
            updates, state = opt.update(row, state)
        return updates

    got = spmd(f, np.arange(RANKS, dtype=jnp.bfloat16)[:, None])
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(got), 1.5, rtol=1e-2)


def test_quantised_blocks():
    rows = RNG.normal(size=(3, 2 * compressions.BLOCK)).astype(np.float32)
    rows[1, : compressions.BLOCK] = 0
    sent = compressions.quantised(rows)
    assert sent.dtype == np.int8
    assert sent.shape == (3, 2 * (compressions.BLOCK + 4))
    units = np.abs(rows.reshape(3, 2, -1)).max(-1, keepdims=True) / 127
    lost = (compressions.dequantised(sent) - rows).reshape(3, 2, -1)
    assert (np.abs(lost) <= 0.5001 * units).all()


def test_consolidate(spmd):
    """Equal state on all ranks, and the next reduction gives the same sum as without."""
    opt: Any = jaxring.optim.distributed(optax.identity(), "x", every=2, compression="bf16")
    x = gradients_once["w"]

    def f(row):
        zeros = jnp.zeros(row.shape, row.dtype)  # typed as parameters: equal everywhere
        state = opt.init(zeros)
        for _ in range(3):
            _, state = opt.update(row, state)
        consolidated = jaxring.optim.consolidate((state, {"other": zeros}), "x")[0]
        if spmd.check_vma:
            assert not jax.typeof(consolidated.gradients).manual_axis_type.varying
        pair = (opt.update(row, s)[0] for s in (state, consolidated))
        return *pair, consolidated.gradients, consolidated.error

    one, other, sums, errors = spmd(f, x)
    np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(sums, np.broadcast_to(x.mean(0), x.shape), rtol=1e-4, atol=1e-6)
    assert all((e == errors[0]).all() for e in errors)
