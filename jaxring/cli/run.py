"""`jaxring run`: starts a script on several processes of this host, or this host's share of
them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxring import bootstrap, errors, launcher
from jaxring._src.interfaces import refuse_loopback
from jaxring._src.store import StoreServer, TcpStore, format_address, parse_address
from jaxring._src.store_server import GONE_KEY
from jaxring.cli import files, programs, shown
from jaxring.config import config

HELP = """Start a Python program on several processes, each with its own rank.

Each line of output carries its rank. When a rank fails, the others are ended, and the first
failing rank's traceback and exit code come last. Ctrl-C ends all.

Examples:

  jaxring run -n 4 train.py --epochs 3

  jaxring run -n 4 -m mypackage.train --epochs 3

  jaxring run -n 4 python train.py             (or another program, as with mpirun)

  jaxring run -n 4 --restarts 3 train.py       (elastic: see jaxring.elastic)

  jaxring run -n 4 --json ended.json train.py  (exit code, signal and seconds of each rank)

  jaxring run -n 4 --distributed train.py      (jax.distributed.initialize() is called first)

  JAXRING_SECRET=… jaxring run --hosts 2 --host-rank 0 --coordinator h0:5000 --per-host 4 train.py

Exit codes: 0; that of the first rank that failed by itself; 128 + n if signal n ended it, or this
command; 2 if nothing was started.
"""


class RunCommand(shown.Command):
    """Leaves everything after the script, or after -m MODULE, to the program, as `python` does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Arguments have no is_flag. (No `import click`: recent typer brings its own copy.)
        options = [p for p in self.params if not getattr(p, "is_flag", True)]
        takes_value = {name for option in options for name in option.opts}
        i = 0
        while i < len(args) and args[i].startswith("-") and args[i] != "--":
            i += 2 if args[i] in takes_value else 1
            if args[i - 2 : i - 1] in (["-m"], ["--module"]):
                break
        if i > len(args):  # the last option lacks its value
            return super().parse_args(ctx, args)
        return super().parse_args(ctx, [*args[:i], "--", *args[i + (args[i : i + 1] == ["--"]) :]])


def run(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]", show_default=False, help="What to run, and its own arguments."
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", "--module", help="Run a module instead of a script.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="Number of processes, in total.")
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts; run this command on each.")] = 1,
    host_rank: Annotated[
        int | None, typer.Option(help="Which of the hosts this is, from 0.")
    ] = None,
    per_host: Annotated[int | None, typer.Option(help="Processes on each host.")] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(help="host:port of host 0 where ranks meet.", show_default="free port here"),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            help="Elastic: on this host start failed processes again, this often in all; the "
            "others go on meanwhile.",
            show_default="the job ends when a rank fails",
        ),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="Call jax.distributed.initialize() in each process."),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write how each process ended to this file."),
    ] = None,
) -> None:
    if restarts is not None and (restarts < 0 or distributed):
        raise errors.UsageError(
            "run: expected --restarts >= 0, without --distributed, as jax.distributed ends all "
            f"processes when one has died; got --restarts {restarts}"
        )
    if json_file is not None:
        files.require_writable("run: --json", json_file)
    argv = programs.command(module, program or [], distributed)
    here, world_size = _sizes(ranks, hosts, host_rank, per_host)
    secret = os.environ.get("JAXRING_SECRET")
    if hosts > 1 and (secret is None or coordinator is None):
        raise errors.UsageError(
            "run: several hosts need --coordinator host:port and, so that no stranger can join, "
            "the same random JAXRING_SECRET in the environment on each host"
        )
    if hosts > 1 and coordinator is not None:
        refuse_loopback(coordinator, "run")
    secret = secret or secrets.token_hex(16)
    server = None
    if not host_rank:
        server = _serve(coordinator, secret)
        coordinator = coordinator or format_address(*server.address)
    first = (host_rank or 0) * here
    base = {
        **os.environ,
        "JAXRING_WORLD_SIZE": str(world_size),
        "JAXRING_LOCAL_WORLD_SIZE": str(here),
        "JAXRING_COORDINATOR": str(coordinator),
        "JAXRING_SECRET": secret,
        "JAXRING_SERVED": "1",
    }
    base.setdefault("PYTHONUNBUFFERED", "1")  # lines shall come when they are printed
    commands = [
        launcher.Command(
            first + i,
            argv,
            {**base, "JAXRING_RANK": str(first + i), "JAXRING_LOCAL_RANK": str(i)},
        )
        for i in range(here)
    ]
    store = TcpStore(parse_address(str(coordinator)), secret)

    def tell_gone(count: int) -> None:
        with contextlib.suppress(errors.Error):  # host 0 has gone, and the ranks will say so
            store.set(f"{GONE_KEY}{host_rank or 0}", str(count))

    def tell_left(rank: int, pid: int) -> None:
        with contextlib.suppress(errors.Error):
            bootstrap.tell_left(store, rank, pid)

    begin = time.monotonic()
    try:
        outcome = launcher.launch(
            commands,
            _print,
            stopped_s=config.timeout_s,
            restarts=restarts,
            on_gone=tell_gone,
            on_left=tell_left,
        )
    finally:
        if server is not None:
            server.close()
    if json_file is not None:
        document = summary(outcome, world_size, time.monotonic() - begin)
        json_file.write_text(json.dumps(document, indent=1) + "\n")
    _conclude(outcome)
    raise typer.Exit(outcome.exit_code)


