"""`jaxring bench`: its arithmetic, its refusals, and real runs on devices and processes."""

import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import jaxring
from jaxring._src import native_facts
from jaxring.cli import (
    bench,
    bench_contenders,
    bench_mode,
    bench_options,
    bench_table,
    bench_worker,
)
from jaxring.cli.bench_collectives import COLLECTIVES
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
        [sys.executable, "-m", "jaxring", "bench", "--patience-s", "0", *arguments],
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "200"},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("16", 16), ("4K", 4096), ("64m", 64 << 20), ("1GiB", 1 << 30)]
)
def test_parse_size(text, expected):
    assert bench_options.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "4T"])
def test_parse_size_refuses(text):
    with pytest.raises(typer.BadParameter, match="expected a size such as"):
        bench_options.parse_size(text)


def test_sizes():
    assert bench_options.sizes(8, 100, 2) == (8, 16, 32, 64)
    assert bench_options.sizes(8, 8, 2) == (8,)
    with pytest.raises(typer.BadParameter, match="-b"):
        bench_options.sizes(16, 8, 2)
    with pytest.raises(typer.BadParameter, match="-f"):
        bench_options.sizes(8, 16, 1)


def test_merge_takes_the_slowest_process_and_all_wrong_elements():
    def line(ours_us, lax_us, wrong):
        return {
            "size_bytes": 4000,
            "count": 1000,
            "algorithm": "ring",
            "transport": "shm",
            "calls": 10,
            "slow_rounds": 0,
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
    right = np.asarray(jnp.asarray(fold(rows, axis=0)).astype(result_dtype))
    wrong = right.copy()
    wrong[7] += 1
    assert bench_worker.count_wrong(what, count, {0: right, 3: right}) == 0
    assert bench_worker.count_wrong(what, count, {0: right, 3: wrong}) == 1


@pytest.mark.parametrize(("takes_s", "expected"), [(0.003, 10), (5.0, 2)])
def test_a_turn_has_as_many_calls_as_its_time_allows(monkeypatch, takes_s, expected):
    clock = itertools.count(0.0, takes_s)  # read before and after each call
    monkeypatch.setattr(bench_contenders.time, "perf_counter", lambda: next(clock))
    contender = bench_contenders.Contender("ours", lambda x: x, jnp.zeros(1))
    contender.calls = contender.calls_in_a_turn()
    assert contender.calls == expected
    contender.take_turn()
    contender.take_turn()
    assert len(contender.times_s) == 2 * expected
    contender.forget_turn()
    assert contender.times_s == pytest.approx([takes_s] * expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("allredux",), "expected one of allreduce, reduce_scatter"),
        (("allreduce", "-b", "1X"), "expected a size such as"),
        (("allreduce", "-d", "float31"), "expected a dtype such as"),
        (("allreduce", "-o", "prod", "--against", "lax"), "expected one of sum, mean, min, max"),
        (("allreduce", "--against", "smoke signals"), "expected one of lax, mpi, mpi4jax"),
        (("allreduce", "--against", "mpi"), "needs "),
        (("allreduce", "--slope", "1"), "2 or more in one jit"),
        (("allreduce", "--outputs", "fleeting"), "expected one of fresh, donated, in-place"),
        (("broadcast", "--outputs", "in-place"), "expected one of allreduce"),
        (("all_gather", "--outputs", "donated"), "expected one of allreduce, all_to_all"),
        (("all_gather", "--leaves", "3"), "expected one of allreduce"),
        (("reduce", "--against", "lax"), "expected one of allreduce, reduce_scatter, all_gather"),
        (("allreduce", "--mode", "communicator", "--devices", "2"), "one device per process"),
        (("allreduce", "--algorithm", "rink"), "unknown algorithm 'rink'; use"),
        (("reduce_scatter", "--algorithm", "tree"), "does not serve reduce_scatter; use"),
        (("ppermute", "--algorithm", "ring"), "ppermute takes none, got 'ring'"),
        (("allreduce", "-d", "complex64", "-o", "max"), "no meaning for complex64; use"),
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


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "allreduce"])
def test_every_collective_is_right(collective):
    what = spec(
        collective=collective,
        processes=1,
        devices=jax.device_count(),
        against="lax" if COLLECTIVES[collective].peer else None,
        algorithm="auto",
        warmup=1,
        rounds=1,
    )
    line = bench_worker.Bench(what).measure(4096)
    assert line["wrong"] == 0
    assert line["algorithm"] == "direct"
    row = bench_table.merge([line], what)
    assert row["busbw_GBps"] == pytest.approx(
        row["algbw_GBps"] * COLLECTIVES[collective].bus_factor(what.ranks)
    )
    assert row["op"] == ("sum" if collective.startswith("reduce") else "none")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_slope_of_every_collective(collective):
    what = spec(collective=collective, processes=1, devices=jax.device_count(), chain=3)
    line = bench_worker.Bench(what).measure(256)
    assert line["wrong"] == 0
    assert line["times_us"]["jaxring"] >= 0


