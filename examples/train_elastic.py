"""Trains a small network on handwritten digits, and goes on when processes die.

    jaxring run -n 3 --restarts 1 examples/train_elastic.py --kill_rank 1 --kill_step 30

Rank 1 kills itself in step 30. The two others go on from the last commit; the process that is
started in its place joins them at a later one. Every step goes through the same 120 images whatever
the number of ranks is, each rank through its share of them.
"""

import functools
import os
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

import jaxring

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 150, "Steps in all.", lower_bound=1)
flags.DEFINE_integer("commit_every", 5, "Steps from commit to commit.", lower_bound=1)
flags.DEFINE_integer("kill_rank", -1, "This rank of the job kills itself once.")
flags.DEFINE_integer("kill_step", 30, "In which step.")
flags.DEFINE_float("pause_s", 0.0, "After each step, so that somebody may come.")

BATCH = 120
TEST_IMAGES = 360
optimizer = optax.adam(1e-2)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits[1]))
    return digits[0][order].astype(np.float32) / 16, digits[1][order].astype(np.int32)


def logits(params: Any, images: Any) -> jax.Array:
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


# Jitted once, outside of `train`, with the communicator as a static argument: it stays the same one
# in a smaller or larger world. Only the shape of a rank's share is a new program then.
@functools.partial(jax.jit, static_argnums=0)
def step(comm: jaxring.Communicator, params: Any, opt_state: Any, images: Any, labels: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels)
        return jnp.sum(losses) / BATCH  # the ranks' shares may be uneven

    grads = jaxring.allreduce(jax.grad(loss)(params), comm, "sum")
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


def train_step(state: Any, comm: jaxring.Communicator, data: tuple[np.ndarray, np.ndarray]) -> None:
    count = len(data[0]) - TEST_IMAGES
    chosen = np.random.default_rng(state.step).choice(count, BATCH, replace=False)
    images, labels = (part[comm.shard(chosen)] for part in data)
    state.params, state.opt_state = step(comm, state.params, state.opt_state, images, labels)
    state.step += 1
    time.sleep(FLAGS.pause_s)


@jaxring.elastic.run(min_ranks=1)
def train(state: Any, comm: jaxring.Communicator, data: tuple[np.ndarray, np.ndarray]) -> int:
    if comm.rank == 0:
        print(f"from step {state.step} on with {comm.world_size} ranks", flush=True)
    while state.step < FLAGS.steps:
        train_step(state, comm, data)
        kill_if_asked(state.step)
        if state.step % FLAGS.commit_every == 0:
            state.commit()
    return comm.rank


def kill_if_asked(step: int) -> None:
    first = "JAXRING_RESTART" not in os.environ
    if first and os.environ.get("JAXRING_RANK") == str(FLAGS.kill_rank) and step == FLAGS.kill_step:
        os.kill(os.getpid(), signal.SIGKILL)


def main(_: list[str]) -> None:
    data = read_digits()
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": 0.1 * jax.random.normal(keys[0], (64, 64)),
        "b1": jnp.zeros(64),
        "w2": 0.1 * jax.random.normal(keys[1], (64, 10)),
        "b2": jnp.zeros(10),
    }
    state = jaxring.elastic.State(params=params, opt_state=optimizer.init(params), step=0)
    if train(state, data) == 0:
        images, labels = (part[-TEST_IMAGES:] for part in data)
        accuracy = np.mean(np.argmax(logits(state.params, images), -1) == labels)
        print(f"test accuracy {accuracy:.4f} after {state.step} steps, {state.commits} commits")


if __name__ == "__main__":
    app.run(main)
