"""What fsdp.py and mesh_2d.py share: data, the step, and training beside one device."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import jaxring

STEPS = 10


def make_data(width: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(1).normal(size=(64, width)).astype(np.float32)
    return inputs, np.sin(inputs)


def make_step(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    total: Callable[[Any], Any] = lambda value: value,
) -> Callable[..., Any]:
    """A step of training; `total` makes the loss of all of what a rank has."""

    def step(params, state, inputs, targets):
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, total(value)

    return step


def train(step, optimizer, params, data) -> list[float]:
    """The losses of all steps."""
    step, state, losses = jax.jit(step), optimizer.init(params), []
    for _ in range(STEPS):
        params, state, value = step(params, state, *data)
        losses.append(float(value))
    return losses


def compare(name: str, main: Callable[[], tuple[list[float], list[float]]]) -> None:
    """Prints the losses on 4 devices beside those on one, and what has travelled."""
    jax.config.update("jax_num_cpu_devices", 4)
    for row, losses in zip((name, "one device"), main(), strict=True):
        print(f"{row + ':':20} loss {losses[0]:.5f} -> {losses[-1]:.5f}")
    for row in jaxring.stats():
        print(f"{row['operations']:4} x {row['collective']}")
