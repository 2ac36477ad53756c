"""Training with a Communicator: optax's transformations, checkpoints by one rank, broadcast of
parameters."""

import hashlib
import importlib.util
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring.testing import spawn

optax: Any = pytest.importorskip("optax")

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(6, 4)).astype(np.float32),
    "b": RNG.normal(size=4).astype(np.float32),
}
BATCHES = RNG.normal(size=(12, 8, 6)).astype(np.float32)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def adam():
    return optax.adam(1e-2, eps=1e-4)


def bits(tree):
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def trainer(comm, opt):
    """(params, state, batches) -> (params, state), each rank with its share of each batch."""

    @jax.jit
    def step(params, state, batch):
        updates, state = opt.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    def train(params, state, batches):
        for batch in batches:
            params, state = step(params, state, comm.shard(batch))
        return params, state

    return train


HAS_ORBAX = importlib.util.find_spec("orbax") is not None


def all_ways(comm, folder):
    results = {}
    for every, compression in ((1, "none"), (2, "int8")):
        how = {"every": every, "compression": None if compression == "none" else compression}
        opt = jaxring.optim.distributed(adam(), comm, **how)
        params, state = trainer(comm, opt)(PARAMS, opt.init(PARAMS), BATCHES)
        results[every, compression] = jax.device_get(params)
    opt = jaxring.optim.distributed(optax.sgd(1.0), comm, every=2)  # eager
    state, updates = opt.init(PARAMS), []
    for batch in BATCHES[:2]:
        u, state = opt.update(jax.grad(loss)(PARAMS, comm.shard(batch)), state, PARAMS)
        updates.append(jax.device_get(u))
    steps = optax.MultiSteps(optax.chain(jaxring.optim.allreduce_gradients(comm), adam()), 2)
    params, _ = trainer(comm, steps)(PARAMS, steps.init(PARAMS), BATCHES)
    resumed = interrupted(comm, folder) if HAS_ORBAX else None
    return results, updates, jax.device_get(params), from_one_rank(comm), resumed


def from_one_rank(comm):
    """Parameters, optimizer state and PRNG key, which began differently, of rank 1."""
    key = jax.random.key(comm.rank)
    params = {"w": jax.random.normal(key, (3, 2)), "b": jnp.full(2, comm.rank, jnp.bfloat16)}
    state = jax.tree.map(lambda x: x + comm.rank, adam().init(params))
    mine = bits((params, state))
    params, state, key = jaxring.broadcast((params, state, key), comm, root=1)
    return mine, bits((params, state)), jax.random.key_data(key).tolist()


def interrupted(comm, folder):
    """One rank writes a checkpoint in the middle of accumulation, all resume from it; then the same
    without it."""
    import orbax.checkpoint as ocp

    opt = jaxring.optim.distributed(adam(), comm, every=4, compression="int8")
    train = trainer(comm, opt)
    params, state = train(PARAMS, opt.init(PARAMS), BATCHES[:6])
    state = jaxring.optim.consolidate(state, comm)
    with ocp.StandardCheckpointer() as checkpointer:
        if comm.rank == 0:
            checkpointer.save(f"{folder}/checkpoint", {"params": params, "state": state})
            checkpointer.wait_until_finished()
        jaxring.barrier(comm)
        fresh = {"params": PARAMS, "state": opt.init(PARAMS)}
        restored = checkpointer.restore(f"{folder}/checkpoint", fresh)
    pickled = pickle.loads(pickle.dumps(jax.device_get(state)))
    assert bits(pickled) == bits(restored["state"]) == bits(state)
    assert int(restored["state"].step) == 2
    assert np.asarray(restored["state"].error["w"]).any()
    resumed = train(restored["params"], restored["state"], BATCHES[6:])
    return bits(resumed), bits(train(params, state, BATCHES[6:]))


def alone(batches):
    opt, params = adam(), PARAMS

    @jax.jit
    def step(params, state, batch):
        updates, state = opt.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = opt.init(params)
    for batch in batches:
        params, state = step(params, state, batch)
    return jax.device_get(params)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return spawn(all_ways, 2, str(tmp_path_factory.mktemp("checkpoints")))


def test_broadcast_of_parameters(ranks):
    (mine, first, key), (root, second, other_key) = (rank[-2] for rank in ranks)
    assert mine != root
    assert first == second == root
    assert key == other_key


def test_all_ways_against_one_process(ranks):
    assert bits(ranks[0][:-2]) == bits(ranks[1][:-2])
    results, updates, multi_steps, *_ = ranks[0]
    pairs = BATCHES.reshape(6, 16, 6)
    expected = {1: alone(BATCHES), 2: alone(pairs)}
    for (every, compression), params in results.items():
        tolerance = {"none": 1e-5, "int8": 2e-2}[compression]
        for k in PARAMS:
            np.testing.assert_allclose(params[k], expected[every][k], atol=tolerance)
    np.testing.assert_allclose(multi_steps["w"], expected[2]["w"], atol=1e-5)
    assert not updates[0]["w"].any()
    np.testing.assert_allclose(updates[1]["w"], -jax.grad(loss)(PARAMS, pairs[0])["w"], atol=1e-6)


def test_one_rank_saves_and_all_resume(ranks):
    if not HAS_ORBAX:
        pytest.skip("orbax is not installed: pip install 'jaxring[test]'")
    with_checkpoint, without = zip(*(rank[-1] for rank in ranks), strict=True)
    # Ranks end with their own sums and errors, so that only their parameters are equal.
    assert with_checkpoint == without
