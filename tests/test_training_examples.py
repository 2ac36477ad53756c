"""The examples of training frameworks and of meshes train as they would on one device."""

import importlib.util
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from by_place import ROOT, load

import jaxring
from jaxring.testing import spawn

FRAMEWORKS = {"with_optax": "optax", "with_flax": "flax", "with_equinox": "equinox"}


def train_all(comm, names):
    """Losses of each example, with a communicator that has all ranks, and of the first one with
    one that has this rank only, and so all the data."""
    losses = {}
    for name in names:
        jaxring.stats(reset=True)
        losses[name] = load(name).main(comm), sum(r["operations"] for r in jaxring.stats())
    return losses, load(names[0]).main(comm.split(comm.rank)) if names else []


@pytest.fixture(scope="module")
def of_frameworks():
    found = [n for n, package in FRAMEWORKS.items() if importlib.util.find_spec(package)]
    return spawn(train_all, 2, found) if found else []


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name, of_frameworks):
    if importlib.util.find_spec(FRAMEWORKS[name]) is None:
        pytest.skip(f"{FRAMEWORKS[name]} is not installed: pip install 'jaxring[examples]'")
    (first, alone), (second, _) = of_frameworks
    mean = (np.array(first[name][0]) + second[name][0]) / 2
    assert mean[-1] < mean[0] / 4
    # At least the gradients of every second step have travelled.
    assert first[name][1] >= len(mean) / 2
    if name == "with_optax":
        # Its losses' mean is the loss of one process with all data, but for 16 bits of gradients.
        np.testing.assert_allclose(mean, alone, rtol=5e-3)


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        ("mesh_2d", {"all_gather", "reduce_scatter", "allreduce"}),
        ("fsdp", {"all_gather", "reduce_scatter", "allreduce"}),
    ],
)
def test_meshes(name, collectives, carried, monkeypatch):
    pytest.importorskip("optax")
    monkeypatch.syspath_prepend(ROOT / "examples")  # as `python examples/…` does
    ours, reference = load(name).main()
    np.testing.assert_allclose(ours, reference, rtol=1e-4)
    assert ours[-1] < ours[0] / 2
    assert {row["collective"] for row in jaxring.stats()} == collectives


def address_of_this_host() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # sends nothing; the kernel only chooses a way
        except OSError:
            return "127.0.0.1"
        return s.getsockname()[0]


def test_two_launchers(free_port):
    """As on two hosts, but that both are this one."""
    pytest.importorskip("optax")
    if (address := address_of_this_host()).startswith("127."):
        pytest.skip("this host has a loopback address only, which several hosts cannot use")
    place = ["--hosts", "2", "--per-host", "1", "--coordinator", f"{address}:{free_port()}"]
    script = str(ROOT / "examples" / "with_optax.py")
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxring", "run", *place, "--host-rank", host, script],
            env={**os.environ, "JAXRING_SECRET": "0123456789abcdef", "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in "01"
    ]
    try:
        texts = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert [launcher.returncode for launcher in launchers] == [0, 0], texts
    for rank, text in enumerate(texts):
        assert f"rank {rank} of 2: loss " in text


@pytest.mark.slow
def test_compression_learns_as_well(monkeypatch):
    """The table of docs/training.md: bytes, and accuracy within 0.5 % of uncompressed training, or
    an image more, of which there are 360: on another CPU roundings differ."""
    pytest.importorskip("sklearn")
    monkeypatch.delenv("XLA_FLAGS")  # this process's own
    table = load("compression", "benchmarks")
    reports = {name: table.train(name, epochs=20, ranks=4) for name in table.COMPRESSIONS}
    whole = reports["none"]
    for name, most in (("bf16", 0.501), ("fp16", 0.501), ("int8", 0.27)):
        difference = reports[name]["test_accuracy"] - whole["test_accuracy"]
        assert abs(difference) <= 0.005 + 1 / 360, name
        assert table.bytes_per_step(reports[name]) <= most * table.bytes_per_step(whole), name
