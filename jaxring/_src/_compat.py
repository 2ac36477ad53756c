"""Every access to JAX that is not public or that differs between the supported versions."""

from __future__ import annotations

from typing import Any


def distributed_client() -> Any:
    """The client of jax.distributed's coordination service, or None when it is not initialised.

    Its key-value store has no public name (jax 0.10.2 … 0.12).
    """
    from jax._src import distributed

    return distributed.global_state.client


def distributed_coordinator() -> str | None:
    """Where jax.distributed's coordination service is served, "host:port", or None.

    It has no public name (jax 0.10.2 … 0.12).
    """
    from jax._src import distributed

    return distributed.global_state.coordinator_address


def lax_primitive(name: str) -> Any:
    """The primitive of jax.lax's collectives with this name, or None when this JAX has none.

    jax.extend.core.primitives lacks half of them, psum_invariant among them (jax 0.10.2 … 0.12).
    """
    from jax._src.lax import parallel

    return getattr(parallel, f"{name}_p", None)


def lowering_rule(primitive: Any, platform: str) -> Any:
    """The lowering rule that `primitive` has on `platform`, or None.

    JAX has public functions to register rules, but none to look one up (jax 0.10.2 … 0.12).
    """
    from jax._src.interpreters import mlir

    specific = mlir._platform_specific_lowerings[platform]
    entry = specific.get(primitive) or mlir._lowerings.get(primitive)
    return None if entry is None else entry.rule


def reduced_over(kind: Any, axes: frozenset[Any]) -> Any:
    """A ManualAxisType that is not unreduced over `axes` any more.

    jax 0.12 also has how an unreduced value is to be reduced, for those that are.
    """
    left = kind.unreduced - axes
    if left == kind.unreduced:
        return kind
    no_kind = {} if left or not hasattr(kind, "unreduced_kind") else {"unreduced_kind": None}
    return kind.update(unreduced=left, **no_kind)


def jaxlib_version() -> tuple[int, ...]:
    """(major, minor, patch, …) of the jaxlib that is running; it may differ from jax's own."""
    from jaxlib import version

    return tuple(version.__version_info__)
