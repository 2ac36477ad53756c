"""Equinox, data parallel over processes; the lines that jaxring adds are marked.

jaxring run -n 2 examples/with_equinox.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxring  # 1: the import

STEPS = 30


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and what a network of another seed makes of them."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(256, 16)).astype(np.float32)
    return inputs, np.tanh(inputs @ rng.normal(size=(16, 4))).astype(np.float32)


def main(comm: jaxring.Communicator) -> list[float]:
    """Trains; every rank returns the losses of its own share of the data."""
    # The same seed on all ranks, so that they begin alike.
    model = eqx.nn.MLP(16, 4, width_size=32, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    # 2: the optimizer reduces the gradients over the ranks
    optimizer = jaxring.optim.distributed(optax.adam(1e-2), comm)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    inputs, targets = comm.shard(make_data())  # 3: each rank's share

    @eqx.filter_jit
    def step(model, state):
        def loss(model):
            return jnp.mean((jax.vmap(model)(inputs) - targets) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    losses = []
    for _ in range(STEPS):
        model, state, value = step(model, state)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    with jaxring.init() as world:
        result = main(world)
        print(f"rank {world.rank} of {world.world_size}: loss {result[0]:.4f} -> {result[-1]:.4f}")
