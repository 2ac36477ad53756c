"""What an operator learns while ranks wait, and afterwards: the stall inspector, the flight record
and its merged table."""

import json
import logging
import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxring
from jaxring.cli.main import app
from jaxring.testing import spawn


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def slow_rank(comm):
    seen = Lines()
    logging.getLogger("jaxring").addHandler(seen)
    jaxring.allreduce(jnp.ones(3), comm, name="warm-up")
    if comm.rank == 1:
        time.sleep(1.5)
    with jaxring.config.override(warn_s=0.3):
        total = jaxring.allreduce(jnp.ones(3), comm, name="loss")
        np.testing.assert_array_equal(total, [3, 3, 3])
    time.sleep(0.2)
    return seen.lines


def test_a_stall_is_logged_once_with_who_is_missing():
    lines = spawn(slow_rank, 3)
    assert lines[1] == []
    for rank in (0, 2):
        assert len(lines[rank]) == 1, lines[rank]
        assert "allreduce 'loss'" in lines[rank][0]
        assert "missing rank 1 (pid " in lines[rank][0]
        assert "'warm-up'" in lines[rank][0]  # what it last did


def dumped_on_signal(comm, folder):
    jaxring.allreduce(jnp.ones(2), comm, name="before")
    os.kill(os.getpid(), signal.SIGUSR2)
    path = f"{folder}/flight-{comm.hosts[0]}-{os.getpid()}.json"
    deadline = time.monotonic() + 10
    while not os.path.exists(path):
        assert time.monotonic() < deadline, "no record was written"
        time.sleep(0.05)
    with open(path) as f:
        record = json.load(f)
    assert record["reason"] == "signal SIGUSR2"
    assert [row["name"] for row in record["operations"]] == ["before"]
    assert record["operations"][0]["outcome"] == "done"


def diverging(comm, folder):
    jaxring.config.update("flight_dir", folder)
    for i in range(4):
        jaxring.allreduce(jnp.ones(2), comm, name=f"step {i}")
    try:
        if comm.rank == 1:
            jaxring.allreduce(jnp.ones(5), comm)
        else:
            jaxring.broadcast(jnp.ones(2), comm)
    except Exception as e:
        error = jaxring.errors.from_exception(e)
    deadline = time.monotonic() + 10
    while not any(str(os.getpid()) in name for name in os.listdir(folder)):
        assert time.monotonic() < deadline, "no record was written"
        time.sleep(0.05)
    return type(error).__name__


def recorded(comm, on_signal, on_error):
    dumped_on_signal(comm, on_signal)
    return diverging(comm, on_error)


def test_a_signal_and_an_error_leave_records(tmp_path_factory):
    """Those of the error show the first divergence."""
    on_signal, tmp_path = str(tmp_path_factory.mktemp("signal")), tmp_path_factory.mktemp("error")
    env = {"JAXRING_FLIGHT_DIR": on_signal}
    assert spawn(recorded, 2, on_signal, str(tmp_path), env=env) == ["MismatchError"] * 2
    result = CliRunner().invoke(app, ["flight", str(tmp_path), "--json"])
    found = json.loads(result.stdout)
    assert (found["communicator"], found["ranks"]) == ("world", [0, 1])
    assert found["first_divergence"]["launch"] == 5
    assert found["by_rank"]["0"].startswith("MismatchError: broadcast(root=0, float32[2]")
    assert found["by_rank"]["1"].startswith("MismatchError: allreduce(sum, float32[5]")
    table = CliRunner().invoke(app, ["flight", str(tmp_path)]).stdout
    assert "first divergence: launch 5 call #0" in table
    assert "'step 3'" in table
    one = sorted(tmp_path.glob("flight-*.json"))[0]
    alone = CliRunner().invoke(app, ["flight", str(one)]).stdout
    assert alone.count("rank ") == 1
    assert "'step 0'" in alone


def test_an_empty_folder_is_a_usage_error(tmp_path):
    with pytest.raises(jaxring.UsageError, match="holds no flight-"):
        CliRunner().invoke(app, ["flight", str(tmp_path)], catch_exceptions=False)


def test_flight_dir_must_exist():
    with pytest.raises(jaxring.UsageError, match="a folder that exists"):
        jaxring.config.update("flight_dir", "/no/such/folder")
