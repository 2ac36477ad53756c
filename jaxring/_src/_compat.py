"""Every access to JAX that is not public or that differs between the supported versions."""

from __future__ import annotations

from typing import Any


def distributed_client() -> Any:
    """The client of jax.distributed's coordination service, or None when it is not initialised.

    Its key-value store has no public name (jax 0.10.2 … 0.12).
    """
    from jax._src import distributed

    return distributed.global_state.client
