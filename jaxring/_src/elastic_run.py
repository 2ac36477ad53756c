"""The life of a process in an elastic training: it meets the others, takes over the common state,
trains until all are done or a rank is lost or won, and meets the others again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxring import bootstrap, errors
from jaxring._src import joining
from jaxring._src.allreduce import allreduce
from jaxring._src.elastic_seat import Epoch, LonelySeat, Seat, StoreSeat
from jaxring._src.elastic_state import Standing, State
from jaxring._src.elastic_sync import synchronise
from jaxring._src.store import TcpStore
from jaxring._src.world import reform
from jaxring.communicator import Communicator
from jaxring.config import config

KEY = "elastic"  # of the communicator, in every epoch, so that what is compiled for it stays
ATTEMPTS = 3  # without a commit or another member in between

_logger = logging.getLogger("jaxring")
_running = threading.Lock()
_runs = itertools.count(1)


class Regroup(BaseException):
    """A commit has found that others wait to take part. No Exception, so that a program's own
    handlers of errors let it pass, as they do a KeyboardInterrupt."""


def run(train: Callable[..., Any], state: State, min_ranks: int, timeout_s: float | None) -> Any:
    """Runs `train(state, comm)` until all ranks of an epoch have returned from it."""
    if not _running.acquire(blocking=False):
        raise errors.UsageError(
            "elastic.run: a process takes part in one elastic training at a time"
        )
    try:
        timeout_s = config.timeout_s if timeout_s is None else timeout_s
        name = f"elastic/{next(_runs)}"
        seat, store = _take_seat(name, timeout_s)
        return World(name, train, state, min_ranks, timeout_s, seat, store).run()
    finally:
        _running.release()


def _take_seat(name: str, timeout_s: float) -> tuple[Seat, TcpStore | None]:
    if jax.distributed.is_initialized():
        raise errors.UsageError(
            "elastic.run: under jax.distributed a world can't lose a process, as JAX ends the "
            "others; start the ranks by `jaxring run` without --distributed"
        )
    placement = bootstrap.discover()
    if placement.world_size == 1 and not placement.served:
        return LonelySeat(), None
    store = bootstrap.connect(placement, timeout_s)
    assert isinstance(store, TcpStore)
    # Those that come to no collective for so long are lost anyway. A little less than what this
    # process waits: when some do not come, the others shall go on rather than give up.
    wait_s = 0.9 * min(config.timeout_s, timeout_s)
    return StoreSeat(store, name, placement.rank, placement.world_size, wait_s), store


class World:
    """This process's part in one elastic training."""

    def __init__(
        self,
        name: str,
        train: Callable[..., Any],
        state: State,
        min_ranks: int,
        timeout_s: float,
        seat: Seat,
        store: TcpStore | None,
    ):
        self._name, self._train, self._state = name, train, state
        self._min_ranks, self._timeout_s = min_ranks, timeout_s
        self._seat, self._store = seat, store
        self._comm: Communicator | None = None  # while it is joined
        self._progress: Any = None  # what an attempt has to change, or they are counted
        self._attempts = 0

    def run(self) -> Any:
        """See `run`."""
        finished = False
        try:
            value = self._until_finished()
            finished = True
            return value
        except BaseException as e:
            # The others may be waiting for this rank, which won't come any more.
            self._part(f"left with {errors.said(e)}")
            raise
        finally:
            self._seat.leave(finished)
            self._part(None)
            self._state._attach(None)

    def _until_finished(self) -> Any:
        suspects: list[str] = []
        returned: list[Any] = []  # what train has, once it has
        while (epoch := self._meet(suspects)) is not None:
            suspects, returned, reason = [], [], None
            try:
                comm = self._join(epoch)
                returned.append(self._train(self._state, comm))
                _agree(comm, True, 0, False)
                return returned[0]
            except Regroup:
                pass
            except Exception as e:
                error = errors.from_exception(e)
                if not self._can_go_on(error, epoch):
                    if isinstance(error, errors.MismatchError):
                        e.add_note(_UNEVEN)
                    raise
                suspects = self._suspects(error, epoch)
                reason = f"forms the world anew after {type(error).__name__}: {error}"
                _logger.warning("elastic: %s; forming the world anew", error)
            self._part(reason)
        # Another rank of this epoch has seen that all have returned, so train has here too.
        return returned[0]

    def _meet(self, suspects: list[str]) -> Epoch | None:
        standing = dataclasses.asdict(self._state._standing())
        row = {"who": bootstrap.host_identity(), "standing": standing}
        return self._seat.form(row, suspects, self._min_ranks, self._timeout_s)

    def _join(self, epoch: Epoch) -> Communicator:
        """The communicator of this epoch, once all its ranks have the same state."""
        rows = {rank: member.row["who"] for rank, member in enumerate(epoch.members)}
        standings = [Standing(**member.row["standing"]) for member in epoch.members]
        group = f"{self._name}/{epoch.number}"
        try:
            with joining.present(self._store, group, epoch.rank):
                comm = reform(KEY, rows, epoch.rank, self._store, group)
        except errors.UsageError as e:
            # As when this process was frozen, and the others' memory has gone meanwhile.
            raise errors.AbortedError(f"epoch {epoch.number} can't be joined: {e}") from e
        self._comm = comm
        synchronise(self._state, comm, standings, epoch.number)
        self._state._attach(functools.partial(self._commit, comm))
        _logger.info("elastic: epoch %d: %r", epoch.number, comm)
        return comm

    def _commit(self, comm: Communicator, number: int) -> None:
        """The second phase: all ranks have copies for this commit."""
        newcomers = _agree(comm, False, number, self._seat.newcomers())
        self._state._keep(number)
        if newcomers:
            raise Regroup

    def _can_go_on(self, error: BaseException, epoch: Epoch) -> bool:
        """Whether the world without the lost ranks may do better; not over and over again."""
        if not isinstance(error, _OF_RANKS):
            return False
        progress = {member.name for member in epoch.members}, self._state.commits
        self._attempts = self._attempts + 1 if progress == self._progress else 1
        self._progress = progress
        return self._attempts < ATTEMPTS

    def _suspects(self, error: BaseException, epoch: Epoch) -> list[str]:
        """Those members of the epoch that did not come or are said to have died."""
        if self._comm is not None:
            # The error may be that of a communicator split from it, which counts ranks otherwise.
            error = errors.parse(self._comm.state()) or errors.AbortedError()
        if not isinstance(error, errors.PeerError | errors.TimeoutError):
            return []
        ranks = {*(error.missing_ranks or ()), *([] if error.rank is None else [error.rank])}
        return [epoch.members[rank].name for rank in ranks if rank < len(epoch.members)]

    def _part(self, reason: str | None) -> None:
        """Leaves the communicator; with a reason its other ranks raise it."""
        comm, self._comm = self._comm, None
        if comm is None:
            return
        if reason is not None:
            _abort(comm, f"rank {comm.rank} {reason}")
        _drain()
        comm.close()


