"""`jaxring simulate`: published scaling, the formulas' shapes, its refusals."""

import json
import sys

import pytest
from typer.testing import CliRunner

from jaxring.cli.main import app

# Horovod's cluster: 128 servers of four Pascal GPUs on 25 Gb/s RoCE, 64 images a GPU and step
# (Sergeev, Del Balso, arXiv:1802.05799, figure 6). Images per second are of one GPU alone.
PASCAL = ("--ranks", "512", "--per-host", "4", "--between", "5us,3.125GB/s", "--algorithm", "ring")
OVERLAP = "0.42"  # the one free number, the same for both models


def run(*arguments):
    return CliRunner().invoke(app, ["simulate", *arguments])


def rows(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["rows"]


@pytest.mark.parametrize(
    ("message", "images_per_s", "published"),
    [("178M", 115, 0.90), ("554M", 140, 0.68)],
    ids=["ResNet-101", "VGG-16"],
)
def test_horovods_published_efficiency(message, images_per_s, published):
    compute = f"{64 / images_per_s * 1e3:.0f}ms"
    (row,) = rows(*PASCAL, "--message", message, "--compute", compute, "--overlap", OVERLAP)
    assert row["efficiency"] == pytest.approx(published, abs=0.03)


def test_a_reducer_does_not_scale_and_a_ring_does():
    found = rows("--ranks", "40,160", "--algorithm", "ring", "--algorithm", "reducer")
    times = {(row["algorithm"], row["ranks"]): row["time_s"] for row in found}
    assert times["ring", 160] < 1.5 * times["ring", 40]
    assert times["reducer", 160] == pytest.approx(159 / 39 * times["reducer", 40], rel=0.05)
    assert times["reducer", 40] > 15 * times["ring", 40]


def test_latency_decides_for_small_messages():
    found = rows("--ranks", "64", "--message", "1K")
    times = {row["algorithm"]: row["time_s"] for row in found}
    assert times["halving_doubling"] < times["ring"] / 5
    assert times["direct"] < times["ring"] / 5


def test_all_algorithms_of_a_collective_are_shown():
    result = run("--ranks", "2..8", "--collective", "all_gather", "--message", "1M")
    assert result.exit_code == 0
    for text in ("direct", "ring", "all_gather of 1 MB a rank", "hops"):
        assert text in result.stdout


def test_plot(tmp_path):
    path = tmp_path / "scaling.png"
    result = run("--ranks", "2..16", "--compute", "20ms", "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--ranks", "2", "--plot", str(tmp_path / "x.png"))
    assert "pip install 'jaxring[plot]'" in str(result.exception)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--ranks", "two", "expected world sizes"),
        ("--ranks", "0,2", "expected world sizes"),
        ("--ranks", "4..2", "expected world sizes"),
        ("--message", "many", "expected bytes such as"),
        ("--message", "0", "expected bytes such as"),
        ("--chunk", "3", "expected bytes such as"),
        ("--between", "5us,fast", "expected bytes per second"),
        ("--between", "soon,1GB/s", "expected a time"),
        ("--compute", "3 days", "expected a time"),
        ("--algorithm", "quick", "'quick' does not serve allreduce"),
        ("--collective", "gossip", "'gossip' is no collective"),
    ],
)
def test_refusals(option, value, message):
    result = run(option, value)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)
