"""Where the system refuses a thread or a process: a typed error on all ranks, and no abort."""

import os
import resource
import subprocess
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import jaxring
from jaxring import launcher
from jaxring._src import monitor
from jaxring._src.store_server import StoreServer
from jaxring.testing import spawn


def no_more_threads():
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if os.geteuid() == 0:  # who is above that limit
        os.setresuid(65534, 65534, 0)


def error_of(call):
    try:
        jax.block_until_ready(call())
    except Exception as e:
        return jaxring.errors.from_exception(e)
    return None


def refused(comm, size, late_rank):
    """Rank 0 gets no thread; it waits for the other one, or the other way round."""
    x = jnp.ones(size)
    reduce = jax.jit(lambda x: jaxring.allreduce(x, comm, name="loss")).lower(x).compile()
    if comm.rank == 0:
        no_more_threads()
    if comm.rank == late_rank:
        time.sleep(1)
    begin = time.monotonic()
    error = error_of(lambda: reduce(x))
    if os.getresuid()[2] == 0:  # spawn's folder is root's
        os.setresuid(0, 0, 0)
    assert isinstance(error, jaxring.UsageError), error
    return str(error), error.rank, error.pid, os.getpid(), time.monotonic() - begin


@pytest.mark.parametrize(("size", "late_rank"), [(3, 0), (500_000, 1)])
def test_no_thread_for_the_engine(size, late_rank):
    results = spawn(refused, 2, size, late_rank)
    for text, rank, pid, _, seconds in results:
        assert "allreduce 'loss': the system gives rank 0 (pid" in text
        assert "raise its limit (ulimit -u" in text
        assert (rank, pid) == (0, results[0][3])
        assert seconds < 10


@pytest.fixture
def refusing(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_no_thread_for_the_monitor(refusing, monkeypatch):
    monkeypatch.setattr(monitor, "_threads", {})
    with pytest.raises(jaxring.UsageError, match="no thread for jaxring-monitor"):
        jaxring.init()


def test_no_thread_for_the_store(refusing):
    with pytest.raises(jaxring.UsageError, match="no thread for jaxring-store"):
        StoreServer("127.0.0.1", 0, "secret")


def test_no_process_for_a_rank(monkeypatch):
    def popen(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(jaxring.UsageError, match=r"no.* start a process for rank 2 \(Resource"):
        launcher.launch([launcher.Command(2, ["/bin/true"], {})], lambda *_: None)
