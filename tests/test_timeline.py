"""The setting `timeline`, what it writes, and how files of several processes become one."""

import itertools
import json
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import jaxring
from jaxring import timeline
from jaxring._src import timeline_writer
from jaxring.cli.main import app
from jaxring.testing import spawn


def slices(events):
    return [event for event in events if event["ph"] == "X"]


def straggling(comm, path):
    x = jnp.ones(1 << 16)
    step = jax.jit(lambda x: jaxring.allreduce(x, comm, name="dense", algorithm="tree"))
    small = jax.jit(lambda x: jaxring.allreduce(x, comm, name="small"))
    step(x).block_until_ready()
    jaxring.config.update("timeline", path)
    if comm.rank == 1:
        time.sleep(0.2)

    @jax.jit
    def scoped(x):
        with jax.named_scope("gradients"):
            return jaxring.allreduce(x, comm, name="in scope")

    scoped(x).block_until_ready()
    step(x).block_until_ready()
    small(x[:2]).block_until_ready()
    jaxring.config.update("timeline", "")  # the file is complete
    step(x).block_until_ready()  # not in it
    return comm.rank


def test_ranks_write_files_that_merge(tmp_path):
    spawn(straggling, 2, str(tmp_path / "trace.json"))
    files = [tmp_path / f"trace.{rank}.json" for rank in range(2)]
    early = slices(json.loads(files[0].read_text()))
    assert {"gradients/in scope", "dense", "small"} < {event["name"] for event in early}
    dense = [event for event in early if event["name"] == "dense"]
    assert len(dense) == 2  # the two channels of a tree; what ran before and after is not there
    assert len({event["tid"] for event in dense}) == 2
    assert dense[0]["args"]["algorithm"] == "tree"
    assert dense[0]["args"]["bytes"] == 4 << 16
    assert dense[0]["args"]["outcome"] == "done"
    waits = [event for event in early if event["name"] == timeline_writer.WAIT["name"]]
    longest = max(waits, key=lambda event: event["dur"])
    assert longest["args"]["for"] == "gradients/in scope"
    assert longest["dur"] > 100e3  # microseconds: rank 0 waited for rank 1
    assert longest["cname"] == "terrible"

    output = tmp_path / "merged.json"
    command = ["timeline", "merge", *map(str, files), "-o", str(output), "--json"]
    done = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    merged = json.loads(output.read_text())["traceEvents"]
    assert done["slices"] == len(slices(merged))
    assert {event["pid"] for event in merged} == {0, 1}
    # Of one clock: nobody is through before both have come. (An arrival is noted after it has been
    # announced, on a busy machine some ms later.)
    for name in ("gradients/in scope", "dense", "small"):
        parts = [e for e in slices(merged) if name in (e["name"], e["args"].get("for"))]
        arrived = [min(e["ts"] for e in parts if e["pid"] == pid) for pid in range(2)]
        ended = [max(e["ts"] + e["dur"] for e in parts if e["pid"] == pid) for pid in range(2)]
        assert max(arrived) < min(ended) + 50e3
    nest(merged)


def nest(events):
    """Slices of a row must not overlap."""
    rows = {}
    for event in slices(events):
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for of_row in rows.values():
        of_row.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(of_row):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, (before, after)


def test_devices_of_one_process_have_rows(tmp_path):
    mesh = jax.make_mesh((4,), ("m",), devices=jax.devices()[:4])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("m"), out_specs=P(), check_vma=False)
    def step(x):
        return jaxring.allreduce(x, "m", name="total"), jaxring.allreduce(x * 2, "m", "max")

    x = jax.device_put(jnp.ones(1 << 12), jax.NamedSharding(mesh, P("m")))
    jax.block_until_ready(step(x))
    with jaxring.config.override(timeline=tmp_path / "trace.json"):
        for _ in range(20):
            jax.block_until_ready(step(x))
    events = json.loads((tmp_path / "trace.0.json").read_text())
    work = [e for e in slices(events) if e["name"] != timeline_writer.WAIT["name"]]
    assert len(work) == 20 * 2 * 4
    assert {e["name"] for e in work} == {"total", "allreduce"}
    assert {e["args"]["rank"] for e in work} == {0, 1, 2, 3}
    nest(events)


def row(rank, begin_us, ready_us, end_us, call=0, boot="a", outcome="done"):
    """What the engine tells of an operation."""
    return {
        "communicator": "world",
        "rank": rank,
        "number": call,
        "launch": 0,
        "call": call,
        "copy": 0,
        "iteration": 0,
        "name": "x",
        "signature": "allreduce(sum, float32[3,2])",
        "collective": "allreduce",
        "algorithm": "ring",
        "outcome": outcome,
        "arrived_ns": begin_us * 1000,
        "ready_ns": ready_us * 1000,
        "finished_ns": end_us * 1000,
        "channel_ends_ns": [],
    }


