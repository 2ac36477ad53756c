"""Collectives for JAX: allreduce over mesh axes or between processes, as an XLA custom call.

    import jaxring
    grads = jaxring.allreduce(grads, "dp", "mean")      # instead of jax.lax.pmean(grads, "dp")

The names below are the public ones.
"""

# Before what takes a second to import.
from jaxring._src import command_guard  # noqa: F401

# isort: split

import importlib
from typing import TYPE_CHECKING, Any

from jax.lax import pcast

from jaxring import errors

# First, as it says in one sentence if the native module is missing; and the methods for objects.
from jaxring._src import native_facts, objects  # noqa: F401
from jaxring._src.all_gather import all_gather
from jaxring._src.all_to_all import all_to_all
from jaxring._src.allreduce import allreduce
from jaxring._src.barrier import barrier
from jaxring._src.broadcast import broadcast
from jaxring._src.engine import register, rejoin, stats
from jaxring._src.gradients import reduce_gradients_of
from jaxring._src.install import install, replacing_lax, uninstall
from jaxring._src.lax_names import (
    pbroadcast,
    pmax,
    pmean,
    pmin,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
)
from jaxring._src.place import axis_index, axis_size
from jaxring._src.ppermute import ppermute
from jaxring._src.reduce import reduce
from jaxring._src.reduce_scatter import reduce_scatter
from jaxring._src.start_done import allreduce_done, allreduce_start
from jaxring._src.world import init
from jaxring.communicator import Communicator
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
    from jaxring import elastic, metrics, optim, testing, timeline, tuning

__all__ = [
    "AbortedError",
    "Communicator",
    "Error",
    "MismatchError",
    "PeerError",
    "TimeoutError",
    "UnboundAxisError",
    "UsageError",
    "all_gather",
    "all_to_all",
    "allreduce",
    "allreduce_done",
    "allreduce_start",
    "axis_index",
    "axis_size",
    "barrier",
    "broadcast",
    "config",
    "elastic",
    "errors",
    "init",
    "install",
    "metrics",
    "optim",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "reduce",
    "reduce_gradients_of",
    "reduce_scatter",
    "register",
    "rejoin",
    "replacing_lax",
    "stats",
    "testing",
    "timeline",
    "tuning",
    "uninstall",
]

# Modules that cost time to import and few programs need.
_ON_DEMAND = {"elastic", "metrics", "optim", "testing", "timeline", "tuning"}


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"jaxring.{name}")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("jaxring")
    raise AttributeError(f"module 'jaxring' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
