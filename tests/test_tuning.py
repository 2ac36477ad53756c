"""tune_step: that it tries what it says, decides by the slowest rank, and leaves a file that the
settings take."""

import json
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxring
from jaxring import tuning
from jaxring.testing import spawn

K = 1 << 10
NAMES = ("bucket_bytes", "chunk_bytes")


@pytest.fixture(autouse=True)
def settings_as_they_were():
    before = {name: getattr(jaxring.config, name) for name in NAMES}
    yield
    for name, value in before.items():
        jaxring.config.update(name, value)


def now():
    return tuple(getattr(jaxring.config, name) for name in NAMES)


def test_the_fastest_is_chosen_and_can_be_loaded(tmp_path):
    """Of a step whose time depends on the settings in a way that no machine can blur."""
    seen = []

    def step(x):
        seen.append(now())
        bucket, chunk = now()
        time.sleep({4 * K: 0.002}.get(bucket, 0.06) + {64: 0.0}.get(chunk, 0.02))
        return x

    file = tmp_path / "tuned.json"
    before = now()
    candidates: Any = {"bucket_bytes": (4 * K, 8 * K), "chunk_bytes": (0, 64)}
    tuned = tuning.tune_step(step, jnp.ones(3), **candidates, rounds=2, output=file)
    assert tuned.settings == {"bucket_bytes": 4 * K, "chunk_bytes": 64}
    assert tuned.step_s < tuned.before_s / 3
    assert now() == before
    # All in turn, once to compile and twice to be timed: first bucket sizes, then chunk sizes.
    assert seen == 3 * [before, (4 * K, 0), (8 * K, 0)] + 3 * [(4 * K, 0), (4 * K, 64)]
    jaxring.config.load(file)
    assert now() == (4 * K, 64)
    assert len(json.loads(file.read_text())["rows"]) == 5


def test_what_is_not_clearly_faster_changes_nothing(monkeypatch):
    """By a clock of its own: the machine's would blur 2 %."""
    clock_s = [0.0]
    monkeypatch.setattr(tuning, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))

    def step():
        clock_s[0] += 0.98 if 1 in now() else 1.0

    tuned = tuning.tune_step(step, bucket_bytes=(1,), chunk_bytes=(1,), rounds=3)
    assert tuned.settings == dict(zip(NAMES, now(), strict=True))
    assert tuned.step_s == tuned.before_s


def test_a_real_step_is_compiled_for_each_candidate(make_spmd, carried):
    spmd = make_spmd({"x": 2})

    def f(x):
        return jaxring.allreduce([x[0], x[0] + 1], "x")

    step = jax.jit(jax.shard_map(f, mesh=spmd.mesh, in_specs=P("x"), out_specs=P()))
    x = np.ones((2, 100), np.float32)
    tuning.tune_step(step, x, bucket_bytes=(400,), chunk_bytes=(), rounds=1)
    # Twice with both leaves in one bucket and twice with two, then the winner against itself.
    assert sum(carried().values()) in (2 * (2 * 1 + 2 * 2 + 2 * 1), 2 * (2 * 1 + 2 * 2 + 2 * 2))


def test_a_step_may_donate_its_arguments():
    x = {"weights": jnp.ones(3), "key": jax.random.key(0)}
    step = jax.jit(lambda x: jax.tree.map(jnp.copy, x), donate_argnums=0)
    tuning.tune_step(step, x, bucket_bytes=(1,), chunk_bytes=(), rounds=2)
    assert step(x)["weights"].sum() == 3
    assert x["weights"].is_deleted()  # or this shows nothing


def decided(comm):
    """Rank 1 is slow where rank 0 is fast."""

    def step():
        fast = (now()[0] == K) == (comm.rank == 0)
        time.sleep(0.005 if fast else 0.05)

    sizes: Any = {"bucket_bytes": (K, 2 * K), "chunk_bytes": ()}
    with_comm = tuning.tune_step(step, comm=comm, rounds=1, **sizes)
    on_mesh = tuning.tune_step(step, rounds=1, **sizes)
    return with_comm.rows, on_mesh.rows


def test_ranks_decide_alike():
    (first, on_mesh), (second, on_mesh_too) = spawn(decided, 2, distributed=True)
    assert first == second
    assert on_mesh == on_mesh_too
    assert all(row["step_s"] >= 0.05 for row in first + on_mesh)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is no file of settings"),
        ("[1]", "is no file of settings"),
        ('{"settings": {"bucket_bytes": 4096, "chunk_bytes": -1}}', "chunk_bytes: expected bytes"),
        ('{"settings": {"buckets": 1}}', "unknown setting 'buckets'"),
        ("{}", "algorithm: expected one of"),
    ],
)
def test_files_that_are_none(text, message, tmp_path):
    file = tmp_path / "tuned.json"
    file.write_text(text)
    before = now()
    with pytest.raises(jaxring.UsageError, match=message):
        jaxring.config.load(file)
    assert now() == before


def test_a_table_of_algorithms_loads_too(tmp_path):
    file = tmp_path / "table.json"
    file.write_text('{"algorithm": "ring:1m-max"}')
    try:
        jaxring.config.load(file)
        assert jaxring.config.algorithm == "ring:1m-max"
    finally:
        jaxring.config.update("algorithm", "auto")


def test_no_rounds():
    with pytest.raises(jaxring.UsageError, match="expected rounds >= 1, got 0"):
        tuning.tune_step(lambda: None, rounds=0)