def file_of(path, rank, boot, offset_ns, operations):
    rows = timeline_writer.Rows()
    rows.pid = rank
    head = {**timeline_writer.clock(rank), "boot_id": boot, "host": boot}
    head["realtime_minus_monotonic_ns"] = offset_ns
    events = [{"ph": "M", "name": timeline_writer.CLOCK, "pid": rank, "tid": 0, "args": head}]
    events += [event for one in operations for event in rows.events(one)]
    path.write_text(json.dumps(events))
    return path


def test_clocks_of_hosts_that_are_wrong_are_moved_until_nothing_contradicts(tmp_path):
    # Host b's calendar is 1 s late: rank 1 would be through long before rank 0 has come.
    a = file_of(tmp_path / "a.json", 0, "a", 0, [row(0, 1_000_000, 1_000_400, 1_000_500)])
    b = file_of(
        tmp_path / "b.json", 1, "b", -1_000_000_000, [row(1, 1_000_300, 1_000_400, 1_000_600)]
    )
    clocks = timeline.merge([a, b])["clocks"]
    moved_us = clocks["b.json"]["moved_us"] - clocks["a.json"]["moved_us"]
    assert -600 <= moved_us <= 200  # rank 1 came within rank 0's operation, and rank 0 within its
    # Where the calendars agree with what happened they are believed.
    b = file_of(tmp_path / "b.json", 1, "b", 100_000, [row(1, 1_000_300, 1_000_400, 1_000_600)])
    clocks = timeline.merge([a, b])["clocks"]
    assert clocks["b.json"]["moved_us"] - clocks["a.json"]["moved_us"] == pytest.approx(100)


def test_overlapping_operations_get_rows_of_their_own(tmp_path):
    file = file_of(
        tmp_path / "a.json",
        0,
        "a",
        0,
        [row(0, 20, 30, 40, 1), row(0, 10, 30, 50, 0), row(0, 50, 55, 60, 2)],
    )
    merged = timeline.merge([file])["traceEvents"]
    nest(merged)
    assert min(event["ts"] for event in slices(merged)) == 0
    rows = {e["args"]["call"]: e["tid"] for e in slices(merged)}
    assert rows["allreduce #0 of launch 0"] != rows["allreduce #1 of launch 0"]


def test_an_operation_that_failed_is_a_wait_of_another_colour(tmp_path):
    file = file_of(tmp_path / "a.json", 0, "a", 0, [row(0, 10, 0, 50, outcome="TimeoutError")])
    wait, work = slices(timeline.merge([file])["traceEvents"])
    assert (wait["dur"], work["dur"], work["cname"]) == (40, 0, timeline_writer.FAILED)
    output = tmp_path / "merged.json"
    shown = CliRunner().invoke(app, ["timeline", "merge", str(file), "-o", str(output)]).stdout
    assert shown == f"{output}: 2 slices of 1 process on 1 host\n"


def test_bytes_are_those_of_the_operands():
    text = "allreduce(sum, float32[2,3], bfloat16[], algorithm=auto)"
    assert timeline_writer.payload_bytes(text) == 26
    assert timeline_writer.payload_bytes("ppermute(perm=[0->1 1->0], int8[5])") == 5


@pytest.mark.parametrize("value", ["trace", "/no/such/folder/trace.json", 3])
def test_meaningless_paths(value):
    with pytest.raises(jaxring.UsageError, match=r"timeline: expected a name that ends in \.json"):
        jaxring.config.update("timeline", value)


def test_two_files_of_one_rank_are_refused(tmp_path):
    one, other = (file_of(tmp_path / f"{name}.json", 3, "a", 0, []) for name in "ab")
    with pytest.raises(jaxring.UsageError, match=r"a\.json and .*b\.json are both of rank 3; give"):
        timeline.merge([one, other])


def test_what_is_no_timeline_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for files in ([], [tmp_path / "x.json"], [tmp_path / "missing.json"]):
        with pytest.raises(jaxring.UsageError, match="timeline: "):
            timeline.merge(files)


def test_the_profiler_has_the_same_name():
    mesh = jax.make_mesh((2,), ("m",), devices=jax.devices()[:2])

    def step(x):
        with jax.named_scope("gradients"):
            return jaxring.allreduce(x, "m", name="dense")

    f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("m"), out_specs=P(), check_vma=False))
    x = jax.device_put(jnp.ones(8), jax.NamedSharding(mesh, P("m")))
    text = f.lower(x).compile().as_text() or ""
    (call,) = [line for line in text.splitlines() if "jaxring_collective" in line]
    assert call.split()[1].startswith("%dense")  # as XLA's profiler calls the slice
    assert "gradients/dense" in call.split("op_name=")[1].split('"')[1]
    assert 'name = "gradients/dense"' in call
