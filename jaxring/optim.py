"""Gradient transformations of optax that reduce gradients over ranks.

    opt = optax.chain(jaxring.optim.allreduce_gradients("dp"), optax.adamw(1e-3))
    opt = jaxring.optim.distributed(optax.adamw(1e-3), "dp", every=4, compression="bf16")

optax itself is needed only here: ``pip install optax``. The states are pytrees of arrays, to be
saved and restored like any other; `consolidate` makes what ranks have for themselves equal first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxring._src import accumulation, axes, calls, local_state, reductions
from jaxring._src import compression as compressions
from jaxring._src.allreduce import allreduce, of_pytree
from jaxring._src.gradients import check_not_reduced
from jaxring.errors import UsageError

if TYPE_CHECKING:
    import optax

__all__ = [
    "DistributedState",
    "ReductionState",
    "allreduce_gradients",
    "consolidate",
    "distributed",
]


class ReductionState(NamedTuple):
    """State of `allreduce_gradients`.

    Attributes:
      error: what compression has lost on this rank, to be sent later: float32 (float64 for float64
        leaves), with the structure of the gradients; () without compression.
    """

    error: Any


class DistributedState(NamedTuple):
    """State of `distributed`.

    Attributes:
      step: int32 scalar, how many gradients have been added up: 0 … every - 1.
      gradients: their sum on this rank, in float32 or wider; () if every is 1.
      error: as of `ReductionState`.
      inner: the state of the wrapped transformation.
    """

    step: Any
    gradients: Any
    error: Any
    inner: Any


def allreduce_gradients(
    axis_name: Any,
    op: str = "mean",
    *,
    compression: str | None = None,
    algorithm: str = "auto",
    name: str | None = None,
) -> optax.GradientTransformation:
    """A transformation that reduces the gradients over all ranks, in buckets.

    Put it first in optax.chain. Gradients are of each rank's own loss, of parameters that are equal
    on all ranks; under check_vma=True take them of
    ``jax.lax.pcast(params, axis_name, to="varying")``, or leave this transformation out and use
    `jaxring.reduce_gradients_of`.

    Args:
      axis_name: a bound axis name, a tuple of them, or a `jaxring.Communicator`.
      op: as for `jaxring.allreduce`; "mean" for losses that are means over a rank's batch.
      compression: None; or for floats "bf16", "fp16" (half of float32's bytes) or "int8" (in blocks
        of 256 elements with a float32 scale, a quarter), all with sums in float32. What it loses is
        added to the next gradients (error feedback), for which the state holds an array for each
        parameter. With "mean" and "sum" only.
      algorithm: as for `jaxring.allreduce`. Between hosts and on ring and tree, 16-bit partial sums
        travel in float32, so that less is saved than with "direct". Not with int8.
      name: appears in errors, timeline and profiler.

    Returns:
      An optax.GradientTransformation. Updates have the shapes of the gradients; their dtypes are
      the gradients', except for means of integers (float32).

    Raises:
      UsageError (a ValueError): an argument that cannot work; in update, a gradient that AD has
        reduced already; with compression, in init or update a leaf that is no float.
      UnboundAxisError (also a NameError): in update, a name that is not bound.
      ImportError: optax is not installed.

    Derivative: that of `jaxring.allreduce`; of int8 zero, as of any rounding.

    Example, inside jax.shard_map over "dp", or with a Communicator in place of "dp":

        opt = optax.chain(jaxring.optim.allreduce_gradients("dp"), optax.adamw(1e-3))
        updates, state = opt.update(grads, state, params)
    """
    optax = _optax()
    call = calls.describe("optim.allreduce_gradients", name)
    reduction = _Reduction(axis_name, op, compression, algorithm, name, call).checked()

    def update(updates: Any, state: ReductionState, params: Any = None) -> Any:
        del params
        updates, error = reduction(updates, state.error)
        return updates, ReductionState(error)

    return optax.GradientTransformation(lambda p: ReductionState(reduction.no_error(p)), update)


def distributed(
    tx: optax.GradientTransformation,
    axis_name: Any,
    op: str = "mean",
    *,
    every: int = 1,
    compression: str | None = None,
    algorithm: str = "auto",
    name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`tx` of gradients that are reduced over all ranks, and over `every` calls before.

    Ranks add up their own gradients; only each `every`-th call communicates and calls `tx`, the
    others give updates of zero. (optax.MultiSteps calls what it wraps every time.)

    Args:
      tx: what follows the reduction; it is the same on all ranks.
      every: calls of update for each reduction, at least 1.
      axis_name, op, compression, algorithm, name: as for `allreduce_gradients`; `op` is "mean" or
        "sum", over ranks and calls.

    Returns:
      An optax.GradientTransformationExtraArgs whose state is a `DistributedState`. In it, sums and
      errors are each rank's own, typed as they come in: in jax.shard_map they go in and out with
      the rest of the state by P(). See `consolidate` for saving it.

    Raises: as `allreduce_gradients`.

    Example, inside jax.shard_map over "dp", or with a Communicator in place of "dp":

        opt = jaxring.optim.distributed(optax.adamw(1e-3), "dp", every=4, compression="int8")
        updates, state = opt.update(grads, state, params)
    """
    optax = _optax()
    call = calls.describe("optim.distributed", name)
    if op not in ("mean", "sum"):
        raise UsageError(f"{call}: op {op!r} is not linear; use mean or sum")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(f"{call}: every must be an integer of at least 1, got {every!r}")
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise UsageError(
            f"{call}: expected a transformation of optax first, got {tx!r}; write for example"
            " jaxring.optim.distributed(optax.sgd(0.1), 'dp')"
        )
    reduction = _Reduction(axis_name, op, compression, algorithm, name, call).checked()
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> DistributedState:
        sums = () if every == 1 else accumulation.zero(params)
        step = jnp.zeros((), jnp.int32)
        return DistributedState(step, sums, reduction.no_error(params), tx.init(params))

    def update(updates: Any, state: DistributedState, params: Any = None, **extra: Any) -> Any:
        if every == 1:
            gradients, error = reduction(updates, state.error)
            updates, inner = tx.update(gradients, state.inner, params, **extra)
            return updates, DistributedState(state.step, (), error, inner)
        reduction.check(updates)
        sums = accumulation.added(state.gradients, updates, call)
        scale = 1 / every if op == "mean" else 1

        def last(inner: Any, error: Any) -> Any:
            total = accumulation.scaled(sums, updates, scale, wide=bool(compression))
            gradients, error = reduction(total, error)
            gradients = accumulation.cast_like(gradients, updates)
            return *tx.update(gradients, inner, params, **extra), error

        def between(inner: Any, error: Any) -> Any:
            shapes = jax.eval_shape(last, inner, error)[0]
            return accumulation.zeros_of(shapes), inner, error

        is_last = state.step == every - 1
        updates, inner, error = accumulation.either(
            is_last, last, between, state.inner, state.error
        )
        sums = jax.tree.map(lambda s: jnp.where(is_last, jnp.zeros_like(s), s), sums)
        sums = local_state.kept_as(sums, state.gradients)
        return updates, DistributedState((state.step + 1) % every, sums, error, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def consolidate(state: Any, axis_name: Any) -> Any:
    """The state of an optimizer, made equal on all ranks, for saving it once and for all of them.

    Sums of gradients and errors of compression, which each rank has for itself, become their means
    over the ranks. What the ranks will reduce together remains the same but for rounding.

    Args:
      state: a pytree with the states of `distributed` and `allreduce_gradients` anywhere in it.
      axis_name: the one that these were given; in jax.shard_map, or eager with a Communicator.

    Returns:
      The structure, shapes and dtypes of `state`; under check_vma=True no leaf varies for it.

    Raises:
      UsageError, UnboundAxisError: as `jaxring.allreduce`.

    Derivative: that of the mean.

    Example: rank 0 saves, and later every rank resumes from the one file:

        state = jaxring.optim.consolidate(state, comm)
        if comm.rank == 0:
            checkpointer.save(path, state)
    """
    where = axes.resolve(axis_name, None, "jaxring.optim.consolidate")

    def equal(tree: Any) -> Any:
        own = local_state.own(jax.tree.map(jnp.asarray, tree), where)
        return allreduce(own, axis_name, "mean", name="optim.consolidate")

    def consolidated(node: Any) -> Any:
        if isinstance(node, ReductionState):
            return ReductionState(equal(node.error))
        if isinstance(node, DistributedState):
            inner = consolidate(node.inner, axis_name)
            return DistributedState(node.step, equal(node.gradients), equal(node.error), inner)
        return node

    ours = (ReductionState, DistributedState)
    return jax.tree.map(consolidated, state, is_leaf=lambda node: isinstance(node, ours))


def _optax() -> Any:
    try:
        import optax
    except ImportError as e:
        raise ImportError("jaxring.optim needs optax: pip install optax") from e
    return optax


# -- The reduction that both transformations make --------------------------------------------------


class _Reduction(NamedTuple):
    axis_name: Any
    op: str
    compression: str | None
    algorithm: str
    name: str | None
    call: str

    def checked(self) -> _Reduction:
        if self.axis_name is None or hasattr(self.axis_name, "update"):
            what = "None" if self.axis_name is None else "a transformation"
            raise UsageError(
                f"{self.call}: expected axis_name as the name of an axis, such as 'dp', or a"
                f" jaxring.Communicator, got {what}"
            )
        reductions.check_op(self.op, self.call)
        compressions.check(self.compression, self.op, self.algorithm, self.call)
        return self

    def no_error(self, params: Any) -> Any:
        """What compression has lost before the first gradients."""
        if self.compression is None:
            return ()
        compressions.check_dtypes(params, self.call)
        return compressions.no_error(params)

    def check(self, gradients: Any) -> None:
        check_not_reduced(gradients, axes.resolve(self.axis_name, None, self.call), self.call)
        if self.compression is not None:
            compressions.check_dtypes(gradients, self.call)

    def __call__(self, gradients: Any, error: Any) -> tuple[Any, Any]:
        """(reduced gradients, what compression has lost on this rank)."""
        self.check(gradients)
        name, algorithm = self.name, self.algorithm
        if self.compression is None:
            args = self.axis_name, self.op, algorithm, None, name, self.call
            return of_pytree(gradients, *args, overlaps=True), error
        reduced, lost = compressions.reduce(
            gradients, error, self.compression, self.axis_name, self.op, algorithm, name
        )
        return reduced, local_state.kept_as(lost, error)
