"""The example trains the same with lax and with jaxring, and the demo's checks are able to fail."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from by_place import EXAMPLES, load

pytest.importorskip("optax")
pytest.importorskip("sklearn")


def train(folder: Path, *flags: str, launcher: tuple[str, ...] = ()) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    file = folder / "report.json"
    script = str(EXAMPLES / "train_digits.py")
    done = subprocess.run(
        [sys.executable, *launcher, script, "--epochs=2", f"--json={file}", *flags],
        capture_output=True,
        text=True,
        env=environment,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


@pytest.mark.slow
def test_training_equals_lax_on_devices_and_processes(tmp_path):
    lax = train(tmp_path, "--collectives=lax", "--devices=2")
    devices = train(tmp_path, "--collectives=jaxring", "--devices=2", "--algorithm=ring")
    processes = train(
        *(tmp_path, "--mode=communicator"), launcher=("-m", "jaxring", "run", "-n", "2")
    )
    for report in (devices, processes):
        np.testing.assert_allclose(report["losses"], lax["losses"], 1e-5, 1e-6)
        assert report["ranks"] == 2
        (entry,) = report["stats"]
        assert entry["collective"] == "allreduce"
        assert entry["operations"] >= len(report["losses"])
        assert entry["bytes_sent"] >= report["gradient_bytes"] * len(report["losses"])
    assert devices["stats"][0]["algorithm"] == "ring"
    assert devices["stats"][0]["transport"] != processes["stats"][0]["transport"]


@pytest.mark.slow
def test_training_does_not_amplify_the_order_of_summation(tmp_path):
    """What the demo's comparison of losses rests on, over as many steps as it makes."""
    flags = "--devices=4", "--epochs=10"
    lax = train(tmp_path, "--collectives=lax", *flags)
    ring = train(tmp_path, "--algorithm=ring", *flags)
    assert ring["losses"] != lax["losses"]
    np.testing.assert_allclose(ring["losses"], lax["losses"], 1e-4, 1e-5)


def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="--batch=9 is not divisible by 2 ranks"):
        train(tmp_path, "--collectives=lax", "--devices=2", "--batch=9")


def test_the_elastic_example_survives_a_death():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    script = [str(EXAMPLES / "train_elastic.py"), "--kill_rank=1", "--kill_step=32"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxring", "run", "-n", "2", "--restarts", "0", *script],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONSAFEPATH": "1"},
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] from step 0 on with 2 ranks" in done.stdout
    assert "[0] from step 30 on with 1 ranks" in done.stdout
    (accuracy,) = re.findall(r"test accuracy (0\.\d+) after 150 steps, 30 commits", done.stdout)
    assert float(accuracy) > 0.93


def test_the_readme_example_prints_what_it_says(tmp_path):
    text = (EXAMPLES.parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(import jax\n.*?)```", text, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[12. 16.]\n")
    assert "'collective': 'allreduce'" in done.stdout


@pytest.fixture
def reports():
    demo = load("demo")
    stats = [{"collective": "allreduce", "operations": 5}]
    return demo, {
        run: {
            "collectives": run.collectives,
            "losses": [1.0, 0.5],
            "params_sha256": "0",
            "test_accuracy": 0.97,
            "stats": stats if run.collectives == "jaxring" else [],
        }
        for run in demo.RUNS
    }


def test_the_demo_passes_when_all_is_well(reports):
    demo, by_run = reports
    assert demo.failures(by_run) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"test_accuracy": 0.94}, "test accuracy 0.9400 < 0.95"),
        ({"losses": [1.0, 0.501]}, "a loss differs from lax's by 0.001"),
        ({"losses": [1.0, 0.5 + 1e-7]}, "not the bits of the first run"),
        ({"params_sha256": "1"}, "not the bits of the first run"),
        ({"stats": []}, "the engine's counters show no allreduce"),
    ],
)
def test_the_demo_can_fail(reports, changes, expected):
    demo, by_run = reports
    last = demo.RUNS[-1]
    assert last.repeat == 1
    by_run[last] |= changes
    assert any(expected in sentence for sentence in demo.failures(by_run))
