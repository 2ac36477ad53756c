"""One process of the soak: goes through many injections, as whichever rank the parent says.

It reads commands as JSON lines from its standard input and answers on the descriptor that its
first argument names."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import soak_calls
from soak_plan import DEATHS, MISMATCHES, Injection

import jaxring
from jaxring import bootstrap
from jaxring._src.store import TcpStore

LONG_S = 60.0


def die(how: str) -> None:
    answer({"event": "dying", "at": time.monotonic()})
    if how == "exit":
        os._exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def answer(message: dict[str, Any]) -> None:
    os.write(int(sys.argv[1]), (json.dumps(message) + "\n").encode())


def described(exception: BaseException) -> dict[str, Any]:
    """What a caller finds out about an error."""
    error = jaxring.errors.from_exception(exception)
    names = ("missing_ranks", "rank", "host", "pid", "signatures")
    values = {name: getattr(error, name, None) for name in names}
    return {"kind": type(error).__name__, "text": str(error), "at": time.monotonic(), **values}


class Rank:
    """This process in one injection."""

    def __init__(self, injection: Injection, rank: int, coordinator: str, secret: str):
        self.injection, self.rank = injection, rank
        self.coordinator, self.secret = coordinator, secret
        self.is_victim = rank == injection.victim
        self.comm: jaxring.Communicator | None = None
        self.call: soak_calls.Call
        self.strange: soak_calls.Call

    def prepare(self) -> dict[str, Any]:
        i = self.injection
        silent = i.moment == "init" and i.stage == "silent"
        if i.moment == "init" and self.is_victim:
            if silent:
                die(i.kind)
            self.die_while_joining()
        begin = time.monotonic()
        jaxring.config.update("timeout_s", LONG_S)
        try:
            self.comm = self.init(i.deadline_s if silent else LONG_S)
        except jaxring.Error as e:
            return {"error": described(e), "entered": begin}
        self.call = soak_calls.prepare(i, self.comm)
        if i.kind == "order":
            self.strange = soak_calls.prepare(i, self.comm, other=True)
        elif i.kind in MISMATCHES and i.kind != "calls":
            self.strange = soak_calls.prepare(i, self.comm, differently=i.kind)
        if i.moment != "before":
            np.testing.assert_array_equal(self.call(), soak_calls.expected(i, self.rank))
        jaxring.config.update("timeout_s", i.deadline_s)
        return {}

    def init(self, timeout_s: float) -> jaxring.Communicator:
        size = self.injection.world_size
        if not self.injection.served:
            return jaxring.init(self.rank, size, self.coordinator, timeout_s)
        env = {"RANK": str(self.rank), "WORLD_SIZE": str(size), "SERVED": "1"}
        env |= {"COORDINATOR": self.coordinator, "SECRET": self.secret}
        os.environ.update({f"JAXRING_{name}": value for name, value in env.items()})
        try:
            return jaxring.init(timeout_s=timeout_s)
        finally:
            for name in env:
                del os.environ[f"JAXRING_{name}"]

    def die_while_joining(self) -> None:
        """Within the store's calls: when the others know of this rank and wait for it."""
        i, get, put = self.injection, TcpStore.get, TcpStore.set

        def patched_put(store: TcpStore, key: str, value: str) -> None:
            own = i.stage == "table" and key.endswith(f"/member/{self.rank}") and self.rank > 0
            if own:
                put(store, key, value)
            if own or f"/{i.stage}/" in f"{key}/":
                die(i.kind)
            put(store, key, value)

        def patched_get(store: TcpStore, key: str, *rest: Any) -> str:
            if "/segment/" in key and i.stage == "segment":
                die(i.kind)
            return get(store, key, *rest)

        setattr(TcpStore, "set", patched_put)  # noqa: B010 - this process won't be used again
        setattr(TcpStore, "get", patched_get)  # noqa: B010

    def go(self) -> dict[str, Any]:
        i = self.injection
        assert self.comm is not None
        begin = time.monotonic()
        if i.moment == "close":
            if self.is_victim:
                threading.Timer(i.delay_s / 10, die, [i.kind]).start()
            self.comm.close()
            if self.is_victim:
                time.sleep(LONG_S)
            return {"entered": begin, "closed": time.monotonic()}
        for _ in range(2 if i.moment == "between" else 0):
            try:
                self.call().block_until_ready()
            except Exception as e:  # a root may be done, and misbehave, before the others are
                return {"error": described(e), "entered": begin, "again": self.try_again()}
        if self.is_victim:
            self.misbehave(self.comm)
            if i.kind in ("leave", "calls"):
                return {"entered": begin}
        return self.call_until_error(begin)

    def misbehave(self, comm: jaxring.Communicator) -> None:
        i = self.injection
        act: Callable[[], Any] = lambda: None  # noqa: E731
        if i.kind in (*DEATHS, "stop"):
            act = lambda: die(i.kind)  # noqa: E731
        elif i.kind == "abort":
            act = lambda: comm.abort(f"injection {i.number}")  # noqa: E731
        elif i.kind == "elsewhere":
            self.call() if i.moment == "during" else None
            act = lambda: time.sleep(i.deadline_s + 2)  # noqa: E731
        elif i.kind == "calls":
            act = comm.close
        elif i.kind == "leave":
            with contextlib.suppress(ZeroDivisionError), comm:
                raise ZeroDivisionError(f"injection {i.number}")
        elif i.kind in MISMATCHES:
            self.call, self.strange = self.strange, self.call
        if i.moment == "during" and i.kind != "elsewhere":
            threading.Timer(i.delay_s, act).start()
        else:
            act()

    def call_until_error(self, begin: float) -> dict[str, Any]:
        i = self.injection
        end = begin + i.deadline_s + 20
        entered = begin
        while time.monotonic() < end:
            entered = begin if i.moment == "during" else time.monotonic()
            try:
                ys = [self.call() for _ in range(i.launches if i.moment == "during" else 1)]
                jax.block_until_ready(ys)
                if i.kind == "order":
                    self.strange().block_until_ready()
            except Exception as e:
                return {"error": described(e), "entered": entered, "again": self.try_again()}
        return {"entered": entered}

    def try_again(self) -> str:
        """What a broken communicator says."""
        try:
            self.call().block_until_ready()
        except Exception as e:
            return str(jaxring.errors.from_exception(e))
        return ""

    def recover(self, rank: int, world_size: int, coordinator: str) -> dict[str, Any]:
        """A new communicator among those that live, in the same processes."""
        if self.comm is not None:
            self.comm.close()
        jaxring.config.update("timeout_s", LONG_S)
        with jaxring.init(rank, world_size, coordinator) as comm:
            for size in (5, 50_000):
                x = (np.arange(size) % 50).astype(np.float32)
                total = jax.jit(lambda x: jaxring.allreduce(x, comm))(x + rank)
                ranks = world_size * (world_size - 1) // 2
                np.testing.assert_array_equal(total, x * world_size + ranks)
        return {"right": True}


