"""`jaxring tune` and the setting that takes its table."""

import itertools
import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxring
from jaxring._src.settings import MAX_BYTES, parse_selection
from jaxring.cli import tune
from jaxring.cli.main import app


def row(auto_us: float, **algorithms_us: float) -> dict:
    return {"time_us": auto_us, "algorithms_us": algorithms_us}


def test_auto_stays_unless_another_is_clearly_faster():
    assert tune.best(row(10, ring=9.5, direct=10)) == "auto"
    assert tune.best(row(10, ring=5, tree=4)) == "tree"


def test_selection_covers_every_size_once():
    text = tune.selection([(1024, "auto"), (4096, "auto"), (16384, "ring"), (65536, "tree")])
    assert text == "auto:0-8192;ring:8193-32768;tree:32769-max"
    entries = parse_selection(text)
    assert entries[0][1] == 0
    assert entries[-1][2] == MAX_BYTES
    assert all(a[2] + 1 == b[1] for a, b in itertools.pairwise(entries))


def test_candidates_are_those_that_serve():
    assert "auto" not in tune.candidates("allreduce")
    assert tune.candidates("reduce_scatter") == ("direct", "ring", "hierarchical")
    assert tune.candidates("all_to_all") == ("direct",)


def test_the_setting_takes_the_file(tmp_path):
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"algorithm": "direct:0-64k;ring:65537-max"}))
    with jaxring.config.override(algorithm=file):
        assert jaxring.config.algorithm == "direct:0-64k;ring:65537-max"
        mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])
        step = jax.jit(
            jax.shard_map(
                lambda x: jaxring.allreduce(x, "i"),
                mesh=mesh,
                in_specs=jax.P("i"),
                out_specs=jax.P(),
                check_vma=False,
            )
        )
        cut = jax.NamedSharding(mesh, jax.P("i"))
        small, large = (
            step.lower(jax.device_put(np.ones(n, np.float32), cut)).as_text() for n in (64, 1 << 16)
        )
        assert 'algorithm = "direct"' in small
        assert 'algorithm = "ring"' in large


@pytest.mark.parametrize("content", ["", "{}", '{"algorithm": "rink"}'])
def test_the_setting_refuses_other_files(tmp_path, content):
    file = tmp_path / "table.json"
    file.write_text(content)
    for value in (file, tmp_path / "missing.json", "direct:0-64k;rink:1m-max", "rink"):
        with pytest.raises(jaxring.UsageError, match=r"^algorithm: expected one of auto, direct,"):
            jaxring.config.update("algorithm", value)


def test_tune_writes_a_table(tmp_path):
    file = tmp_path / "table.json"
    arguments = [
        "tune",
        "-n",
        "1",
        "--devices",
        "2",
        "-b",
        "1K",
        "-e",
        "4K",
        "--rounds",
        "2",
        "--patience-s",
        "0",
    ]
    done = CliRunner(env={"XLA_FLAGS": ""}).invoke(app, [*arguments, "-o", str(file)])
    assert done.exit_code == 0, done.output
    document = json.loads(file.read_text())
    assert parse_selection(document["algorithm"])
    assert set(document["rows"][0]["algorithms_us"]) == set(tune.candidates("allreduce"))
    assert document["ranks"] == 2


def test_tune_refuses():
    for arguments, expected in [
        (["ppermute"], "expected one of allreduce"),
        (["-o", "table.txt"], "ends in .json"),
    ]:
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", *arguments])
        assert done.exit_code == 2
        assert expected in done.output
