"""Makes the GPU side of communicators where XLA does not: older jaxlibs, and Communicators, whose
ranks are processes that XLA knows nothing of.

While a program is lowered each process allocates its ranks' arenas; a background thread takes their
cards (CUDA IPC handles) to the other processes through the store, and everybody's answers back. The
first run waits for that, natively. Nothing is allocated while programs run."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from jaxring import bootstrap, errors

POLL_S = 2.0  # after each of these the state is looked at again
WATCH_S = 0.25  # how soon an abort by another process stops this one's kernels

_begun: dict[str, tuple[Any, ...]] = {}  # by key, what `ensure` was given after it
_epoch = 0  # how often this process has joined those of mesh axes anew
_lock = threading.Lock()


def ensure(
    native: ModuleType,
    key: str,
    processes: Sequence[int],
    devices: Sequence[int],
    me: int,
    store: bootstrap.KeyValueStore | None,
    state: Callable[[], str] | None = None,
) -> None:
    """Makes the communicator `key` if this process has a rank in it; never blocks for others.

    Args:
      processes: by rank, the number of its process.
      devices: by rank, the GPU's number in its process.
      store: that of the processes; None where there is only one.
      state: of the same communicator's CPU side, where it has one: an abort in another process is
        seen there.

    Raises:
      UsageError: CUDA's allocation failed, or (in one process) GPUs cannot reach each other.
    """
    if me not in processes:
        return
    with _lock:
        if key in _begun and native.state(key) != "missing":
            return
        given = _begun[key] = processes, devices, me, store, state
        epoch = _epoch if key.startswith("mesh:") else 0
    mine = [rank for rank, process in enumerate(processes) if process == me]
    _finish_what_runs(len(mine))
    with errors.typed():
        native.create(key, mine, [devices[rank] for rank in mine], len(processes))
    members = list(dict.fromkeys(processes))
    if len(members) == 1:
        with errors.typed():
            native.decide(key, native.map(key, native.cards(key)))
        return
    assert store is not None
    connecting = _Connecting(native, store, key, given, epoch)
    threading.Thread(target=connecting.run, name="jaxring-cuda-connect", daemon=True).start()


def rejoin(native: ModuleType) -> None:
    """Makes those of mesh axes anew; see jaxring.rejoin."""
    global _epoch
    with _lock:
        _epoch += 1
        begun = {key: given for key, given in _begun.items() if key.startswith("mesh:")}
        for key in begun:
            del _begun[key]
    for key, given in begun.items():
        native.close(key)
        ensure(native, key, *given)


def wait(native: ModuleType, key: str, timeout_s: float) -> str:
    """The state of a communicator that is being made: "ready" or "broken: …"; TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while (state := native.state(key)) == "connecting":
        if time.monotonic() >= deadline:
            raise errors.TimeoutError(
                f"{key}: other processes have not lowered this program within {timeout_s:g} s; see"
                " what they are doing, or raise timeout_s"
            )
        time.sleep(0.01)
    return state


_agreed: dict[str, str | None] = {}


def agree(
    store: bootstrap.KeyValueStore,
    processes: Sequence[int],
    me: int,
    what: str,
    reason: str | None,
    timeout_s: float,
) -> str | None:
    """The first reason that a process gives against `what`; None if none has one. Waits for all."""
    prefix = "jaxring/cuda/agreed/" + hashlib.sha256(what.encode()).hexdigest()[:32]
    if prefix not in _agreed:
        table = bootstrap.exchange(store, prefix, processes, me, {"reason": reason}, timeout_s)
        reasons = [table[process]["reason"] for process in processes]
        _agreed[prefix] = next((text for text in reasons if text), None)
    return _agreed[prefix]


def _finish_what_runs(ranks_here: int) -> None:
    """An allocation may lock several GPUs of a process; one of them could be waiting for a kernel
    that this process has yet to launch on another (jax#11637)."""
    if ranks_here > 1:
        for array in jax.live_arrays():
            with contextlib.suppress(Exception):  # its program has failed; that is told elsewhere
                array.block_until_ready()


class _Connecting:
    """One communicator as its processes join, in a thread that `rejoin` may have overtaken."""

    def __init__(
        self,
        native: ModuleType,
        store: bootstrap.KeyValueStore,
        key: str,
        given: tuple[Any, ...],
        epoch: int,
    ):
        self.native, self.store, self.key, self.given = native, store, key, given
        self.processes, _, self.me, _, self.cpu_state = given
        self.prefix = f"jaxring/cuda/{epoch}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    def run(self) -> None:
        try:
            self.connect()
            self.watch()
        except Exception as e:  # whatever it is, it must reach the calls that wait for it
            error = e if isinstance(e, errors.Error) else errors.parse(str(e))
            kind = type(error).__name__ if error is not None else "PeerError"
            message = error.message if error is not None else f"{self.key} cannot be joined: {e}"
            self.if_current(self.native.fail, kind, message)

    def state(self) -> str:
        return self.if_current(self.native.state) or "missing"

    def if_current(self, act: Callable[..., Any], *args: Any) -> Any:
        """act(key, …), unless `rejoin` has put another communicator in the place of ours."""
        with _lock:
            return act(self.key, *args) if _begun.get(self.key) is self.given else None

    def connect(self) -> None:
        cards = self.gather("cards", lambda: [c.hex() for c in self.native.cards(self.key)])
        if cards is None:
            return
        ours = [bytes.fromhex(card) for card in cards]
        answers = self.gather("mapped", lambda: self.if_current(self.native.map, ours))
        if answers is not None:
            self.if_current(self.native.decide, answers)

    def watch(self) -> None:
        """Learns of an abort in another process, where the communicator has a CPU side."""
        while self.cpu_state is not None and self.state() == "ready":
            now = self.cpu_state()
            if now.startswith("broken: "):
                raise RuntimeError(now.removeprefix("broken: "))
            time.sleep(WATCH_S)

    def gather(self, what: str, produce: Callable[[], Any]) -> list[Any] | None:
        """What `produce` gives for each rank of each process, by rank; None if it was closed
        meanwhile.

        A process that fails says so in the place of its answer, so that all fail alike."""
        row: dict[str, Any]
        try:
            row = {"values": produce()}
        except Exception as e:
            row = {"error": str(e)}
        members = list(dict.fromkeys(self.processes))
        table: Mapping[int, Mapping[str, Any]] | None = None
        while table is None:
            if self.state() != "connecting":
                return None
            with contextlib.suppress(errors.TimeoutError):
                table = bootstrap.exchange(
                    self.store, f"{self.prefix}/{what}", members, self.me, row, POLL_S
                )
        for member, found in table.items():
            if "error" in found:
                text = str(found["error"])
                known = errors.parse(text)
                raise errors.UsageError(f"process {member}: {known.message if known else text}")
        left = {member: iter(found["values"]) for member, found in table.items()}
        return [next(left[process]) for process in self.processes]
