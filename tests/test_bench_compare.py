"""`jaxring bench --compare` and `--plot`, without measuring."""

import dataclasses
import json
from pathlib import Path

import pytest

import jaxring
from jaxring.cli import bench_compare, bench_plot
from jaxring.cli.bench_worker import Spec

SPEC = Spec(
    collective="allreduce",
    sizes_bytes=(1024, 4096),
    dtype="float32",
    op="sum",
    algorithm="auto",
    mode="mesh",
    processes=2,
    devices=1,
    against="lax",
    warmup=1,
    rounds=1,
    check=True,
    results="",
)


def rows(*ratios, slow=0):
    return [
        {
            "size_bytes": 1024 << (2 * i),
            "ratio": ratio,
            "slow_rounds": slow,
            "time_us": 10.0 * (i + 1),
            "against_us": 10.0 * (i + 1) * ratio,
        }
        for i, ratio in enumerate(ratios)
    ]


def test_a_ratio_that_fell_is_a_loss():
    result = bench_compare.compare(rows(10, 8), rows(10, 4), tolerance=1.3)
    assert result["lost"]
    assert [one["lost"] for one in result["sizes"]] == [False, True]
    assert "4096    8.00 ->    4.00  x 0.50  LOST" in bench_compare.text(result, _path("x.json"))


def test_noise_within_the_tolerance_is_none():
    result = bench_compare.compare(rows(10, 8), rows(9, 9), tolerance=1.3)
    assert not result["lost"]
    assert result["change"] == pytest.approx((0.9 * 9 / 8) ** 0.5)


def test_a_little_less_at_every_size_is_a_loss():
    result = bench_compare.compare(rows(10, 8), rows(8.2, 6.5), tolerance=1.3)
    assert not any(one["lost"] for one in result["sizes"])
    assert result["lost"]


def test_rounds_in_the_slow_mode_do_not_count():
    result = bench_compare.compare(rows(10, 8), rows(1, 1, slow=2), tolerance=1.3)
    assert not result["lost"]
    assert result["change"] is None
    assert "nothing can be said" in bench_compare.text(result, _path("x.json"))


def _path(name: str) -> Path:

    return Path(name)


def test_files_that_measure_something_else_are_refused(tmp_path):
    file = tmp_path / "old.json"
    spec = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(SPEC).items()}
    file.write_text(json.dumps({"spec": spec, "rows": rows(10, 8)}))
    assert bench_compare.read(file, SPEC) == rows(10, 8)
    for change, text in (
        ({"dtype": "float64"}, "has dtype 'float32', this run 'float64'"),
        ({"processes": 4}, "has processes 2, this run 4"),
        ({"against": None}, "give both runs --against lax"),
    ):
        with pytest.raises(jaxring.UsageError, match=text):
            bench_compare.read(file, dataclasses.replace(SPEC, **change))
    for content in ("{}", "no json", '{"spec": {}, "rows": [{}]}'):
        file.write_text(content)
        with pytest.raises(jaxring.UsageError, match="is no file by jaxring bench"):
            bench_compare.read(file, SPEC)
    with pytest.raises(jaxring.UsageError, match="no size is in both runs"):
        bench_compare.compare([{"size_bytes": 7, "ratio": 1.0}], rows(10, 8), 1.3)


def test_plot_has_both_contenders(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "speed.svg"
    bench_plot.draw(rows(10, 8), SPEC, path)
    text = path.read_text()
    for label in ("busbw [GB/s]", "jaxring", "lax", "time [µs]"):
        assert f"<!-- {label} -->" in text, label
    with pytest.raises(jaxring.UsageError, match="cannot be written"):
        bench_plot.draw(rows(10, 8), SPEC, tmp_path / "speed.nothing")
