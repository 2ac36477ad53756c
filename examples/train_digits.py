"""Trains a small convolutional network on handwritten digits, data parallel.

`--collectives` says who reduces the gradients, `lax` (pmean) or `jaxring`; the same script serves
three layouts of the ranks:

    python examples/train_digits.py --devices 4                      # devices of one process
    jaxring run -n 4 --distributed examples/train_digits.py --mode mesh     # a mesh over processes
    jaxring run -n 4 examples/train_digits.py --mode communicator    # no mesh: processes alone

The data is the set that scikit-learn ships: 1797 images of 8 by 8 pixels. Everything is
deterministic: two runs give the same bits.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

FLAGS = flags.FLAGS
flags.DEFINE_enum("collectives", "jaxring", ["lax", "jaxring"], "Who reduces the gradients.")
flags.DEFINE_enum("mode", "devices", ["devices", "mesh", "communicator"], "Where the ranks live.")
flags.DEFINE_integer("devices", 1, "CPU devices per process.", lower_bound=1)
flags.DEFINE_integer("epochs", 20, "Passes over the training set.", lower_bound=1)
flags.DEFINE_integer("batch", 128, "Images per step, over all ranks.", lower_bound=1)
flags.DEFINE_float("learning_rate", 3e-3, "Adam's learning rate.")
flags.DEFINE_integer("seed", 0, "Seed of the initial parameters and of the order of the images.")
flags.DEFINE_string("algorithm", "auto", "The allreduce algorithm (jaxring only).")
flags.DEFINE_enum(
    "compression", "none", ["none", "bf16", "fp16", "int8"], "Of the gradients (jaxring only)."
)
flags.DEFINE_string("json", None, "Rank 0 writes what was measured to this file.")

AXIS = "dp"
TEST_IMAGES = 360
Tree = Any


class World(NamedTuple):
    """Where the ranks live, and how a step is run and fed there."""

    size: int
    leader: bool  # whether this process prints and writes files
    axis: Any  # what the collective reduces over: an axis name or a jaxring.Communicator
    local: Callable[[Tree], Tree]  # parameters -> this rank's own copy of them
    create: Callable[[Callable[[], Tree]], Tree]  # runs a function; each rank has its result
    compile: Callable[..., Callable]  # (function, replicated=, sharded=): arguments of each kind
    place: Callable[[np.ndarray], Any]  # a batch -> each rank's share of it


class Dataset(NamedTuple):
    images: np.ndarray  # float32[n, 8, 8, 1] in 0..1
    labels: np.ndarray  # int32[n]


def mesh_world() -> World:
    """The ranks are the devices of one mesh, in this process or in several."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    by_rank = NamedSharding(mesh, P(AXIS))

    def compile_step(function, replicated, sharded=0):
        in_specs = (P(),) * replicated + (P(AXIS),) * sharded
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=P()))

    return World(
        size=mesh.size,
        leader=jax.process_index() == 0,
        axis=AXIS,
        # Without this, AD itself sums the gradient of a replicated parameter over the ranks, and a
        # mean of that is `size` times too big: the gradient trap, of lax.pmean and jaxring alike.
        local=lambda params: jax.lax.pcast(params, AXIS, to="varying"),
        create=lambda function: jax.jit(function, out_shardings=NamedSharding(mesh, P()))(),
        compile=compile_step,
        place=lambda batch: jax.make_array_from_callback(
            batch.shape, by_rank, lambda index: batch[index]
        ),
    )


def communicator_world() -> World:
    """The ranks are processes, each with a JAX of its own that knows only itself."""
    import jaxring

    comm = jaxring.init()
    return World(
        size=comm.world_size,
        leader=comm.rank == 0,
        axis=comm,
        local=lambda params: params,
        create=lambda function: jax.jit(function)(),
        compile=lambda function, replicated, sharded=0: jax.jit(function),
        place=lambda batch: jnp.asarray(comm.shard(batch)),
    )


def mean_over_ranks(world: World) -> Callable[[Tree], Tree]:
    """The one line in which lax and jaxring differ."""
    if FLAGS.collectives == "lax":
        return lambda tree: jax.lax.pmean(tree, world.axis)

    import jaxring

    return lambda tree: jaxring.allreduce(tree, world.axis, op="mean", algorithm=FLAGS.algorithm)


def optimizer_of(world: World) -> optax.GradientTransformation:
    # With optax's eps of 1e-8 Adam magnifies rounding: where gradients are near zero, the order of
    # a sum alone moved a loss by 5 %.
    adam = optax.adam(FLAGS.learning_rate, eps=1e-4)
    if FLAGS.compression == "none":
        return adam

    import jaxring

    return jaxring.optim.distributed(adam, world.axis, compression=FLAGS.compression)


def load_digits() -> tuple[Dataset, Dataset]:
    """The training set and the test set."""
    from sklearn.datasets import load_digits as load

    data: Any = load()
    order = np.random.default_rng(0).permutation(len(data.target))
    images = (data.images[order, :, :, None] / 16).astype(np.float32)
    labels = data.target[order].astype(np.int32)
    train, test = slice(TEST_IMAGES, None), slice(TEST_IMAGES)
    return Dataset(images[train], labels[train]), Dataset(images[test], labels[test])


def batches(data: Dataset, epoch: int) -> Iterator[Dataset]:
    """Batches of equal size in an order that depends on the seed and the epoch alone."""
    order = np.random.default_rng([FLAGS.seed, epoch]).permutation(len(data.labels))
    for start in range(0, len(order) - FLAGS.batch + 1, FLAGS.batch):
        chosen = order[start : start + FLAGS.batch]
        yield Dataset(data.images[chosen], data.labels[chosen])


