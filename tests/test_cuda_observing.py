"""What GPUs tell through jaxring.stats(), the log and the flight record, and how rejoin() and an
abort in another process reach them: over a stand-in for jaxring._cuda."""

import json
import logging
import queue
import threading
import time
import types
from typing import Any

import pytest

import jaxring
import jaxring.testing
from jaxring._src import cuda, cuda_connections, monitor

ROW = {
    "collective": "allreduce",
    "algorithm": "direct",
    "transport": "cuda_ipc",
    "communicator": "mesh:0,1",
    "operations": 2,
    "bytes_sent": 8,
    "bytes_received": 8,
    "wait_s": None,
}


class Native(types.ModuleType):
    """A stand-in for jaxring._cuda."""

    def __init__(self) -> None:
        super().__init__("fake_cuda")
        self.events: queue.Queue[dict[str, str]] = queue.Queue()
        self.log: list[Any] = []
        self.states: dict[str, str] = {}

    def next_event(self, timeout_s: float) -> dict[str, str] | None:
        return self.events.get(timeout=timeout_s)

    def stop_events(self) -> None:
        self.events.put({"kind": "stop", "text": ""})

    def flight_record(self) -> list[dict[str, Any]]:
        return [{"communicator": "mesh:0,1 on GPUs", "rank": 0}]

    def stats(self, reset: bool) -> list[dict[str, Any]]:
        self.log.append(("stats", reset))
        return [ROW]

    def rejoin(self) -> None:
        self.log.append("rejoin")

    def create(self, key: str, ranks: list[int], devices: list[int], world_size: int) -> None:
        self.log.append(("create", key, ranks, devices, world_size))
        self.states[key] = "connecting"

    def cards(self, key: str) -> list[bytes]:
        return [b"card"]

    def map(self, key: str, cards: list[bytes]) -> list[int]:
        return [len(cards)]

    def decide(self, key: str, mapped: list[int]) -> None:
        self.states[key] = "ready"

    def state(self, key: str) -> str:
        return self.states.get(key, "missing")

    def close(self, key: str) -> None:
        self.log.append(("close", key))
        self.states.pop(key, None)

    def fail(self, key: str, kind: str, message: str) -> None:
        self.states[key] = f"broken: jaxring.{kind}: {message}"


@pytest.fixture
def native(monkeypatch):
    native = Native()
    monkeypatch.setattr(cuda, "module", lambda: native)
    monkeypatch.setattr(cuda, "_registered", True)
    monkeypatch.setattr(cuda_connections, "_begun", {})
    return native


def eventually(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stats_has_the_rows_of_gpus(native):
    assert jaxring.stats()[-1] == ROW
    jaxring.stats(reset=True)
    assert native.log == [("stats", False), ("stats", True)]


def test_the_monitor_hears_two_modules(native, monkeypatch, tmp_path, caplog):
    other = Native()
    before = dict(monitor._threads)
    assert monitor.listen_to(native)
    assert monitor.listen_to(other)
    assert not monitor.listen_to(native)
    with (
        jaxring.config.override(flight_dir=str(tmp_path)),
        caplog.at_level(logging.INFO, "jaxring"),
    ):
        native.events.put({"kind": "stall", "text": "missing rank 1"})
        other.events.put({"kind": "error", "text": "enough"})
        eventually(lambda: len(caplog.records) >= 2)
    assert any(r.message == "missing rank 1" for r in caplog.records)
    (file,) = tmp_path.glob("flight-*.json")
    record = json.loads(file.read_text())
    assert record["reason"] == "enough"
    assert record["operations"].count({"communicator": "mesh:0,1 on GPUs", "rank": 0}) == 2
    for source in (native, other):
        source.stop_events()
        monitor._threads[source].join(10)
        assert not monitor._threads.pop(source).is_alive()
    assert monitor._threads == before


def test_rejoin_makes_communicators_of_mesh_axes_anew(native):
    cuda_connections.ensure(native, "mesh:0,1", [0, 0], [0, 1], 0, None)
    cuda_connections.ensure(native, "world", [0], [0], 0, None)
    native.fail("mesh:0,1", "TimeoutError", "rank 1 did not come")
    native.log.clear()
    jaxring.rejoin()
    assert native.log == [
        ("close", "mesh:0,1"),
        ("create", "mesh:0,1", [0, 1], [0, 1], 2),
        "rejoin",
    ]
    assert native.states == {"mesh:0,1": "ready", "world": "ready"}


def meet_two(monkeypatch: Any, held: Any = None) -> list[str]:
    """Makes the other one of two processes answer as this one does; the prefixes they meet under.

    held: an Event that they wait for first."""
    prefixes = []

    def exchange(
        store: Any, prefix: str, members: Any, me: int, mine: Any, timeout_s: float
    ) -> Any:
        prefixes.append(prefix)
        assert held is None or held.wait(10)
        return {0: mine, 1: mine}

    monkeypatch.setattr(cuda_connections.bootstrap, "exchange", exchange)
    return prefixes


def test_rejoin_overtakes_processes_that_are_still_being_joined(native, monkeypatch):
    held = threading.Event()
    prefixes = meet_two(monkeypatch, held)
    store: Any = object()
    cuda_connections.ensure(native, "mesh:0,1", [0, 1], [0, 0], 0, store)
    eventually(lambda: prefixes)
    decided: list[Any] = []
    monkeypatch.setattr(native, "decide", lambda *given: decided.append(given))
    jaxring.rejoin()
    held.set()
    eventually(lambda: decided)
    time.sleep(0.1)
    assert decided == [("mesh:0,1", [2, 2])]  # by the second one alone
    first, second = sorted({prefix.rpartition("/")[0] for prefix in prefixes})
    assert first.rpartition("/")[2] == second.rpartition("/")[2]


def test_an_abort_in_another_process_stops_kernels_here(native, monkeypatch):
    meet_two(monkeypatch)
    cpu_side = ["ready"]
    store: Any = object()
    cuda_connections.ensure(native, "world", [0, 1], [0, 0], 0, store, lambda: cpu_side[0])
    eventually(lambda: native.state("world") == "ready")
    cpu_side[0] = "broken: jaxring.AbortedError: enough"
    eventually(lambda: native.state("world") == "broken: jaxring.AbortedError: enough")


def aborts_or_looks(comm: Any) -> str:
    if comm.rank == 0:
        comm.abort("enough")
    deadline = time.monotonic() + 10
    while comm.state() == "ready" and time.monotonic() < deadline:
        time.sleep(0.01)
    return comm.state()


def test_a_process_that_makes_no_call_hears_of_an_abort():
    """By looking at the CPU side, as the test above pretends."""
    states = jaxring.testing.spawn(aborts_or_looks, 2)
    assert states == ["broken: jaxring.AbortedError: enough"] * 2