run.__doc__ = HELP


def _sizes(
    ranks: int | None, hosts: int, host_rank: int | None, per_host: int | None
) -> tuple[int, int]:
    """(processes here, processes in total)"""
    if hosts < 1 or (hosts > 1 and host_rank is None) or not 0 <= (host_rank or 0) < hosts:
        raise errors.UsageError(
            "run: expected --hosts >= 1 and 0 <= --host-rank < --hosts, got "
            f"--hosts {hosts} and --host-rank {host_rank}"
        )
    if ranks is None and per_host is None:
        raise errors.UsageError("run: say how many processes to start, for example -n 4")
    for name, value in (("-n", ranks), ("--per-host", per_host)):
        if value is not None and value < 1:
            raise errors.UsageError(f"run: expected {name} >= 1, got {value}")
    here = per_host if per_host is not None else (ranks or 0) // hosts
    if ranks is not None and here * hosts != ranks:
        raise errors.UsageError(
            f"run: -n is the total, so expected -n {hosts * max(here, 1)} for {hosts} hosts with "
            f"{max(here, 1)} processes each, got -n {ranks}"
        )
    return here, here * hosts


def _serve(coordinator: str | None, secret: str) -> StoreServer:
    host, port = parse_address(coordinator) if coordinator else ("127.0.0.1", 0)
    try:
        return StoreServer(host, port, secret)
    except OSError as e:
        raise errors.UsageError(
            f"run: cannot listen on {format_address(host, port)} "
            f"({os.strerror(e.errno or 0)}); give an address of host 0 and a free port"
        ) from None


def _print(rank: int, name: str, line: bytes) -> None:
    stream: Any = sys.stdout if name == "stdout" else sys.stderr
    try:
        stream.buffer.write(b"[%d] %s\n" % (rank, line))
        stream.buffer.flush()
    except BrokenPipeError:
        # What is left in the buffer would fail again at the interpreter's end: exit code 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise


def summary(outcome: launcher.Outcome, world_size: int, seconds: float) -> dict[str, Any]:
    """What --json writes; `ranks` are the processes of this host."""
    failure, stopped = outcome.failure, {pid for _, pid in outcome.stopped}
    cause = None
    if failure is not None:
        cause = {"rank": failure.rank, "pid": failure.pid, "how": failure.how}
        cause["last_lines"] = list(failure.last_lines)
    return {
        "exit_code": outcome.exit_code,
        "signal": None if outcome.signal is None else signal.Signals(outcome.signal).name,
        "cause": cause,
        "world_size": world_size,
        "seconds": round(seconds, 3),
        "ranks": [{**end.row(), "stopped": end.pid in stopped} for end in outcome.ends],
    }


def _conclude(outcome: launcher.Outcome) -> None:
    """Says how it ended, where it did not end well."""
    if outcome.signal is not None:
        print(f"jaxring run: ended by {signal.Signals(outcome.signal).name}", file=sys.stderr)
    elif (failure := outcome.failure) is not None:
        who = f"rank {failure.rank} (pid {failure.pid}) {failure.how}"
        end = "; its last words:" if failure.last_lines else "."
        print(f"\njaxring run: {who}{end}", *failure.last_lines, sep="\n", file=sys.stderr)
    for rank, pid in outcome.stopped:
        print(
            f"jaxring run: rank {rank} (pid {pid}) was stopped (SIGSTOP) when the others were "
            "ended: look there first",
            file=sys.stderr,
        )
