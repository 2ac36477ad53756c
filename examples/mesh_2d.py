"""Data parallel times model parallel on a 2-D mesh: `python examples/mesh_2d.py`.

Each weight matrix is cut over the mesh axis "model": the first of a layer by columns, the second by
rows (Megatron's way), and so are the activations between layers. Over "model", every layer gathers
activations (all_gather) and adds up partial products (reduce_scatter); AD makes each the other's
transpose. Over "data", only gradients travel: reduce_gradients_of allreduces them, in buckets.
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

WIDTH, HIDDEN, LAYERS = 16, 32, 2
SPECS = [{"up": P(None, "model"), "down": P("model", None)} for _ in range(LAYERS)]


def init_params() -> Any:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) / np.sqrt(rows)).astype(np.float32)

    return [{"up": matrix(WIDTH, HIDDEN), "down": matrix(HIDDEN, WIDTH)} for _ in range(LAYERS)]


def loss_of_one_device(params, inputs, targets):
    x = inputs
    for layer in params:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x - targets) ** 2)


def loss_of_a_rank(params, inputs, targets):
    """Its part of the loss: of its rows of the batch and its columns of the activations."""
    params = jaxring.reduce_gradients_of(params, "data")
    x = inputs
    for layer in params:
        whole = jaxring.all_gather(x, "model", axis=1, tiled=True)
        partial = jax.nn.gelu(whole @ layer["up"]) @ layer["down"]
        x = x + jaxring.reduce_scatter(partial, "model", scatter_dimension=1, tiled=True)
    return jnp.mean((x - targets) ** 2) / jaxring.axis_size("model")


def main() -> tuple[list[float], list[float]]:
    """Trains on a 2 x 2 mesh and on one device; returns the losses of both."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    optimizer, params, data = optax.adam(1e-2), init_params(), one_device.make_data(WIDTH)

    def total(value):
        return jaxring.allreduce(jaxring.allreduce(value, "model"), "data", "mean")

    state_specs = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        optimizer.init(params),
        SPECS,
        transform_non_params=lambda _: P(),
    )
    sharded = jax.shard_map(
        one_device.make_step(loss_of_a_rank, optimizer, total),
        mesh=mesh,
        in_specs=(SPECS, state_specs, P("data", "model"), P("data", "model")),
        out_specs=(SPECS, state_specs, P()),
    )
    alone = one_device.make_step(loss_of_one_device, optimizer)
    ours, reference = (one_device.train(s, optimizer, params, data) for s in (sharded, alone))
    return ours, reference


if __name__ == "__main__":
    one_device.compare("2 x 2 mesh", main)
