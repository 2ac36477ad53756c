"""Eight CPU devices for every test of this folder, and the few ways in which tests run a function
on them."""

import importlib.metadata
import os

# Before JAX makes its backend. Tests that start processes set their own.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Most of a test's time would be LLVM's, for programs that run once. What XLA does before it,
    # which is what our calls meet (buffers, aliases, schedules), stays as users have it; examples,
    # documents and benchmarks run with users' settings.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
        " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # unknown flags end the process
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# A hang becomes an error that says who is missing, before pytest's own limit.
os.environ.setdefault("JAXRING_TIMEOUT_S", "60")

import collections
import contextlib
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxring
from jaxring._src import calls
from jaxring._src.store import StoreServer, TcpStore

# Also that of processes which `spawn` starts.
sys.path.insert(0, str(Path(__file__).with_name("helpers")))


def make_mesh(axes: dict[str, int], devices: list[Any] | None = None) -> jax.sharding.Mesh:
    """A mesh with Auto axes over the first devices, or over `devices` in their order."""
    size = int(np.prod(list(axes.values())))
    chosen = np.array((devices or jax.devices())[:size]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(chosen, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


class Spmd:
    """Runs functions on a mesh; each device gets one row of every operand and gives one row
    back."""

    def __init__(self, axes: dict[str, int], check_vma: bool = True, devices: Any = None):
        self.mesh = make_mesh(axes, devices)
        self.names = tuple(axes)
        self.check_vma = check_vma

    def map(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f` of rows, as a function of arrays with a leading axis of one row for each device."""
        names = self.names

        def rows(*xs: Any) -> Any:
            xs = jax.tree.map(lambda x: x[0], xs)
            return jax.tree.map(lambda y: self.vary(jax.numpy.asarray(y))[None], f(*xs))

        return jax.shard_map(
            rows, mesh=self.mesh, in_specs=P(names), out_specs=P(names), check_vma=self.check_vma
        )

    def vary(self, y: jax.Array) -> jax.Array:
        """`y` typed as varying over all axes, so that any result can go out by rows."""
        missing = tuple(set(self.names) - jax.typeof(y).manual_axis_type.varying)
        return jax.lax.pcast(y, missing, to="varying") if missing and self.check_vma else y

    def __call__(self, f: Callable[..., Any], *xs: Any) -> Any:
        return jax.tree.map(np.asarray, jax.jit(self.map(f))(*xs))


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What warns once for each line and text warns once for each test."""
    monkeypatch.setattr(calls, "_warned", set())


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def check_vma(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def spmd(check_vma: bool) -> Spmd:
    """Four devices on axis "x", under both modes of check_vma."""
    return Spmd({"x": 4}, check_vma)


@pytest.fixture
def grid(check_vma: bool) -> Spmd:
    """A (2, 3) mesh over "x" and "y", under both modes of check_vma."""
    return Spmd({"x": 2, "y": 3}, check_vma)


@pytest.fixture
def make_spmd() -> type[Spmd]:
    return Spmd


@pytest.fixture
def carried() -> Callable[[], dict[str, int]]:
    """A function that tells how many operations each algorithm has carried since its last call."""

    def operations() -> dict[str, int]:
        counts: collections.Counter[str] = collections.Counter()
        for row in jaxring.stats(reset=True):
            counts[row["algorithm"]] += row["operations"]
        return dict(counts)

    # An earlier test may have dropped results for which it did not wait. JAX can't be asked whether
    # anything runs, so none is taken to do so once a few milliseconds have passed without an end.
    quiet, deadline = 0, time.monotonic() + 10
    while quiet < 3 and time.monotonic() < deadline:
        quiet = 0 if operations() else quiet + 1
        time.sleep(0.001)
    return operations


@pytest.fixture
def server():
    """A store's server, whose secret is "secret"."""
    server = StoreServer("127.0.0.1", 0, "secret")
    yield server
    server.close()


@pytest.fixture
def store(server):
    return TcpStore(server.address, "secret")


@pytest.fixture
def free_port():
    """Gives ports of this host: below those that the kernel gives to connections, one of which
    might come before the process that is to listen."""

    def find() -> int:
        while True:
            port = random.randrange(15_000, 32_000)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                return port

    return find
