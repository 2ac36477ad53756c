"""Meeting on one host without a shared secret in the environment: a file that only this user can
read.

Slurm and MPI give each rank its number but no secret and no free port; `init(coordinator=…)` gives
a port but no secret. Rank 0 then writes address and secret into a file of mode 0600 in a folder of
mode 0700, whose name all ranks can work out, and the others wait for it. Leftovers of a killed job
lead to a closed port or fail the HMAC challenge, and are simply read again until rank 0 has
replaced them."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError

from jaxring import errors
from jaxring._src.store import TcpStore

WRONG_SECRET = "the secrets differ: JAXRING_SECRET must be the same on every rank"

Address = tuple[str, int]
_written: set[str] = set()


def _folder() -> str:
    path = os.path.join(tempfile.gettempdir(), f"jaxring-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise errors.UsageError(
            f"{path}: expected a folder that only user {os.getuid()} can enter; remove it, or set "
            "TMPDIR or JAXRING_SECRET"
        )
    return path


def _path(name: str) -> str:
    return os.path.join(_folder(), hashlib.sha256(name.encode()).hexdigest()[:32] + ".json")


def write(name: str, address: Address, secret: str) -> None:
    """Rank 0: publishes where it listens; removed again by `remove` or when the process ends."""
    path = _path(name)
    _remove_leftovers(os.path.dirname(path))
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path))  # mode 0600
    with os.fdopen(handle, "w") as f:
        who = {"pid": os.getpid(), "pids_of": _pid_space()}
        json.dump({"address": address, "secret": secret, **who}, f)
    os.replace(temporary, path)
    if not _written:
        atexit.register(remove_all)
    _written.add(path)


def _pid_space() -> str:
    """Names the host (since its start) or container whose process numbers these are."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{f.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"


def _remove_leftovers(folder: str) -> None:
    """Removes the files of jobs whose rank 0 was killed."""
    for entry in os.scandir(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(entry.path) as f:
                found = json.load(f)
            gone = not os.path.exists(f"/proc/{int(found['pid'])}")
            if gone and found["pids_of"] == _pid_space():
                os.unlink(entry.path)


def remove_all() -> None:
    """Removes what this process has written; called once all ranks have come."""
    while _written:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_written.pop())


def read(name: str) -> tuple[Address, str] | None:
    """Address and secret, or None when there is no (whole) file yet."""
    path = _path(name)
    try:
        with open(path) as f:
            found = json.load(f)
        return (str(found["address"][0]), int(found["address"][1])), str(found["secret"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError, OverflowError):
        return None


def wait_for_server(
    find: Callable[[], tuple[Address, str] | None],
    rank: int,
    coordinator: str | None,
    timeout_s: float,
) -> TcpStore:
    """Polls `find` until a server there answers and knows the same secret."""
    deadline = time.monotonic() + timeout_s
    pause_s, reason = (
        0.01,
        (
            "rank 0 has not published its address on this host; on several hosts set the same "
            "JAXRING_SECRET on each"
        ),
    )
    while True:
        if (found := find()) is not None:
            store = TcpStore(*found)
            try:
                store.ping(min(5.0, max(0.1, deadline - time.monotonic())))
                return store
            except AuthenticationError:
                reason = WRONG_SECRET
            except (OSError, EOFError) as e:
                # The last attempt may have had no time for an answer, but it is the same server.
                if reason != WRONG_SECRET or isinstance(e, ConnectionRefusedError):
                    reason = getattr(e, "strerror", None) or str(e) or type(e).__name__
        if time.monotonic() >= deadline:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.25)
    where = f"the coordinator at {coordinator}" if coordinator else "rank 0"
    raise errors.TimeoutError(
        f"init: rank {rank} could not reach {where} within {timeout_s:g} s ({reason}); start rank "
        "0 or check the address",
        missing_ranks=[0],
        rank=0,
    )