def init_params(seed: int) -> Tree:
    """He's initialisation, by numpy: it needs no compilation."""
    shapes = {
        "conv1": (3, 3, 1, 16),
        "conv2": (3, 3, 16, 32),
        "dense1": (4 * 4 * 32, 64),
        "dense2": (64, 10),
    }
    rng = np.random.default_rng(seed)

    def layer(shape):
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        weights = (scale * rng.standard_normal(shape)).astype(np.float32)
        return {"w": jnp.asarray(weights), "b": jnp.zeros(shape[-1])}

    return {name: layer(shape) for name, shape in shapes.items()}


def logits(params: Tree, images):
    """Smooth throughout: the choices of a ReLU or of a maximum turn a difference in the last bit of
    a sum into one of the loss (with both, 0.0005 on a machine with AVX-512)."""

    def conv(name, x):
        y = jax.lax.conv_general_dilated(
            x, params[name]["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.gelu(y + params[name]["b"])

    def dense(name, x):
        return x @ params[name]["w"] + params[name]["b"]

    x = conv("conv2", conv("conv1", images))
    x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    x = x.reshape(x.shape[0], -1)
    return dense("dense2", jax.nn.gelu(dense("dense1", x)))


def mean_loss(params: Tree, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def accuracy(params: Tree, data: Dataset) -> float:
    guesses = np.asarray(jax.jit(logits)(params, data.images)).argmax(-1)
    return float((guesses == data.labels).mean())


def train(world: World, mean: Callable[[Tree], Tree], data: Dataset) -> dict[str, Any]:
    """Trains and returns parameters, the loss of every step and the median time of a step."""
    optimizer = optimizer_of(world)

    def initial_state():
        params = init_params(FLAGS.seed)
        return params, optimizer.init(params)

    def step_of_a_rank(params, opt_state, images, labels):
        loss, grads = jax.value_and_grad(mean_loss)(world.local(params), images, labels)
        if FLAGS.compression == "none":
            loss, grads = mean((loss, grads))
        else:  # the optimizer reduces the gradients
            loss = mean(loss)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = world.compile(step_of_a_rank, replicated=2, sharded=2)
    params, opt_state = world.create(initial_state)
    losses, step_s = [], []
    for epoch in range(FLAGS.epochs):
        for images, labels in batches(data, epoch):
            start = time.perf_counter()
            params, opt_state, loss = step(
                params, opt_state, world.place(images), world.place(labels)
            )
            losses.append(float(loss))
            step_s.append(time.perf_counter() - start)
        if world.leader and (epoch + 1) % 5 == 0:
            print(f"epoch {epoch + 1}: loss {losses[-1]:.5f}", flush=True)
    return {"params": params, "losses": losses, "step_ms": 1e3 * statistics.median(step_s)}


def time_of_a_reduction_ms(world: World, mean: Callable[[Tree], Tree], params: Tree) -> float:
    """Median time of one reduction of the whole gradient tree, jitted alone."""
    reduce = world.compile(lambda tree: mean(world.local(tree)), replicated=1)
    times_s = []
    for _ in range(30):
        start = time.perf_counter()
        jax.block_until_ready(reduce(params))
        times_s.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times_s)


def engine_stats() -> list[dict[str, Any]]:
    """What jaxring's engine counted on this process; nothing for lax."""
    if FLAGS.collectives == "lax":
        return []
    import jaxring

    return jaxring.stats()


def measure(world: World) -> dict[str, Any]:
    """Trains, tests, and returns everything worth knowing about it, ready for JSON."""
    training_set, test_set = load_digits()
    mean = mean_over_ranks(world)
    result = train(world, mean, training_set)
    stats = engine_stats()  # before the reductions that time_of_a_reduction_ms adds
    params = jax.device_get(result["params"])
    leaves = jax.tree.leaves(params)
    return {
        "collectives": FLAGS.collectives,
        "mode": FLAGS.mode,
        "compression": FLAGS.compression,
        "ranks": world.size,
        "losses": result["losses"],
        "test_accuracy": accuracy(params, test_set),
        "params_sha256": hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest(),
        "gradient_bytes": sum(leaf.nbytes for leaf in leaves),
        "step_ms": result["step_ms"],
        "reduction_ms": time_of_a_reduction_ms(world, mean, result["params"]),
        "stats": stats,
    }


def main(_) -> None:
    if FLAGS.mode == "communicator" and FLAGS.collectives == "lax":
        raise app.UsageError("lax has no collectives without a mesh; use --mode mesh or jaxring.")
    if FLAGS.compression != "none" and FLAGS.collectives == "lax":
        raise app.UsageError("lax has no compression; use --collectives jaxring.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", FLAGS.devices)
    if FLAGS.mode == "mesh" and not jax.distributed.is_initialized():
        jax.distributed.initialize()  # finds Slurm, Open MPI, …; `jaxring run --distributed` did it
    world = communicator_world() if FLAGS.mode == "communicator" else mesh_world()
    if FLAGS.batch % world.size:
        raise app.UsageError(f"--batch={FLAGS.batch} is not divisible by {world.size} ranks.")
    report = measure(world)
    if not world.leader:
        return
    print(
        f"{FLAGS.collectives}, {world.size} ranks ({FLAGS.mode}): "
        f"final loss {report['losses'][-1]:.6f}, test accuracy {report['test_accuracy']:.4f}, "
        f"{report['step_ms']:.2f} ms a step; a reduction alone: {report['reduction_ms']:.2f} ms"
    )
    if FLAGS.json:
        with open(FLAGS.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    app.run(main)
