"""Fully sharded data parallel (FSDP, ZeRO 3): `python examples/fsdp.py`.

Every rank holds one part of each parameter and of the optimizer's state. A layer gathers its
weights when it needs them (all_gather); in the backward pass the transpose of that reduces their
gradient and leaves each rank its own part (reduce_scatter). jax.checkpoint makes the backward pass
gather again, so that no whole weight is kept between the two.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import one_device
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxring

WIDTH, LAYERS = 32, 3


def init_params() -> Any:
    rng = np.random.default_rng(0)
    shape = WIDTH, WIDTH
    return [
        {
            "w": (rng.normal(size=shape) / np.sqrt(WIDTH)).astype(np.float32),
            "b": np.zeros(WIDTH, np.float32),
        }
        for _ in range(LAYERS)
    ]


def layer(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"])


def loss_of_one_device(params, inputs, targets):
    x = inputs
    for own in params:
        x = layer(own, x)
    return jnp.mean((x - targets) ** 2)


def loss_of_a_rank(parts, inputs, targets):
    """Its part of the loss, from its parts of the parameters and its rows of the batch."""

    @jax.checkpoint
    def gathered_layer(part, x):
        return layer(jaxring.all_gather(part, "fsdp", tiled=True), x)

    x = inputs
    for part in parts:
        x = gathered_layer(part, x)
    return jnp.mean((x - targets) ** 2) / jaxring.axis_size("fsdp")


def main() -> tuple[list[float], list[float]]:
    """Trains on 4 devices and on one; returns the losses of both."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    optimizer, params, data = optax.adam(1e-2), init_params(), one_device.make_data(WIDTH)
    # Adam's moments are cut as the parameters are; its step count is the same everywhere.
    state_specs = jax.tree.map(lambda x: P("fsdp") if x.ndim else P(), optimizer.init(params))
    specs = P("fsdp"), state_specs
    sharded = jax.shard_map(
        one_device.make_step(
            loss_of_a_rank, optimizer, total=lambda value: jaxring.allreduce(value, "fsdp")
        ),
        mesh=mesh,
        in_specs=(*specs, P("fsdp"), P("fsdp")),
        out_specs=(*specs, P()),
    )
    alone = one_device.make_step(loss_of_one_device, optimizer)
    ours, reference = (one_device.train(s, optimizer, params, data) for s in (sharded, alone))
    return ours, reference


if __name__ == "__main__":
    one_device.compare("4 devices, sharded", main)
