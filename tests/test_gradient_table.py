"""Every cell of the table in docs/gradients.md, which is read from there, against one device."""

import contextlib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring

RANKS = 4
SIZE = 1000  # of the parameter: its gradient is told from the loss by the bytes that it takes
RNG = np.random.default_rng(0)
PARAMS = RNG.normal(size=SIZE).astype(np.float32)
BATCH = RNG.normal(size=(8, SIZE)).astype(np.float32)


def local(params, batch):
    return jnp.mean((batch @ params) ** 2)


def reduced(f, reduce):
    return lambda params, batch: reduce(f(params, batch))


def marked(op):
    return lambda params, batch: local(jaxring.reduce_gradients_of(params, "dp", op), batch)


def ours(x):
    return jaxring.allreduce(x, "dp", "mean")


def theirs(x):
    return lax.pmean(x, "dp")


GRAD = jax.grad(local)
# First column of the table -> (gradient inside, loss whose gradient is taken outside, install())
WAYS = {
    '`allreduce(grad(local)(params, batch), "dp", "mean")`': (reduced(GRAD, ours), None, False),
    '`grad` of `allreduce(local(params, batch), "dp", "mean")`': (
        jax.grad(reduced(local, ours)),
        reduced(local, ours),
        False,
    ),
    '`grad` of `local(reduce_gradients_of(params, "dp"), batch)`': (
        jax.grad(marked("mean")),
        None,
        False,
    ),
    '`grad` of `allreduce(local(reduce_gradients_of(params, "dp", "sum"), batch), "dp", "mean")`': (
        jax.grad(reduced(marked("sum"), ours)),
        reduced(marked("sum"), ours),
        False,
    ),
    '`install()` and `lax.pmean(grad(local)(params, batch), "dp")`': (
        reduced(GRAD, theirs),
        None,
        True,
    ),
    '`install()` and `grad` of `lax.pmean(local(params, batch), "dp")`': (
        jax.grad(reduced(local, theirs)),
        reduced(local, theirs),
        True,
    ),
}
COLUMNS = [(check_vma, place) for check_vma in (True, False) for place in ("inside", "outside")]


def table():
    """Row label -> cells, as docs/gradients.md has them."""
    text = (Path(__file__).parent.parent / "docs" / "gradients.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    header, *rows = lines
    named = [f"`check_vma={check_vma}`, {place}" for check_vma, place in COLUMNS]
    assert header == ["what is written", *named]
    return {label: cells for label, *cells in rows}


def gradients(way, check_vma, place):
    """The gradient that each of the ranks has."""
    inside, loss, _ = WAYS[way]
    mesh = jax.make_mesh((RANKS,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(f, out_specs):
        specs = (P(), P("dp"))
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)

    def own(params, batch):
        g = inside(params, batch)
        varies = "dp" in jax.typeof(g).manual_axis_type.varying
        return (g if varies or not check_vma else lax.pcast(g, "dp", to="varying"))[None]

    if place == "inside":
        return jax.jit(shard(own, P("dp")))(PARAMS, BATCH)
    g = jax.jit(jax.grad(shard(loss, P())))(PARAMS, BATCH)
    return np.broadcast_to(g, (RANKS, SIZE))


def cell(way, check_vma, place):
    """What the table has to say."""
    _, loss, install = WAYS[way]
    if place == "outside" and loss is None:
        return "—"
    jaxring.stats(reset=True)
    scope = jaxring.replacing_lax() if install else contextlib.nullcontext()
    with scope, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*already equal on all ranks")
        got = np.asarray(gradients(way, check_vma, place))
    sent = sum(row["bytes_sent"] for row in jaxring.stats(reset=True))
    carrier = "by jaxring" if sent > 4 * SIZE else "by lax"
    whole = np.asarray(GRAD(PARAMS, BATCH))
    parts = np.stack([GRAD(PARAMS, part) for part in BATCH.reshape(RANKS, -1, SIZE)])
    meanings = {
        f"right, {carrier}": whole,
        f"**N times too large**, {carrier}": RANKS * whole,
        "each device's own": parts,
        "each device's own, divided by N": parts / RANKS,
    }
    for name, expected in meanings.items():
        if np.allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-3, atol=1e-4):
            return name
    return f"something else: {np.mean(got / whole)}"


@pytest.mark.parametrize("way", WAYS)
def test_table(way):
    assert table()[way] == [cell(way, *column) for column in COLUMNS]


def test_table_is_complete():
    assert list(table()) == list(WAYS)


def test_the_trap_warns_once():
    """A gradient that AD has reduced already, given to allreduce; one line, traced twice."""
    jaxring_warnings = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mesh = jax.make_mesh((RANKS,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
            f = jax.shard_map(
                lambda p, b: jaxring.allreduce(GRAD(p, b), "dp"),
                mesh=mesh,
                in_specs=(P(), P("dp")),
                out_specs=P(),
            )
            jax.block_until_ready(jax.jit(f)(PARAMS, BATCH))
        jaxring_warnings += [w for w in caught if "jaxring" in str(w.message)]
    (warning,) = jaxring_warnings
    assert "reduce_gradients_of" in str(warning.message)
    assert warning.filename == __file__
