"""allreduce in two halves: the same values, types and derivatives as the whole; work between them
runs meanwhile, and no buffer that the operation reads is given to that work."""

import time
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxring
from jaxring.testing import spawn

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def in_halves(x, axis, op="sum", **how):
    return jaxring.allreduce_done(jaxring.allreduce_start(x, axis, op, **how))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "prod"])
def test_values(op, spmd, carried):
    got = spmd(lambda x: in_halves({"a": x, "b": x[0]}, "x", op, algorithm="ring"), ROWS)
    expected = {"prod": ROWS.prod(0)} if op == "prod" else {op: getattr(ROWS, op)(0)}
    np.testing.assert_allclose(got["a"], np.broadcast_to(expected[op], ROWS.shape), rtol=1e-6)
    assert carried() == {"ring": 4}


@pytest.mark.parametrize(
    ("elements", "algorithm"),
    [(n << 10, "auto") for n in (4, 16, 57, 256)]
    + [(57 << 10, name) for name in ("ring", "tree", "halving_doubling", "chain", "reducer")],
)
def test_values_in_one_buffer(elements, algorithm, spmd):
    """Each way in which one process reduces, by size: results lie over operands that were computed,
    and none may be made from operands that another has overwritten."""
    rows = np.arange(4, dtype=np.float32)[:, None] + np.arange(elements, dtype=np.float32) % 7
    got = spmd(lambda x: in_halves(2 * x, "x", algorithm=algorithm), rows)
    np.testing.assert_array_equal(got, np.broadcast_to(2 * rows.sum(0), rows.shape))


def test_derivatives_and_vmap(spmd):
    """Against allreduce in one piece."""

    def of(reduce):
        def f(x):
            def loss(x):
                y = jax.vmap(lambda v: reduce(jnp.sin(v), "x", "mean"))(jnp.stack([x, 2 * x]))
                return jnp.sum(y**3)

            tangents = jax.jvp(loss, (x,), (jnp.ones_like(x),))[1]
            return jax.grad(loss)(x), jnp.broadcast_to(tangents, x.shape)

        return spmd(f, ROWS)

    for got, expected in zip(of(in_halves), of(jaxring.allreduce), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_loop_carries_the_handle(spmd):
    """One step late: each iteration begins its reduction and ends the one before."""

    def f(x):
        def step(handle, i):
            done = jaxring.allreduce_done(handle)
            return jaxring.allreduce_start(x * i, "x"), done

        first = jaxring.allreduce_start(x * 0, "x")
        last, results = lax.scan(step, first, jnp.arange(1.0, 4.0))
        assert jax.tree.structure(last) == jax.tree.structure(first)
        return jnp.concatenate([results, jaxring.allreduce_done(last)[None]]), last.operand

    got, operand = spmd(f, ROWS)
    for rank in range(4):
        np.testing.assert_allclose(got[rank], np.arange(4)[:, None] * ROWS.sum(0))
    np.testing.assert_array_equal(operand, 3 * ROWS)


def test_the_handle_crosses_functions(make_spmd):
    spmd = make_spmd({"x": 4})
    start = jax.jit(lambda x: jaxring.allreduce_start(x, "x", name="begun"))
    got = spmd(lambda x: jax.jit(jaxring.allreduce_done)(start(x)), ROWS)
    np.testing.assert_array_equal(got, np.broadcast_to(ROWS.sum(0), ROWS.shape))


def test_errors():
    with pytest.raises(jaxring.UsageError, match=r"allreduce_start.*axis name 'y' is not bound"):
        jaxring.allreduce_start(ROWS, "y")
    with pytest.raises(
        jaxring.UsageError, match=r"expected what jaxring\.allreduce_start returned"
    ):
        jaxring.allreduce_done(cast(Any, ROWS))


# -- What runs between the halves ------------------------------------------------------------------

SIZE = 600  # 1.4 MB: the engine reads the operand only once all ranks have come
PRODUCTS = 6


def poisoned(comm, folder):
    """Rank 1 begins only when rank 0 has done its work between the halves, which fills every buffer
    that XLA believes to be free with NaN. Without overlap both would wait for ever. (Where x is
    donated, XLA makes the work wait that is to lie in its buffer; then rank 1 is only late.)"""
    results = {}
    for case in ("temporary", "donated", "in place"):
        between_done = f"{folder}/{case}"

        def work_is_done(value, path=between_done):
            if comm.rank == 0:
                open(path, "w").close()
            return value

        def f(x, poison, work_is_done=work_is_done, case=case):
            operand = jnp.cumsum(x, axis=0) if case == "temporary" else x
            handle = jaxring.allreduce_start(operand, comm)
            y = poison
            for _ in range(PRODUCTS):  # each needs a buffer of the operand's size
                y = jnp.tanh(y @ poison)
            y = jax.pure_callback(work_is_done, jax.typeof(y), y)
            return y, jaxring.allreduce_done(handle)

        with jaxring.config.override(in_place=case == "in place"):
            step = jax.jit(f, donate_argnums=0 if case == "donated" else ())
            x = jnp.full((SIZE, SIZE), comm.rank + 1.0)
            poison = jnp.full((SIZE, SIZE), jnp.nan)
            compiled = step.lower(x, poison).compile()
        if comm.rank == 1 and case == "donated":
            time.sleep(0.3)
        elif comm.rank == 1:
            _wait_for(between_done)
        y, total = compiled(x, poison)
        assert np.isnan(y).all()
        memory: Any = compiled.memory_analysis()
        results[case] = np.asarray(total), memory.temp_size_in_bytes
    return results, backward(comm, folder)


LAYERS = 5


def backward(comm, folder):
    """Rank 1 begins only when rank 0 has come to the end of its backward pass, with all buckets
    still to be reduced: no layer may wait for the buffer of a gradient that is under way."""

    def at_the_end(value):
        if comm.rank == 0:
            open(f"{folder}/backward", "w").close()
        return value

    def loss(params, x):
        for w in jaxring.reduce_gradients_of(params, comm):
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    def step(params, x):
        gradients, last = jax.grad(loss, argnums=(0, 1))(params, x)
        last = jax.pure_callback(at_the_end, jax.typeof(last), last)
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], last

    params = [jnp.full((SIZE, SIZE), 1.0 / SIZE) for _ in range(LAYERS)]
    with jaxring.config.override(bucket_bytes=params[0].nbytes):
        compiled = jax.jit(step).lower(params, jnp.ones((SIZE, SIZE))).compile()
    if comm.rank == 1:
        _wait_for(f"{folder}/backward")
    return jax.device_get(compiled(params, jnp.full((SIZE, SIZE), comm.rank + 1.0)))


def _wait_for(path):
    deadline = time.monotonic() + 10
    while not _exists(path):
        assert time.monotonic() < deadline, "rank 0 waits before it works"
        time.sleep(0.001)


def _exists(path):
    try:
        open(path).close()
    except FileNotFoundError:
        return False
    return True


def test_work_overlaps_and_no_buffer_is_reused_too_early(tmp_path):
    ranks = spawn(poisoned, 2, str(tmp_path), env={"JAXRING_TIMEOUT_S": "10"})
    (_, (first, _)), (_, (second, _)) = ranks
    np.testing.assert_array_equal(first, second)
    for results, _ in ranks:
        for case, (total, temp_bytes) in results.items():
            ones = np.full((SIZE, SIZE), 3.0, np.float32)
            expected = np.cumsum(ones, axis=0) if case == "temporary" else ones
            np.testing.assert_array_equal(total, expected)
            # The work does reuse buffers, or it would poison nothing.
            assert temp_bytes < PRODUCTS * ones.nbytes, case
