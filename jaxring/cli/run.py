"""`jaxring run`: starts a script on several processes of this host, or this host's share of
them."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from jaxring import errors, launcher
from jaxring._src.store import StoreServer, format_address, parse_address

HELP = """Start a Python program on several processes, each with its own rank.

Each line of output carries its rank. When a rank fails, the others are ended, and the first
failing rank's traceback and exit code come last. Ctrl-C ends all.

Examples:

  jaxring run -n 4 train.py --epochs 3

  jaxring run -n 4 -m mypackage.train --epochs 3

  jaxring run -n 4 --distributed train.py      (jax.distributed.initialize() is called first)

  JAXRING_SECRET=… jaxring run --hosts 2 --host-rank 0 --coordinator h0:5000 --per-host 4 train.py
"""


class RunCommand(TyperCommand):
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
        return super().parse_args(ctx, [*args[:i], "--", *args[i + (args[i : i + 1] == ["--"]) :]])


def run(
    program: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT [ARGS]…", show_default=False)
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
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="Call jax.distributed.initialize() in each process."),
    ] = False,
) -> None:
    arguments = _program(module, program or [], distributed)
    here, world_size = _sizes(ranks, hosts, host_rank, per_host)
    secret = os.environ.get("JAXRING_SECRET")
    if hosts > 1 and (secret is None or coordinator is None):
        raise errors.UsageError(
            "run: several hosts need --coordinator host:port and, so that no stranger can join, "
            "the same random JAXRING_SECRET in the environment on each host"
        )
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
            [sys.executable, *arguments],
            {**base, "JAXRING_RANK": str(first + i), "JAXRING_LOCAL_RANK": str(i)},
        )
        for i in range(here)
    ]
    try:
        outcome = launcher.launch(commands, _print)
    finally:
        if server is not None:
            server.close()
    raise typer.Exit(_conclude(outcome))


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


def _program(module: str | None, program: list[str], distributed: bool) -> list[str]:
    """What follows `python` on the children's command line."""
    if module is not None:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            raise errors.UsageError(f"run: no module named {module!r}; is it installed, or here?")
        arguments = ["-m", module, *program]
    elif not program:
        raise errors.UsageError("run: no script given; for example: jaxring run -n 4 train.py")
    elif not os.path.exists(program[0]):
        raise errors.UsageError(f"run: no script {program[0]!r} in {os.getcwd()}")
    else:
        arguments = program
    # -P: jaxring itself must not be looked for in the current folder, which may be a source tree.
    child = ["-P", "-m", "jaxring.cli.distributed_child"]
    return [*child, *arguments] if distributed else arguments


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
    stream.buffer.write(b"[%d] %s\n" % (rank, line))
    stream.buffer.flush()


def _conclude(outcome: launcher.Outcome) -> int:
    """Says how it ended and gives the exit code."""
    if outcome.signal is not None:
        print(f"jaxring run: ended by {signal.Signals(outcome.signal).name}", file=sys.stderr)
        return 128 + outcome.signal
    if outcome.failure is None:
        return 0
    failure = outcome.failure
    print(
        f"\njaxring run: rank {failure.rank} (pid {failure.pid}) {failure.how}",
        end="",
        file=sys.stderr,
    )
    print("; its last words:" if failure.last_lines else ".", file=sys.stderr)
    for line in failure.last_lines:
        print(line, file=sys.stderr)
    return failure.exit_code