@pytest.mark.parametrize("count", [3, 1000])  # fewer elements than leaves too
def test_every_leaf_is_checked(count, monkeypatch):
    what = spec(processes=1, devices=jax.device_count(), leaves=5)
    bench_of = bench_worker.Bench(what)
    assert bench_of.check(count) == 0
    kind = COLLECTIVES["allreduce"]
    first_off = dataclasses.replace(
        kind, ours=lambda xs, *where: [kind.ours(x, *where).at[:1].add(1) for x in xs]
    )
    monkeypatch.setitem(COLLECTIVES, "allreduce", first_off)
    leaves = sum(piece > 0 for piece in bench_of.pieces(count))
    assert bench_of.check(count) == leaves * what.ranks


@pytest.mark.parametrize("outputs", ["donated", "in-place"])
def test_results_take_their_operands_memory(outputs):
    what = spec(processes=1, devices=jax.device_count(), outputs=outputs, against="lax", leaves=3)
    bench_of = bench_worker.Bench(what)
    with jaxring.config.override(in_place=outputs == "in-place"):
        contender = bench_of.contenders(1000)[0]
        before = contender.operand[0]
        contender.warm_up(2)  # traces
    assert before.is_deleted()
    assert bench_of.pieces(1000) == [27, 223, 750]
    np.testing.assert_array_equal(
        np.asarray(contender.operand[0])[:2], np.array([1, 2]) * 36 * 8
    )  # ranks bring 1 to 8 times that; the second call adds eight times the sum


def mode_rounds(trips_ns, patience_s, monkeypatch):
    """What two rounds do on a machine whose cache line takes these times: (events, slow rounds)."""
    trips_ns = iter(trips_ns)
    monkeypatch.setattr(native_facts, "cache_line_round_trip_ns", lambda: next(trips_ns))
    mode = bench_mode.Mode(patience_s, agreed=lambda word: word, is_first=True, slow_ns=200)
    events = []
    slow = mode.rounds(2, lambda: events.append("run"), lambda: events.append("forget"))
    assert next(trips_ns, None) is None
    return events, slow


def test_rounds_wait_for_the_fast_mode(monkeypatch):
    assert mode_rounds([400, 110, 100, 105, 105], 1.0, monkeypatch) == (["run", "run"], 0)


def test_rounds_that_fall_into_the_slow_mode_are_run_again(monkeypatch):
    trips_ns = [100, 400, 400, 100, 100, 100, 100]
    assert mode_rounds(trips_ns, 1.0, monkeypatch) == (["run", "forget", "run", "run"], 0)


def test_without_patience_rounds_of_the_slow_mode_count(monkeypatch):
    assert mode_rounds([400, 100, 400], 0.0, monkeypatch) == (["run", "run"], 2)
    assert mode_rounds([400, 400, 400], 0.04, monkeypatch) == (["run", "run"], 2)


@pytest.mark.parametrize(
    ("trips_ns", "expected"),
    [([110, 400, 100], 200), ([400, 400, 150, 100, 100], 200), ([300, 280, 150, 290], 435)],
)
def test_what_counts_as_slow(monkeypatch, trips_ns, expected):
    trips_ns = iter(trips_ns)
    monkeypatch.setattr(native_facts, "cache_line_round_trip_ns", lambda: next(trips_ns, 290.0))
    monkeypatch.setattr(bench_mode, "OBSERVED_S", 0.3)
    assert bench_mode.slow_round_trip_ns() == expected
    assert next(trips_ns, None) is None


def test_rows_of_the_slow_mode_are_named(monkeypatch):
    row = {"size_bytes": 64, "slow_rounds": 3}
    monkeypatch.setattr(native_facts, "cache_line_round_trip_ns", lambda: 400.0)
    monkeypatch.setattr(bench_mode, "OBSERVED_S", 0.0)
    monkeypatch.setattr(bench, "execute", lambda *arguments: [row, {**row, "slow_rounds": 0}])
    text = io.StringIO()
    _, state = bench.measured(spec(), Console(file=text, width=200))
    assert "rounds of 64 bytes met" in text.getvalue()
    assert state == {"cache_line_round_trip_ns": (400.0, 400.0), "slow_mode": True}
