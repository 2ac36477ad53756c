"""The parent's side of the soak: processes that live through many injections, and the checks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from soak_plan import DEATHS, FREEZES, MISMATCHES, Injection

from jaxring._src.store_server import StoreServer

SECRET = secrets.token_hex(16)
HERE = os.path.dirname(os.path.abspath(__file__))
START_S, PREPARE_S, RECOVER_S = 120.0, 90.0, 90.0
HANG_S = 25.0  # over the deadline
DEATH_S = 1.0  # the promise; SLACK_S is for a machine that does other things too
SLACK_S = float(os.environ.get("JAXRING_SOAK_SLACK_S", "3"))


class Worker:
    """One process, and the lines that it answers."""

    def __init__(self, log: Any):
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", f"{HERE}/soak_worker.py", str(write)],
            stdin=subprocess.PIPE,
            stderr=log,
            pass_fds=(write,),
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        )
        os.close(write)
        self.read, self.buffer, self.ready, self.cycles = read, b"", False, 0
        self.first: dict[str, Any] | None = None
        self.last: dict[str, Any] = {}
        self.dying_at: float | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write((json.dumps(command) + "\n").encode())
            self.process.stdin.flush()

    def receive(self) -> list[dict[str, Any]]:
        data = os.read(self.read, 1 << 20)
        if not data:
            return [{"event": "ended"}]
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self, number: int = signal.SIGKILL) -> int:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        with contextlib.suppress(OSError):
            os.close(self.read)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        return self.process.wait()


def collect(workers: list[Worker], limit_s: float) -> dict[int, dict[str, Any]]:
    """The answers by position; a process that dies gives "ended", a silent one nothing."""
    end = time.monotonic() + limit_s
    replies: dict[int, dict[str, Any]] = {}
    with selectors.DefaultSelector() as selector:
        for position, worker in enumerate(workers):
            selector.register(worker.read, selectors.EVENT_READ, position)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(max(0.0, end - time.monotonic())):
                worker = workers[key.data]
                for message in worker.receive():
                    if message["event"] == "dying":
                        worker.dying_at = message["at"]
                        if worker.process.poll() is None:
                            continue
                    if message["event"] in ("done", "hello", "ended"):
                        replies[key.data] = message
                        selector.unregister(worker.read)
    return replies


@dataclasses.dataclass
class Outcome:
    injection: Injection
    problems: list[str]
    seconds: float
    latest_s: float = 0.0  # from the death or entry to the last survivor's error


class Pool:
    """As many processes as the injections need; those that die are replaced meanwhile."""

    def __init__(self, most_ranks: int, log: Any):
        self.log, self.most_ranks = log, most_ranks
        self.workers: list[Worker] = []
        self.ended: list[Worker] = []

    def take(self, injection: Injection) -> list[Worker]:
        """The processes that become ranks 0, 1, …; a shuffle of all."""
        while len(self.workers) < self.most_ranks:
            self.workers.append(Worker(self.log))
        chosen = sorted(self.workers, key=lambda worker: not worker.ready)[: injection.world_size]
        new = [worker for worker in chosen if not worker.ready]
        for position, reply in collect(new, START_S).items():
            new[position].ready = reply["event"] == "hello"
        random.Random(injection.number).shuffle(chosen)
        return chosen

    def remove(self, worker: Worker) -> None:
        self.workers.remove(worker)
        self.ended.append(worker)
        worker.end()

    def close(self) -> None:
        for worker in list(self.workers):
            self.remove(worker)


def free_port() -> str:
    """Below those that the kernel gives to connections, one of which may come before rank 0."""
    while True:
        port = random.randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"


def run(pool: Pool, injection: Injection) -> Outcome:
    """Injects one fault and checks everything that is promised about it."""
    begin = time.monotonic()
    ranks = pool.take(injection)
    outcome = Outcome(injection, [], 0.0)
    for worker in ranks:
        worker.dying_at = None
    server = StoreServer("127.0.0.1", 0, SECRET) if injection.served else None
    coordinator = free_port() if server is None else f"127.0.0.1:{server.address[1]}"
    for rank, worker in enumerate(ranks):
        worker.send(
            do="prepare",
            injection=dataclasses.asdict(injection),
            rank=rank,
            coordinator=coordinator,
            secret=SECRET,
        )
    # A frozen process never answers "done".
    replies = collect(ranks, PREPARE_S)
    failed = [r for r in replies.values() if "crash" in r or "error" in r]
    if injection.moment != "init" and not failed:
        for worker in ranks:
            worker.send(do="go")
        watched = [w for r, w in enumerate(ranks) if not stops(injection) or r != injection.victim]
        some = collect(watched, injection.deadline_s + HANG_S)
        replies = {ranks.index(watched[position]): reply for position, reply in some.items()}
    if stops(injection):
        stopped = ranks[injection.victim]
        if stopped.dying_at is None:
            with contextlib.suppress(OSError):
                for message in stopped.receive():
                    stopped.dying_at = message.get("at", stopped.dying_at)
    if server is not None:
        server.close()
    check(injection, ranks, replies, outcome)
    living = [worker for rank, worker in enumerate(ranks) if lives(injection, rank, replies)]
    for worker in ranks:
        if worker not in living:
            pool.remove(worker)
    if not outcome.problems or all(w.process.poll() is None for w in living):
        recover(pool, living, outcome)
    outcome.seconds = time.monotonic() - begin
    return outcome


def stops(injection: Injection) -> bool:
    return injection.kind == "stop"


def lives(injection: Injection, rank: int, replies: dict[int, dict[str, Any]]) -> bool:
    if injection.kills and rank == injection.victim:
        return False
    return replies.get(rank, {"event": "hang"})["event"] == "done"


def recover(pool: Pool, living: list[Worker], outcome: Outcome) -> None:
    coordinator = free_port()
    for rank, worker in enumerate(living):
        worker.send(do="recover", rank=rank, world_size=len(living), coordinator=coordinator)
    replies = collect(living, RECOVER_S)
    for rank, worker in enumerate(living):
        reply = replies.get(rank, {"event": "hang"})
        if not reply.get("right"):
            outcome.problems.append(f"no new communicator: {reply.get('crash', reply['event'])}")
            pool.remove(worker)
            continue
        worker.cycles += 1
        if worker.cycles % 5 == 0:  # when the worker has cleared JAX's caches
            worker.last = reply
            worker.first = worker.first or reply  # what is made once is there by now
        if reply["segments"]:
            outcome.problems.append(f"{reply['segments']} segments are still mapped")


def check(
    injection: Injection,
    ranks: list[Worker],
    replies: dict[int, dict[str, Any]],
    outcome: Outcome,
) -> None:
    victim = ranks[injection.victim]
    for rank, worker in enumerate(ranks):
        reply = replies.get(rank, {"event": "hang"})
        if rank == injection.victim and (injection.kills or not raises(injection)):
            if injection.kind in DEATHS and reply["event"] != "ended":
                outcome.problems.append(f"the victim should have died: {reply}")
            continue
        if reply["event"] != "done" or "crash" in reply:
            why = reply.get("crash", reply["event"])
            code = worker.process.poll()
            outcome.problems.append(f"rank {rank}: {why} (exit code {code})")
            if reply["event"] == "hang":
                worker.process.send_signal(signal.SIGABRT)  # faulthandler tells where
                time.sleep(1)
            continue
        problem = check_reply(injection, victim, reply, outcome, rank)
        if problem:
            outcome.problems.append(f"rank {rank}: {problem}")


def raises(injection: Injection) -> bool:
    """Whether a victim that lives gets an error too."""
    return injection.kind not in ("calls", "leave")


def check_reply(
    injection: Injection, victim: Worker, reply: dict[str, Any], outcome: Outcome, rank: int
) -> str:
    error, expected = reply.get("error"), injection.expected
    if not expected:
        late = reply.get("closed", 0.0) - reply["entered"] > 5
        return f"close: {reply}" if error or late else ""
    if error is None:
        return f"no error, expected {expected}: {reply}"
    gone_server = injection.moment == "init" and injection.victim == 0 and not injection.served
    if error["kind"] not in (*expected, *(("TimeoutError",) if gone_server else ())):
        return f"expected {expected}: {error}"
    if injection.kind in (*DEATHS, *FREEZES):
        named = injection.victim in (error["missing_ranks"] or ()) or (
            error["rank"] == injection.victim
        )
        if not named:
            return f"rank {injection.victim} is not named: {error}"
        known = error["kind"] == "PeerError" or injection.moment != "init"
        ours = error["kind"] == "PeerError" or error["rank"] == injection.victim
        if known and ours and not gone_server and error["pid"] != victim.pid:
            return f"pid {victim.pid} is not named: {error}"
    if injection.kind in MISMATCHES:
        signatures = error["signatures"] or ()
        if len(signatures) < 2 or not all(text in error["text"] for text in signatures):
            return f"the signatures are not named: {error}"
    if injection.kind in ("abort", "leave") and f"injection {injection.number}" not in str(error):
        return f"the reason is not named: {error}"
    if injection.moment != "init" and reply.get("again") != error["text"]:
        return f"the broken communicator says {reply.get('again')!r} after {error['text']!r}"
    begin = max(reply["entered"], victim.dying_at or 0.0)
    took_s = error["at"] - begin
    outcome.latest_s = max(outcome.latest_s, took_s)
    limit_s = DEATH_S if error["kind"] != "TimeoutError" else injection.deadline_s
    if injection.kind == "elsewhere" and rank == injection.victim:
        limit_s += injection.deadline_s + 2
    return f"took {took_s:.2f} s: {error}" if took_s > limit_s + SLACK_S else ""
