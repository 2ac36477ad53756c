"""For tests: run a function on several processes that form a world.

    def mean_of_ranks(comm):
        return jaxring.allreduce(jnp.float32(comm.rank), comm, "mean")

    def test_mean():
        assert jaxring.testing.spawn(mean_of_ranks, 2) == [0.5, 0.5]

The pytest fixture `jaxring_spawn` is the same function.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxring import errors, launcher
from jaxring._src import spawned
from jaxring._src.store import StoreServer, format_address

__all__ = ["spawn"]

# Not -m: results are pickled, so their class must not be one of __main__.
_CHILD = "import sys; from jaxring._src.spawned import main; main(sys.argv[1])"


def spawn(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    devices: int = 1,
    distributed: bool = False,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `fn(comm, *args)` on `n` fresh processes, `comm` being their world, and returns the
    results by rank.

    Args:
      fn: a function that a new process can import: of a module, not a lambda or a nested one.
      n: the number of processes.
      args: picklable.
      devices: CPU devices in each process.
      distributed: call `jax.distributed.initialize` first, so that meshes span all processes.
      timeout_s: end all processes, with a dump of their threads, after this many seconds.
      env: environment variables to add.

    Returns:
      What each rank returned, picklable; JAX arrays come as numpy arrays.

    Raises: whatever the first failing rank raised, with a note that names the rank and has its
      traceback; PeerError if a process died otherwise; TimeoutError, with `missing_ranks`, if ranks
      did not return in time.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise errors.UsageError(f"spawn: expected n >= 1 processes, got {n!r}")
    with tempfile.TemporaryDirectory(
        prefix="jaxring-spawn-"
    ) as name:  # mode 0700: it holds pickles
        folder = Path(name)
        spawned.write_task(folder, fn, args, distributed)
        secret = secrets.token_hex(16)
        server = StoreServer("127.0.0.1", 0, secret)
        base = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "XLA_FLAGS": _with_devices(os.environ.get("XLA_FLAGS", ""), devices),
            **(env or {}),
            "JAXRING_WORLD_SIZE": str(n),
            "JAXRING_LOCAL_WORLD_SIZE": str(n),
            "JAXRING_COORDINATOR": format_address(*server.address),
            "JAXRING_SECRET": secret,
            "JAXRING_SERVED": "1",
        }
        argv = [sys.executable, "-X", "faulthandler", "-c", _CHILD, name]
        commands = [
            launcher.Command(
                r, argv, {**base, "JAXRING_RANK": str(r), "JAXRING_LOCAL_RANK": str(r)}
            )
            for r in range(n)
        ]
        try:
            # SIGABRT makes faulthandler say where each thread is.
            outcome = launcher.launch(
                commands, _print, timeout_s=timeout_s, timeout_signal=signal.SIGABRT
            )
        finally:
            server.close()
        return _results(folder, n, outcome, timeout_s)


def _results(folder: Path, n: int, outcome: launcher.Outcome, timeout_s: float) -> list[Any]:
    results = {rank: spawned.read_result(folder, rank) for rank in range(n)}
    if outcome.signal is not None:
        raise KeyboardInterrupt
    if outcome.timed_out:
        missing = [rank for rank in range(n) if results[rank] is None]
        raise errors.TimeoutError(
            f"spawn: ranks {missing} of {n} did not return within {timeout_s:g} s; see the dump "
            "of their threads",
            missing_ranks=missing,
        )
    if (failure := outcome.failure) is not None:
        result = results[failure.rank]
        exception = result.exception if result is not None else None
        if exception is None:
            exception = errors.PeerError(
                f"spawn: rank {failure.rank} of {n} (pid {failure.pid}) {failure.how}",
                rank=failure.rank,
                pid=failure.pid,
            )
        text = "\n".join(failure.last_lines)
        exception.add_note(f"on rank {failure.rank} of {n}:\n{text}")
        raise exception
    return [result.value for result in results.values() if result is not None]


def _with_devices(flags: str, devices: int) -> str:
    name = "--xla_force_host_platform_device_count"
    return f"{re.sub(name + r'=[0-9]+', '', flags)} {name}={devices}".strip()


def _print(rank: int, name: str, line: bytes) -> None:
    stream = sys.stdout if name == "stdout" else sys.stderr
    print(f"[{rank}] {line.decode(errors='replace')}", file=stream)
