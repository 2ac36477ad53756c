"""The transformations of optax against optimizers on one device that see the whole batch."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring

optax: Any = pytest.importorskip("optax")

RANKS = 4
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(5, 3)).astype(np.float32),
    "b": RNG.normal(size=3).astype(np.float32),
    "unused": np.ones(2, np.float32),
}
BATCHES = RNG.normal(size=(6, 2 * RANKS, 5)).astype(np.float32)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def local_gradients(params, batch):
    """Of this rank's batch alone, in both modes of check_vma."""
    return jax.grad(loss)(lax.pcast(params, "x", to="varying"), batch)


def trained(spmd, opt, params=PARAMS, batches=BATCHES, gradients=local_gradients):
    """Parameters after all batches, in one scan within shard_map, and the state of the
    optimizer, which went in and came out as if it were equal on all ranks."""

    def step(carry, batch):
        params, state = carry
        updates, state = opt.update(gradients(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), updates["b"]

    f = jax.shard_map(
        lambda params, state, batches: lax.scan(step, (params, state), batches),
        mesh=spmd.mesh,
        in_specs=(P(), P(), P(None, "x")),
        out_specs=P(),
        check_vma=spmd.check_vma,
    )
    (params, state), updates = jax.jit(f)(params, opt.init(params), batches)
    return jax.device_get(params), state, np.asarray(updates)


def alone(opt, params=PARAMS, batches=BATCHES):
    """The same on one device, without jaxring."""

    @jax.jit
    def step(params, state, batch):
        updates, state = opt.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = opt.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return params


def close(got, expected, **tolerance):
    tolerance = tolerance or {"rtol": 2e-4, "atol": 1e-6}
    for k in expected:
        np.testing.assert_allclose(got[k], expected[k], err_msg=k, **tolerance)


def sgd():
    return optax.sgd(0.5, momentum=0.9)


def test_chained(spmd, carried):
    opt = optax.chain(jaxring.optim.allreduce_gradients("x", algorithm="ring"), sgd())
    params, _, _ = trained(spmd, opt)
    close(params, alone(sgd()))
    assert carried() == {"ring": RANKS * len(BATCHES)}


def test_every_third_call_communicates(spmd, carried):
    params, state, updates = trained(spmd, jaxring.optim.distributed(sgd(), "x", every=3))
    pairs = BATCHES.reshape(2, 3 * 2 * RANKS, 5)
    close(params, alone(sgd(), batches=pairs))
    assert sum(carried().values()) == RANKS * 2
    assert [bool(u.any()) for u in updates] == [False, False, True] * 2
    assert int(state.step) == 0


def test_op_sum_is_over_ranks_and_calls(make_spmd):
    spmd = make_spmd({"x": RANKS})
    opt: Any = jaxring.optim.distributed(optax.sgd(1.0), "x", "sum", every=2)
    params, _, _ = trained(spmd, opt, batches=BATCHES[:2])
    count = 2 * RANKS
    close(params, alone(optax.sgd(float(count)), batches=BATCHES[:2].reshape(1, -1, 5)))


def test_multisteps(make_spmd):
    """What MultiSteps wraps sees sums of gradients, which differ between ranks: it refuses them
    itself where types are checked; there the reduction comes before it."""
    pairs = BATCHES.reshape(3, -1, 5)
    reduction = jaxring.optim.allreduce_gradients("x")
    within = optax.MultiSteps(optax.chain(reduction, sgd()), 2)
    params, _, _ = trained(make_spmd({"x": RANKS}, check_vma=False), within)
    close(params, alone(sgd(), batches=pairs))
    before = optax.chain(reduction, optax.MultiSteps(sgd(), 2).gradient_transformation())
    params, _, _ = trained(make_spmd({"x": RANKS}), before)
    close(params, alone(sgd(), batches=pairs))


@pytest.mark.parametrize("every", [1, 2])
def test_other_arguments_reach_the_wrapped_transformation(make_spmd, every):
    def scaled(updates, state, params=None, *, scale, **extra):
        return jax.tree.map(lambda u: scale * u, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda p: (), scaled)
    opt: Any = jaxring.optim.distributed(inner, "x", every=every)

    def f(batch):
        state, updates = opt.init(PARAMS), PARAMS
        for _ in range(every):
            gradients = local_gradients(PARAMS, batch)
            updates, state = opt.update(gradients, state, PARAMS, scale=-2.0)
        return updates["b"]

    spmd = make_spmd({"x": RANKS})
    got = jax.jit(jax.shard_map(f, mesh=spmd.mesh, in_specs=P("x"), out_specs=P()))(BATCHES[0])
    np.testing.assert_allclose(got, -2 * jax.grad(loss)(PARAMS, BATCHES[0])["b"], rtol=1e-4)


def test_dtypes(make_spmd):
    """16-bit gradients are added up in float32; what has no gradient passes."""
    spmd = make_spmd({"v": RANKS}, check_vma=False)
    params = {"half": jnp.zeros(3, jnp.bfloat16), "steps": jnp.int32(7)}
    opt: Any = jaxring.optim.distributed(optax.identity(), "v", "sum", every=3)
    state: Any = opt.init(params)
    assert state.gradients["half"].dtype == jnp.float32
    none = np.zeros((), jax.dtypes.float0)

    def f(x):
        s = state
        for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
            g = {"half": jnp.full(3, value, jnp.bfloat16) * x, "steps": none}
            u, s = opt.update(g, s)
        return u["half"]

    got = spmd(f, np.ones(RANKS, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(got), RANKS * 258)
    with pytest.raises(jaxring.UsageError, match="gradients of int32 cannot be added up"):
        spmd(lambda x: opt.update({"half": x, "steps": jnp.int32(1)}, state)[0], np.ones(RANKS))


# -- Gradients that AD has already reduced (cases.md, 15) -----------------------------------------

TRANSFORMATIONS = {
    "allreduce_gradients": lambda axis: jaxring.optim.allreduce_gradients(axis),
    "distributed": lambda axis: jaxring.optim.distributed(optax.sgd(1.0), axis),
    "every": lambda axis: jaxring.optim.distributed(optax.sgd(1.0), axis, every=2),
    "compressed": lambda axis: jaxring.optim.allreduce_gradients(axis, compression="int8"),
}


@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_reduced_gradients_are_refused(make, make_spmd):
    """An optimizer that reduces once more would see gradients N times too large."""
    spmd, opt = make_spmd({"x": RANKS}), make("x")
    by_ad = lambda params, batch: jax.grad(loss)(params, batch)  # noqa: E731
    by_us = lambda params, batch: jax.grad(  # noqa: E731
        lambda p: loss(jaxring.reduce_gradients_of(p, "x"), batch)
    )(params)
    for gradients in (by_ad, by_us):
        with pytest.raises(jaxring.UsageError, match=r"\['b'\] is already equal on all ranks") as e:
            trained(spmd, opt, gradients=gradients)
        assert "4 times too much" in str(e.value)
        assert "apply jaxring.reduce_gradients_of to the parameters" in str(e.value)


def test_gradients_reduced_over_one_of_two_axes(make_spmd):
    spmd = make_spmd({"x": 2, "y": 2})
    opt: Any = jaxring.optim.allreduce_gradients(("x", "y"))
    with pytest.raises(jaxring.UsageError, match=re.escape("equal on all ranks of ['y']")):
        trained(spmd, opt)


# -- Arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every": 0}, "every must be an integer of at least 1, got 0"),
        ({"every": True}, "every must be an integer of at least 1, got True"),
        ({"op": "max"}, "op 'max' is not linear"),
        ({"compression": "fp8"}, "unknown compression 'fp8'; use bf16, fp16 or int8, or None"),
        ({"compression": "int8", "algorithm": "ring"}, "int8 travels by all_to_all and all_gather"),
    ],
)
def test_arguments_of_distributed(arguments, text):
    with pytest.raises(jaxring.UsageError, match=text):
        jaxring.optim.distributed(sgd(), "x", **arguments)


@pytest.mark.parametrize("op", ["min", "max", "prod"])
def test_compression_of_other_ops(op):
    with pytest.raises(jaxring.UsageError, match=f"op '{op}' does not go with compression"):
        jaxring.optim.allreduce_gradients("x", op, compression="bf16")


def test_compression_of_integers():
    opt: Any = jaxring.optim.allreduce_gradients("x", compression="bf16")
    with pytest.raises(jaxring.UsageError, match=r"leaf \['n'\] is int32, which compression"):
        opt.init({"n": jnp.int32(1)})


def test_an_unbound_axis():
    opt: Any = jaxring.optim.distributed(sgd(), "nowhere", every=2)
    with pytest.raises(jaxring.UnboundAxisError, match="axis name 'nowhere' is not bound"):
        opt.update(PARAMS, opt.init(PARAMS), PARAMS)


def test_without_optax(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match=r"jaxring.optim needs optax: pip install optax"):
        jaxring.optim.allreduce_gradients("x")
