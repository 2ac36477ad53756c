"""A rank's process ends without a word. Case 5 of the design's list: horovod #3264, nccl #585, gloo
#520, where survivors hung or were killed. Here each survivor raises PeerError within a second,
naming rank and pid, and then makes a new communicator (soak_world.check and recover)."""

import os
import subprocess
import sys

import pytest
import soak_world


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", ["before", "during", "between", "close"])
def test_killed(inject, moment, victim):
    inject("kill", moment, victim)


@pytest.mark.parametrize("kind", ["exit", "segfault"])
def test_other_ends(inject, kind):
    inject(kind, "during", 1)
    inject(kind, "between", 0)


@pytest.mark.parametrize("served", [False, True], ids=["store of rank 0", "store of the launcher"])
@pytest.mark.parametrize(
    ("stage", "victim"),
    [("table", 0), ("segment", 2)]
    + [pytest.param(*each, marks=pytest.mark.slow) for each in [("table", 2), ("segment", 0)]],
)
def test_killed_during_init(inject, victim, stage, served):
    """Known from the connection to the store, not from the deadline."""
    inject("kill", "init", victim, stage=stage, served=served)


@pytest.mark.parametrize("victim", [0, 2])
def test_that_never_came(inject, victim):
    """Nobody can know that it ever lived: the deadline of init names it."""
    inject("kill", "init", victim, stage="silent", deadline_s=2.0, served=victim == 2)


def test_a_death_leaves_nothing_behind(inject):
    """Case 9, nccl #290: segments of killed jobs filled /dev/shm. Ours have no name anywhere."""
    before = sorted(os.listdir("/dev/shm"))
    for moment in ("before", "during"):
        inject("kill", moment, 0)
    assert sorted(os.listdir("/dev/shm")) == before


@pytest.mark.parametrize("victim", [0, 1])
def test_a_split_with_a_dead_rank(tmp_path, victim):
    """It is in no group of the store, so its absence alone would be seen at the deadline only."""
    (tmp_path / "program.py").write_text(
        f"""
import os, time, jaxring
comm = jaxring.init(int(os.environ["RANK"]), 3, os.environ["COORDINATOR"])
if comm.rank == {victim}: os._exit(9)
time.sleep(0.5)
begin = time.monotonic()
try:
    comm.split(0)
except jaxring.PeerError as e:
    print(e.rank, e.pid, time.monotonic() - begin < 10)
"""
    )
    env = {
        **os.environ,
        "COORDINATOR": soak_world.free_port(),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py")],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in processes]
    for rank in {0, 1, 2} - {victim}:
        assert outputs[rank].split() == [str(victim), str(processes[victim].pid), "True"]