_UNEVEN = (
    "elastic.run: if ranks have different numbers of batches, let jaxring.elastic.join give them"
)
_OF_RANKS = (errors.PeerError, errors.TimeoutError, errors.AbortedError)


def _abort(comm: Communicator, reason: str) -> None:
    with contextlib.suppress(errors.Error):
        comm.abort(reason)
    for child in list(comm._children):  # else what waits in one of them would be waited for
        _abort(child, reason)


def _drain() -> None:
    """Waits for what has been launched: the next epoch's communicator has the same name, and a
    launch of this one that begins late would take part there."""
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):  # of an operation that has failed; or it is deleted
            array.block_until_ready()


def _agree(comm: Communicator, finishing: bool, number: int, newcomers: bool) -> bool:
    """Waits until all ranks have said that they have prepared commit `number`, or have finished.

    Returns whether any of them has seen newcomers."""
    told = np.array([finishing, -finishing, number, -number, newcomers], np.int32)
    try:
        most = np.asarray(_largest(comm, told)).tolist()
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        raise errors.from_exception(e) from e
    if most[0] != -most[1] or most[2] != -most[3]:
        here = "has returned from train" if finishing else f"makes commit {number}"
        there = "have returned" if most[0] and not finishing else f"make commit {most[2]}"
        raise errors.MismatchError(
            f"elastic.run: rank {comm.rank} {here} while others {there}; commit, and return from "
            "train, after the same steps on every rank"
        )
    return bool(most[4])


@functools.partial(jax.jit, static_argnums=0)
def _largest(comm: Communicator, numbers: jax.Array) -> jax.Array:
    return allreduce(numbers, comm, "max", name="elastic agreement")
