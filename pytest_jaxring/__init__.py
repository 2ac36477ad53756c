"""pytest plugin of jaxring: the fixture `jaxring_spawn`.

Outside the package jaxring, because pytest imports plugins before any conftest.py, and importing
jaxring imports
JAX: a conftest that sets JAX_PLATFORMS would then come too late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def jaxring_spawn() -> Callable[..., list[Any]]:
    """`jaxring.testing.spawn`: runs fn(comm, *args) on n processes and returns their results.

    def mean_of_ranks(comm):
        return jaxring.allreduce(jnp.float32(comm.rank), comm, "mean")

    def test_mean(jaxring_spawn):
        assert jaxring_spawn(mean_of_ranks, 2) == [0.5, 0.5]
    """
    from jaxring.testing import spawn

    return spawn
