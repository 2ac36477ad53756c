import json
import os
import socket
import subprocess
import sys
import threading

import pytest

import jaxring
from jaxring import bootstrap
from jaxring._src import rendezvous
from jaxring._src.store import StoreServer, TcpStore, parse_address


@pytest.fixture
def server():
    server = StoreServer("127.0.0.1", 0, "secret")
    yield server
    server.close()


@pytest.fixture
def store(server):
    return TcpStore(server.address, "secret")


# --- where am I ---

JAXRING_RUN = {
    "JAXRING_RANK": "1",
    "JAXRING_WORLD_SIZE": "4",
    "JAXRING_COORDINATOR": "h0:5000",
    "JAXRING_SECRET": "s",
    "JAXRING_SERVED": "1",
}
SLURM = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "5",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "6"}


@pytest.mark.parametrize(
    ("env", "rank", "world_size", "source"),
    [
        ({}, 0, 1, "none found: a world of one"),
        (JAXRING_RUN, 1, 4, "jaxring run"),
        (SLURM, 2, 3, "Slurm"),
        (OPEN_MPI, 2, 5, "Open MPI"),
        (PMI, 3, 6, "PMI"),
        (SLURM | OPEN_MPI | JAXRING_RUN, 1, 4, "jaxring run"),
        # The batch script itself is no rank, only what srun starts.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 0, 1, "none found: a world of one"),
    ],
)
def test_discover(env, rank, world_size, source):
    found = bootstrap.discover(env=env)
    assert (found.rank, found.world_size, found.source) == (rank, world_size, source)


def test_arguments_come_first():
    found = bootstrap.discover(0, 2, "localhost:5000", env=JAXRING_RUN)
    assert (found.rank, found.world_size, found.coordinator) == (0, 2, "localhost:5000")
    assert found.source == "arguments"
    assert not found.served


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ((1, None, None), {}, "rank and world_size go together"),
        ((None, None, "h:1"), {}, "rank and world_size go together"),
        ((0, 2, None), {}, 'world_size > 1 needs coordinator="host:port"'),
        ((2, 2, "h:1"), {}, "expected 0 <= rank < world_size, got rank 2 and world_size 2"),
        ((None,) * 3, {"JAXRING_RANK": "x"}, "JAXRING_RANK: expected a number >= 0, got 'x'"),
        ((None,) * 3, {"JAXRING_RANK": "0"}, "JAXRING_WORLD_SIZE: expected a number >= 0"),
        ((None,) * 3, {**JAXRING_RUN, "JAXRING_RANK": "4"}, "got rank 4 and world_size 4"),
        ((None,) * 3, {"PMIX_RANK": "1"}, "nothing says how many ranks there are"),
        ((None,) * 3, SLURM | {"SLURM_STEP_NUM_NODES": "2"}, "start all 3 ranks on one host"),
        ((None,) * 3, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "one host"),
    ],
)
def test_discover_says_what_is_wrong(arguments, env, message):
    with pytest.raises(jaxring.UsageError, match=message.replace("(", r"\(")):
        bootstrap.discover(*arguments, env=env)


def test_parse_address():
    assert parse_address("node0:5000") == ("node0", 5000)
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("node0", "node0:", ":5000", "node0:0", "node0:65536", "node0:http"):
        with pytest.raises(jaxring.UsageError, match="expected host:port"):
            parse_address(text)


# --- meeting ---


def test_exchange(store):
    tables = {}

    def join(me):
        tables[me] = bootstrap.exchange(store, "p", [3, 1, 2], me, {"pid": 10 + me}, 10)

    threads = [threading.Thread(target=join, args=(me,)) for me in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    expected = {3: {"pid": 13}, 1: {"pid": 11}, 2: {"pid": 12}}
    assert tables == {1: expected, 2: expected, 3: expected}
    assert list(tables[1]) == [3, 1, 2]


@pytest.mark.parametrize("me", [0, 1])
def test_exchange_names_the_missing(store, me):
    with pytest.raises(jaxring.TimeoutError, match=r"ranks .* have not come") as e:
        bootstrap.exchange(store, "p", range(3), me, {}, 0.3)
    assert e.value.missing_ranks == tuple({0, 1, 2} - {me})


def test_exchange_refuses_a_second_process_of_the_same_rank(store):
    store.set("p/table", json.dumps({0: {"pid": 1}, 1: {"pid": 2}}))
    with pytest.raises(jaxring.UsageError, match="rank 1 is taken: process 2 came as rank 1"):
        bootstrap.exchange(store, "p", range(2), 1, {"pid": 3}, 5)


def test_ranks_on_different_hosts_are_told():
    here = bootstrap.host_identity()
    there = {**here, "host": "elsewhere", "id": "other"}
    bootstrap.require_one_host({0: here, 1: here})
    with pytest.raises(jaxring.UsageError, match=r"on different hosts .*elsewhere.* on one host"):
        bootstrap.require_one_host({0: here, 1: there})


@pytest.fixture
def private_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"jaxring-{os.getuid()}"


def test_rendezvous_file(private_folder, server):
    assert rendezvous.read("job 1") is None
    rendezvous.write("job 1", server.address, "secret")
    assert private_folder.stat().st_mode & 0o777 == 0o700
    (path,) = private_folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert rendezvous.read("job 1") == (server.address, "secret")
    assert rendezvous.read("job 2") is None
    found = rendezvous.wait_for_server(lambda: rendezvous.read("job 1"), 1, None, 5)
    found.set("a", "b")
    rendezvous.remove_all()
    assert not list(private_folder.iterdir())


def test_a_folder_that_others_can_enter_is_refused(private_folder):
    private_folder.mkdir(mode=0o755)
    with pytest.raises(jaxring.UsageError, match="only user"):
        rendezvous.read("job 1")


@pytest.mark.parametrize(
    ("address", "secret", "reason"),
    [
        (None, "", "not published"),
        (("127.0.0.1", 1), "s", "refused"),
        ("server", "guess", "differ"),
    ],
)
def test_no_server_says_why(server, address, secret, reason):
    found = (
        None if address is None else (server.address if address == "server" else address, secret)
    )
    with pytest.raises(jaxring.TimeoutError, match=rf"rank 2 could not reach .*{reason}"):
        rendezvous.wait_for_server(lambda: found, 2, "h:1", 0.2)


RANK = """
import os, sys, jaxring
rank = int(sys.argv[1])
comm = jaxring.init() if "PMI_RANK" in os.environ else jaxring.init(rank, 2, sys.argv[2])
print(comm.rank, comm.world_size, jaxring.init() is comm)
"""


@pytest.mark.parametrize("how", ["arguments", "mpi"])
def test_init_of_two_processes(tmp_path, how):
    """Without a secret in the environment: address and secret go through the private file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"localhost:{free.getsockname()[1]}"
    processes = []
    for rank in (0, 1):
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", RANK, str(rank), coordinator]
        if how == "mpi":
            env |= {"PMI_RANK": str(rank), "PMI_SIZE": "2"}
            command = [
                "sh",
                "-c",
                '"$@"; true',
                "sh",
                *command,
            ]  # each rank has a parent of its own
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [p.communicate(timeout=60)[0] for p in processes]
    assert outputs == ["0 2 True\n", "1 2 True\n"]
    assert not list((tmp_path / f"jaxring-{os.getuid()}").iterdir())
