"""`jaxring bench`: its arithmetic, its refusals, and real runs on devices and processes."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from jaxring.cli import bench, bench_table, bench_worker
from jaxring.cli.main import app


def spec(**changes) -> bench_worker.Spec:
    values = {
        "collective": "allreduce",
        "sizes_bytes": (16,),
        "dtype": "float32",
        "op": "sum",
        "algorithm": "auto",
        "mode": "mesh",
        "processes": 4,
        "devices": 1,
        "against": None,
        "warmup": 1,
        "rounds": 1,
        "check": True,
        "results": "rows",
    }
    return bench_worker.Spec(**{**values, **changes})


def run_cli(*arguments: str) -> subprocess.CompletedProcess:
    # conftest.py asks for eight devices through XLA_FLAGS; the benchmark chooses its own number.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "jaxring", "bench", *arguments],
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "200"},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("16", 16), ("4K", 4096), ("64m", 64 << 20), ("1GiB", 1 << 30)]
)
def test_parse_size(text, expected):
    assert bench.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "4T"])
def test_parse_size_refuses(text):
    with pytest.raises(typer.BadParameter, match="expected a size such as"):
        bench.parse_size(text)


def test_sizes():
    assert bench.sizes(8, 100, 2) == (8, 16, 32, 64)
    assert bench.sizes(8, 8, 2) == (8,)
    with pytest.raises(typer.BadParameter, match="-b"):
        bench.sizes(16, 8, 2)
    with pytest.raises(typer.BadParameter, match="-f"):
        bench.sizes(8, 16, 1)


def test_merge_takes_the_slowest_process_and_all_wrong_elements():
    def line(ours_us, lax_us, wrong):
        return {
            "size_bytes": 4000,
            "count": 1000,
            "algorithm": "ring",
            "transport": "shm",
            "calls": 10,
            "times_us": {"jaxring": ours_us, "lax": lax_us},
            "spread_us": {"jaxring": (ours_us, ours_us), "lax": (lax_us, lax_us)},
            "wrong": wrong,
        }

    row = bench_table.merge([line(1.0, 9.0, 0), line(2.0, 8.0, 3)], spec(against="lax"))
    assert row["time_us"] == 2.0
    assert row["against_us"] == 9.0
    assert row["ratio"] == 4.5
    assert row["wrong"] == 3
    assert row["algbw_GBps"] == 2.0  # 4000 B in 2 us
    assert row["busbw_GBps"] == 3.0  # times 2 (4 - 1) / 4


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_count_wrong_finds_a_single_element(op, dtype):
    count, what = 50, spec(op=op, dtype=dtype)
    fold = {"mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}.get(op, np.sum)
    rows = [
        bench_worker.values_of_rank(rank, count, jnp.dtype(dtype), op).astype(np.float64)
        for rank in range(what.ranks)
    ]
    result_dtype = jnp.float32 if op == "mean" and dtype == "int8" else dtype
    right = jnp.asarray(fold(rows, axis=0)).astype(result_dtype)
    assert bench_worker.count_wrong(what, count, right) == 0
    assert bench_worker.count_wrong(what, count, right.at[7].add(1)) == 1


def test_the_number_of_calls_depends_on_the_size_alone():
    calls = [bench_worker.calls_per_round(1 << k) for k in range(30)]
    assert calls == sorted(calls, reverse=True)
    assert calls[0] == 50
    assert calls[-1] >= 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("allredux",), "expected one of allreduce, got 'allredux'"),
        (("allreduce", "-b", "1X"), "expected a size such as"),
        (("allreduce", "-d", "float31"), "expected a dtype such as"),
        (("allreduce", "-o", "prod", "--against", "lax"), "expected one of sum, mean, min, max"),
        (("allreduce", "--against", "mpi"), "expected one of lax"),
        (("allreduce", "--mode", "communicator", "--devices", "2"), "one device per process"),
    ],
)
def test_refusals(arguments, expected):
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert expected in done.output


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        (("-n", "1", "--devices", "3"), 3),
        (("-n", "2", "--mode", "communicator"), 2),
        (("-n", "2", "--mode", "mesh"), 2),
    ],
)
def test_run_against_lax(tmp_path, arguments, ranks):
    file = tmp_path / "rows.json"
    done = run_cli(
        *("allreduce", "-b", "4K", "-e", "64K", "-f", "16", "--algorithm", "ring"),
        *("--rounds", "2", "--against", "lax", "--json", str(file), *arguments),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text())
    assert [row["size_bytes"] for row in document["rows"]] == [4 << 10, 64 << 10]
    for row in document["rows"]:
        assert row["algorithm"] == "ring"
        assert row["wrong"] == 0
        assert row["time_us"] > 0
        assert row["ratio"] == pytest.approx(row["against_us"] / row["time_us"])
        assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * 2 * (ranks - 1) / ranks)
    for title in ("size(B)", "algbw", "busbw", "#wrong", "lax(us)", "ratio"):
        assert title in done.stdout


def test_an_unknown_algorithm_ends_with_the_librarys_own_words():
    done = run_cli("allreduce", "-n", "1", "--devices", "2", "-e", "16", "--algorithm", "rink")
    assert done.returncode != 0
    assert "rink" in done.stdout
    assert "direct" in done.stdout  # the error lists what there is