def levels(cycles: int) -> dict[str, Any]:
    """What must not grow from injection to injection."""
    if cycles % 5 == 0:  # what JAX keeps for each new function; making it again costs time
        jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that malloc keeps is no leak
    with open("/proc/self/maps") as f:
        segments = sum("memfd:jaxring" in line for line in f)
    with open("/proc/self/statm") as f:
        rss_mib = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    servers = len(bootstrap._servers)  # at most one: of the last world that this process led
    threads = len(os.listdir("/proc/self/task")) - servers
    fds = len(os.listdir("/proc/self/fd")) - servers
    return {"segments": segments, "rss_mib": rss_mib, "threads": threads, "fds": fds}


def main() -> None:
    role: Rank | None = None
    cycles = 0
    jnp.ones(3).block_until_ready()
    answer({"event": "hello"})
    for line in sys.stdin:
        command = json.loads(line)
        reply: dict[str, Any] = {}
        try:
            match command["do"]:
                case "prepare":
                    injection = Injection(**command["injection"])
                    role = Rank(
                        injection, command["rank"], command["coordinator"], command["secret"]
                    )
                    reply = role.prepare()
                case "go":
                    assert role is not None
                    reply = role.go()
                case "recover":
                    assert role is not None
                    reply = role.recover(
                        command["rank"], command["world_size"], command["coordinator"]
                    )
                    role = None
                    cycles += 1
                    reply.update(levels(cycles))
        except Exception:
            reply = {"crash": traceback.format_exc()}
        answer({"event": "done", **reply})


if __name__ == "__main__":
    main()
