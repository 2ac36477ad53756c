"""Importing and using jaxring on CPUs neither needs nor looks for CUDA."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from jaxring._src import _compat, cuda, cuda_state

CUDA_LIBRARY = re.compile(r"lib(cuda|nccl|nvidia|nvrtc|nvJit|cupti)|_cuda")

SCRIPT = """
import sys

class Finder:  # asked first for every module
    wanted = []
    def find_spec(name, path=None, target=None):
        if name.startswith("jaxring._cuda"):
            Finder.wanted.append(name)

sys.meta_path.insert(0, Finder)
import jax, jax.numpy as jnp
import jaxring
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
f = jax.shard_map(lambda x: jaxring.allreduce(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
jax.jit(f)(jnp.ones((2, 3))).block_until_ready()
with jaxring.replacing_lax():
    pass
jaxring.stats()
jaxring.rejoin()
jaxring.init().close()
print("modules:", Finder.wanted, sorted(name for name in sys.modules if name == "jaxring._cuda"))
with open("/proc/self/maps") as maps:
    files = {line.split()[-1].rpartition("/")[2] for line in maps}
print("files:", sorted(f for f in files if f.startswith(("libcuda", "libnccl", "_cuda"))))
"""


def test_nothing_of_cuda_is_loaded(tmp_path):
    """Nor looked for: neither by an import nor by dlopen, of which the linker tells (LD_DEBUG)."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "LD_DEBUG": "libs",
        "LD_DEBUG_OUTPUT": str(tmp_path / "linker"),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["modules: [] []", "files: []"]
    told = "".join(log.read_text(errors="replace") for log in tmp_path.glob("linker.*"))
    searched = re.findall(r"find library=(\S+)", told)
    assert any("libstdc++" in name for name in searched), "the linker told nothing"
    assert [name for name in searched if CUDA_LIBRARY.search(name)] == []


def test_the_engine_needs_no_library_of_cuda():
    """Of the module that a CPU-only installation has."""
    native = Path(str(sys.modules["jaxring._native"].__file__)).read_bytes()
    for name in (b"libcuda", b"libnccl", b"libcudart"):
        assert name not in native


def test_the_cuda_module_loads_without_a_driver():
    """Where it is built: importing it touches no driver, and asking says what is missing."""
    native = pytest.importorskip("jaxring._cuda", reason="built without CUDA")
    facts = native.facts()
    assert facts["devices"] == 0 or facts["driver"] > 0
    assert facts["nccl"] or "not loaded" in facts["nccl_reason"]
    assert set(native.ffi_registrations()["jaxring_collective"]) == {
        "instantiate",
        "prepare",
        "initialize",
        "execute",
    }


def states(monkeypatch, **facts):
    """`jaxring info`'s rows about CUDA, with a module that says these facts (None: no module)."""
    monkeypatch.setattr(cuda, "module", lambda: types.SimpleNamespace(facts=lambda: facts))
    return {row["part"]: row["state"] for row in cuda_state.parts()}


NOTHING = {
    "driver": 0,
    "devices": 0,
    "error": "",
    "peers": "",
    "multicast": "",
    "nccl": 0,
    "nccl_reason": "NCCL is not loaded",
}


def test_info_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(cuda, "module", lambda: None)
    rows = {row["part"]: row["state"] for row in cuda_state.parts()}
    assert rows["module"].startswith("off: ")
    assert rows["driver"] == "off: not asked for, without the module"
    assert rows["JAX's devices"].startswith("off: JAX has no CUDA devices")
    assert cuda_state.backend().startswith("off: ")


def test_info_tells_driver_devices_and_nccl_apart(monkeypatch):
    rows = states(monkeypatch, **NOTHING)
    assert rows["module"].startswith("on: ")
    assert rows["driver"].startswith("off: no NVIDIA driver")
    assert rows["NCCL"] == "off: NCCL is not loaded"
    assert "no NVIDIA driver" in cuda_state.backend()
    found = {"driver": 13000, "devices": 0, "error": "no device"}
    rows = states(monkeypatch, **NOTHING | found)
    assert rows["driver"] == "off: the driver (CUDA 13.0) shows no GPU: no device"
    rows = states(monkeypatch, **NOTHING | found | {"devices": 2, "nccl": 22903})
    assert rows["driver"] == "on: CUDA 13.0, 2 GPUs"
    assert rows["peer access"].startswith("on: ")
    assert rows["multimem"].startswith("on: ")
    assert rows["NCCL"].startswith("on: 2.29.3")
    assert cuda_state.backend().startswith("off: JAX has no CUDA devices")
    monkeypatch.setattr(cuda, "has_gpus", lambda: True)
    assert cuda_state.backend() == "on"


def test_info_where_jax_may_use_nothing_but_gpus_that_are_not_there():
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-m", "jaxring", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    if cuda.has_gpus():
        pytest.skip("there are GPUs")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["devices"]["none"]
    states = {row["part"]: row["state"] for row in facts["cuda"]}
    assert states["JAX's devices"].startswith("off: JAX has no CUDA devices")


def test_info_says_why_a_group_goes_by_nccl(monkeypatch):
    found = {"driver": 13000, "devices": 2, "multicast": "GPU 0 has no multicast"}
    peers = {"peers": "GPU 0 cannot read the memory of GPU 1"}
    monkeypatch.setattr(_compat, "jaxlib_version", lambda: (0, 12, 0))
    rows = states(monkeypatch, **NOTHING | found | peers)
    assert rows["peer access"] == f"off: {peers['peers']}, so that groups with both go by NCCL"
    assert rows["multimem"] == "off: GPU 0 has no multicast"
    assert states(monkeypatch, **NOTHING)["peer access"] == "off: there is no GPU"


@pytest.mark.parametrize("version", [(0, 11, 1), (0, 11, 2), (0, 12, 0, 1)])
def test_info_knows_who_has_the_extension(monkeypatch, version):
    monkeypatch.setattr(_compat, "jaxlib_version", lambda: version)
    rows = states(monkeypatch, **NOTHING)
    expected = "on: " if version >= (0, 11, 2) else "off: jaxlib 0.11.1 has no"
    assert rows["XLA's communicators"].startswith(expected)
