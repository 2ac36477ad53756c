import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import jaxring
from jaxring import _native, bootstrap
from jaxring._src import interfaces, joining, members, placement, rendezvous
from jaxring._src.store import parse_address

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
SEVERAL_HOSTS = {"JAXRING_COORDINATOR": "192.0.2.1:5000", "JAXRING_SECRET": "s"}
SEVERAL_NODES = {"SLURM_STEP_NUM_NODES": "2", "JAXRING_SECRET": "s"}


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
        ((None,) * 3, SLURM | {"SLURM_STEP_NUM_NODES": "2"}, "JAXRING_COORDINATOR is not set"),
        (
            (None,) * 3,
            SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"},
            "JAXRING_SECRET is not set",
        ),
        ((None,) * 3, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "on several hosts need"),
        # Case 12 of cases.md: https://github.com/marin-community/marin/issues/7994
        (
            (None,) * 3,
            OPEN_MPI
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", **SEVERAL_HOSTS}
            | {"JAXRING_COORDINATOR": "[::1]:5000"},
            "is a loopback address, which ranks on other hosts cannot reach",
        ),
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
    assert (e.value.rank, e.value.pid) == (1 - me, None)


def test_exchange_names_the_process_of_a_rank_that_has_been_met(store):
    known = {5: {"host": "a", "pid": 50}, 7: {"host": "b", "pid": 70}}
    with pytest.raises(jaxring.TimeoutError, match=r"ranks \[1\] .* rank 1 is pid 70 on b; ") as e:
        bootstrap.exchange(store, "p", [5, 7], 5, {}, 0.1, known=known)
    assert (e.value.rank, e.value.host, e.value.pid) == (1, "b", 70)


def test_the_process_of_a_rank_that_the_engine_names():
    rows = [{"host": "a", "pid": 10}, {"host": "b", "pid": 20}]
    members.note("of this test", rows)
    text = "allreduce (call #0 of launch 3 on communicator of this test, sum): missing rank 1"
    expected = {"missing_ranks": [1], "rank": 1, "host": "b", "pid": 20}
    assert members.placed(text, {"missing_ranks": [1]}) == expected
    assert members.placed(text, {"rank": 1, "host": "c", "pid": 9})["pid"] == 9
    assert members.placed("communicator another: …", {"rank": 1}) == {"rank": 1}
    assert members.placed(text, None) == {}


def test_exchange_refuses_a_second_process_of_the_same_rank(store):
    store.set("p/table", json.dumps({0: {"pid": 1}, 1: {"pid": 2}}))
    with pytest.raises(jaxring.UsageError, match="rank 1 is taken: process 2 came as rank 1"):
        bootstrap.exchange(store, "p", range(2), 1, {"pid": 3}, 5)


KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
POD = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29000"}


@pytest.mark.parametrize(
    ("env", "rank", "coordinator"),
    [
        (SLURM | SEVERAL_NODES | {"SLURM_STEP_NODELIST": "192.0.2.7"}, 2, "192.0.2.7:20017"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", **SEVERAL_HOSTS}, 2, "192.0.2.1:5000"),
        (KUBERNETES | POD | SEVERAL_HOSTS, 1, "192.0.2.1:5000"),
        (KUBERNETES | POD | {"JAXRING_SECRET": "s"}, 1, "192.0.2.1:29000"),
        (
            KUBERNETES | SEVERAL_HOSTS | {"JOB_COMPLETION_INDEX": "2", "JAXRING_WORLD_SIZE": "3"},
            2,
            "192.0.2.1:5000",
        ),
    ],
)
def test_discover_on_several_hosts(env, rank, coordinator):
    found = bootstrap.discover(env=env)
    assert (found.rank, found.coordinator, found.secret) == (rank, coordinator, "s")


def test_first_node_of_slurms_list():
    nodes = {"n1": "n1", "n1,n2": "n1", "gpu[007-012,20],login1": "gpu007", "a-b[3]": "a-b3"}
    assert {text: placement.first_node(text) for text in nodes} == nodes


def test_the_address_of_an_interface():
    assert interfaces.address_of("lo") == "127.0.0.1"
    assert interfaces.address_of("[fd00::1]") == "fd00::1"
    with pytest.raises(jaxring.UsageError, match=r"interface: expected a network interface .*lo"):
        interfaces.address_of("none0")


@pytest.mark.parametrize("coordinator", ["127.0.0.1:5000", "[::1]:5000", "localhost:5000"])
def test_a_loopback_coordinator_of_several_hosts_is_refused(coordinator):
    with pytest.raises(jaxring.UsageError, match="cannot reach; give an address of host 0"):
        interfaces.refuse_loopback(coordinator, "run")
    interfaces.refuse_loopback("192.0.2.1:5000", "run")


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


def test_half_a_rendezvous_file_is_none_at_all(private_folder, server):
    """The last one was found by the fuzzer: the port is too large a number for an int."""
    rendezvous.write("job 1", server.address, "secret")
    (path,) = private_folder.iterdir()
    for text in ("", '{"address": ["::1"', "[]", "{}", '{"address": ["::1", 1e999], "secret": ""}'):
        path.write_text(text)
        assert rendezvous.read("job 1") is None


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
def test_init_of_two_processes(tmp_path, how, free_port):
    """Without a secret in the environment: address and secret go through the private file."""
    coordinator = f"localhost:{free_port()}"
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


class LastMoment:
    """A communicator that all have joined just after a look at it, and the store of a rank that has
    ended since."""

    def __init__(self, joined):
        self.joined, self.looks = joined, 0

    def wait_ready(self, key, timeout_s, waited_s):
        self.looks += 1
        if self.looks == 1 or not self.joined:
            raise RuntimeError("jaxring.TimeoutError: not all ranks have joined")

    def communicator_state(self, key):
        return "ready" if self.joined else "connecting"

    def require_all(self, group):
        raise jaxring.PeerError("the store is gone")


def test_a_store_that_ends_as_all_have_joined():
    """A rank whose init has returned may end at once; to the others it is no failure of theirs."""
    both: Any = LastMoment(joined=True)
    joining._wait_ready(both, both, "world", time.monotonic(), 5.0, "init/0")
    both = LastMoment(joined=False)
    with pytest.raises(jaxring.PeerError, match="the store is gone"):
        joining._wait_ready(both, both, "world", time.monotonic(), 5.0, "init/0")


def test_without_libfabric_a_sentence_says_what_to_install(monkeypatch):
    """It is looked for when ranks turn out to be on different hosts, not before."""
    monkeypatch.setenv("JAXRING_LIBFABRIC", "/nowhere/libfabric.so.1")
    _native.create_communicator("without libfabric", [0, 1], 0)
    with pytest.raises(RuntimeError, match=r"/nowhere/libfabric.* apt-get install libfabric1"):
        _native.links_listen("without libfabric", [0, 1], "tcp", "127.0.0.1", "secret")
    _native.close_communicator("without libfabric")


def test_processes_of_other_hosts_are_not_judged_by_their_numbers_here():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    ended = {**bootstrap.host_identity(), "pid": child.pid}
    joining.require_alive({0: bootstrap.host_identity(), 1: {**ended, "id": "another host"}})
    with pytest.raises(jaxring.PeerError, match=f"rank 1 .pid {child.pid}"):
        joining.require_alive({0: bootstrap.host_identity(), 1: ended})
