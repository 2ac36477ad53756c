"""Flax NNX, data parallel over processes; the lines that jaxring adds are marked.

jaxring run -n 2 examples/with_flax.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxring  # 1: the import

STEPS = 30


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and what a network of another seed makes of them."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(256, 16)).astype(np.float32)
    return inputs, np.tanh(inputs @ rng.normal(size=(16, 4))).astype(np.float32)


def main(comm: jaxring.Communicator) -> list[float]:
    """Trains; every rank returns the losses of its own share of the data."""
    model = Model(nnx.Rngs(0))  # the same seed on all ranks, so that they begin alike
    # 2: the optimizer reduces the gradients over the ranks
    transformation = jaxring.optim.distributed(optax.adam(1e-2), comm)
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    inputs, targets = comm.shard(make_data())  # 3: each rank's share

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return jnp.mean((model(inputs) - targets) ** 2)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    return [float(step(model, optimizer)) for _ in range(STEPS)]


if __name__ == "__main__":
    with jaxring.init() as world:
        result = main(world)
        print(f"rank {world.rank} of {world.world_size}: loss {result[0]:.4f} -> {result[-1]:.4f}")
