"""axis_index and axis_size, of axes as in lax and of communicators.

A communicator's rank and size are read when a program runs: elastic training changes both under
programs that stay compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from jaxring import communicator
from jaxring._src import axes, calls, engine
from jaxring.communicator import Communicator
from jaxring.errors import UsageError

TARGET = "jaxring_place"


def axis_index(axis_name: Any) -> jax.Array:
    """The rank of this device along an axis, as `jax.lax.axis_index`, or in a communicator.

    Args:
      axis_name: a bound axis name, a tuple of them, or a `jaxring.Communicator`.

    Returns: An int32 scalar. That of a Communicator is read when the program runs, so that it is
      right in programs that were compiled before elastic training lost or won ranks.

    Raises: NameError (UnboundAxisError) for a name that is not bound.

    Example: ``key = jax.random.fold_in(key, jaxring.axis_index(comm))``
    """
    return _place(axis_name, "axis_index")[0] if _is_ours(axis_name) else lax.axis_index(axis_name)


def axis_size(axis_name: Any) -> Any:
    """The number of ranks along an axis, as `jax.lax.axis_size`, or in a communicator.

    Args:
      axis_name: a bound axis name, a tuple of them, or a `jaxring.Communicator`.

    Returns: A Python int, as in lax; of a Communicator an int32 scalar that is read when the
      program runs (its `world_size` is the Python int).

    Example: ``learning_rate * jaxring.axis_size(comm)``
    """
    return _place(axis_name, "axis_size")[1] if _is_ours(axis_name) else lax.axis_size(axis_name)


def _is_ours(axis_name: Any) -> bool:
    return isinstance(axis_name, Communicator)


def _place(comm: Communicator, call: str) -> Sequence[jax.Array]:
    return place_p.bind(key=axes.resolve(comm, None, f"jaxring.{call}").communicator)


def _abstract_eval(*, key: str) -> list[ShapedArray]:
    return [ShapedArray((), np.dtype(np.int32))] * 2


def _lower(ctx: Any, *, key: str) -> Sequence[Any]:
    engine.register()
    # No side effect: within a launch it is the same number however often it is read.
    return jax.ffi.ffi_lowering(TARGET)(ctx, communicator=key)


def _on_cuda(ctx: Any, *, key: str) -> Sequence[Any]:
    # Constants of the trace: worlds of GPUs keep their ranks (docs/elastic.md).
    comm = communicator.find(key)
    return [mlir.ir_constant(np.int32(n)) for n in (comm.rank, comm.world_size)]


def _without_backend(ctx: Any, *, key: str) -> Sequence[Any]:
    raise UsageError(
        f"{calls.describe('axis_index', None)}: jaxring has no backend for "
        f"{', '.join(ctx.platforms or ctx.module_context.platforms)}; compute on "
        f"{calls.one_of(engine.backends())}"
    )


place_p = Primitive("jaxring_place")
place_p.multiple_results = True
place_p.def_impl(functools.partial(xla.apply_primitive, place_p))
place_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(place_p, _without_backend)
mlir.register_lowering(place_p, _lower, platform="cpu")
mlir.register_lowering(place_p, _on_cuda, platform="cuda")
communicator.extend(axis_index=axis_index)
