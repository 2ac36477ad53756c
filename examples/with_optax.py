"""optax, data parallel over processes; the lines that jaxring adds are marked.

jaxring run -n 2 examples/with_optax.py

# on two hosts, the same on each, with --host-rank 0 and 1
jaxring run --hosts 2 --host-rank 0 --coordinator host0:5000 --per-host 4 examples/with_optax.py
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxring  # 1: the import

STEPS = 40


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and what a network of another seed makes of them."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(256, 16)).astype(np.float32)
    return inputs, np.tanh(inputs @ rng.normal(size=(16, 4))).astype(np.float32)


def init_params(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    w1, w2 = (0.3 * rng.normal(size=s).astype(np.float32) for s in ((16, 32), (32, 4)))
    return {"w1": w1, "b1": np.zeros(32, np.float32), "w2": w2}


def loss(params, inputs, targets):
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - targets) ** 2)


def main(comm: jaxring.Communicator) -> list[float]:
    """Trains; every rank returns the losses of its own share of the data."""
    # 2: gradients of two steps are added up here, and reduced over the ranks in 16 bits
    optimizer = jaxring.optim.distributed(optax.adam(1e-2), comm, every=2, compression="bf16")
    inputs, targets = comm.shard(make_data())  # 3: each rank's share
    # Ranks begin alike: with rank 0's parameters, whatever the others have.
    params = jaxring.broadcast(init_params(comm.rank), comm, root=0)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    with jaxring.init() as world:
        result = main(world)
        print(f"rank {world.rank} of {world.world_size}: loss {result[0]:.4f} -> {result[-1]:.4f}")
