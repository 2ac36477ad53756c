"""The training of the elastic soak, step by step, and the oracle that makes the same steps alone.

The step is made of programs that both compile, with the sum over ranks between them: what is left
to compare is jaxring's. Each rank has an error-feedback residual of its own, and all have the same
parameters and momentum. After a re-forming all go on with the residual of one of them, whose rank
the history tells: row i is (world size, that rank, or -1 where each has its own) of step i."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from elastic_plan import STEPS

SIZE = 12_000  # elements of float32: through FIFOs


def initial() -> dict[str, Any]:
    return {
        "params": jnp.linspace(-1, 1, SIZE),
        "momentum": jnp.zeros(SIZE),
        "residual": jnp.zeros(SIZE),
        "step": 0,
        "origin": 0,  # the rank whose residual this is
        "waits": 0,
        "history": np.full((STEPS, 2), -1, np.int32),
    }


@jax.jit
def gradient(params: Any, residual: Any, step: Any, rank: Any) -> tuple[Any, Any]:
    """(what this rank gives to the mean, its residual): as 16-bit floats, with error feedback."""
    own = jnp.sin(params * (rank + 1) + step) + residual
    sent = own.astype(jnp.bfloat16).astype(jnp.float32)
    return sent, own - sent


@jax.jit
def update(params: Any, momentum: Any, mean: Any) -> tuple[Any, Any]:
    momentum = 0.9 * momentum + mean
    return params - 0.05 * momentum, momentum


def digest(*arrays: Any) -> int:
    return zlib.crc32(b"".join(np.asarray(x).tobytes() for x in arrays))


def replay(history: Any) -> tuple[list[int], list[int]]:
    """(digest of parameters and momentum after each step, of each rank's residual at last)."""
    values = initial()
    params, momentum = values["params"], values["momentum"]
    residuals = [values["residual"]]
    digests = []
    for step, (size, origin) in enumerate(np.asarray(history).tolist()):
        if origin >= 0:
            residuals = [residuals[origin]] * size
        sent = []
        for rank in range(size):
            given, residuals[rank] = gradient(params, residuals[rank], step, rank)
            sent.append(np.asarray(given))
        total = sent[0]
        for given in sent[1:]:  # in rank order, as with deterministic=True
            total = total + given
        params, momentum = update(params, momentum, total / np.float32(size))
        digests.append(digest(params, momentum))
    return digests, [digest(residual) for residual in residuals]
