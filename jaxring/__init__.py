"""Collectives for JAX: allreduce over mesh axes or between processes, as an XLA custom call.

    import jaxring
    grads = jaxring.allreduce(grads, "dp", "mean")      # instead of jax.lax.pmean(grads, "dp")

The names below are the public ones.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jax.lax import axis_index, axis_size, pcast

from jaxring import errors
from jaxring._src.allreduce import allreduce
from jaxring._src.gradients import reduce_gradients_of
from jaxring.communicator import Communicator, init, stats
from jaxring.config import config
from jaxring.errors import (
    AbortedError,
    Error,
    MismatchError,
    PeerError,
    TimeoutError,
    UnboundAxisError,
    UsageError,
)

if TYPE_CHECKING:
    from jaxring import testing

__all__ = [
    "AbortedError",
    "Communicator",
    "Error",
    "MismatchError",
    "PeerError",
    "TimeoutError",
    "UnboundAxisError",
    "UsageError",
    "allreduce",
    "axis_index",
    "axis_size",
    "config",
    "errors",
    "init",
    "pcast",
    "reduce_gradients_of",
    "stats",
    "testing",
]

_ON_DEMAND = {"testing"}  # modules that cost time to import and few programs need


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"jaxring.{name}")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("jaxring")
    raise AttributeError(f"module 'jaxring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
