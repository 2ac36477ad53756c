"""The world that this process belongs to: the processes that `init` joins, or those of an epoch of
elastic training."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxring import bootstrap, errors
from jaxring._src import joining, rendezvous, timeline_writer
from jaxring.communicator import Communicator
from jaxring.config import Config, config

_world: Communicator | None = None
_lock = threading.RLock()
_unfinished: tuple[bootstrap.Placement, Communicator] | None = None  # init may be called again
_worlds_begun = 0  # by this process; the highest of all ranks names a new world
_reformed: dict[str, Communicator] = {}  # by key; each is formed anew for every epoch


def init(
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: str | None = None,
    timeout_s: float | None = None,
) -> Communicator:
    """Joins this process's world, or returns the one that it has joined.

    Without arguments, rank and world size come from `jaxring run`, an initialised
    `jax.distributed`, Slurm, Open MPI or PMI, in this order; with none of them it is a world of
    one.

    Args:
      rank, world_size: this process's place; they go together.
      coordinator: "host:port" at which rank 0 listens and the others look; needed with world_size >
        1.
      timeout_s: how long to wait for the other ranks, in seconds; by default the setting
        `timeout_s`.

    Raises:
      UsageError: the place is incomplete, taken, or on another host.
      TimeoutError: ranks have not come in time; `missing_ranks` names them. Calling init again goes
        on waiting.
      PeerError: the process of another rank ended while ranks were joining; `rank` names it.
    """
    if timeout_s is None:
        timeout_s = config.timeout_s
    else:
        timeout_s = Config.timeout_s.validate(timeout_s, "init: timeout_s")
    with _lock:
        if _world is not None:
            if (rank, world_size) not in ((None, None), (_world.rank, _world.world_size)):
                raise errors.UsageError(
                    f"init: this process is rank {_world.rank} of {_world.world_size} already; "
                    f"close() that world before it becomes rank {rank} of {world_size}"
                )
            return _world
        placement = bootstrap.discover(rank, world_size, coordinator)
        world = _join_world(placement, timeout_s)
        rendezvous.remove_all()
        return world


def _join_world(placement: bootstrap.Placement, timeout_s: float) -> Communicator:
    """Under _lock."""
    global _worlds_begun, _unfinished
    deadline = time.monotonic() + timeout_s
    if _unfinished is not None and _unfinished[0] != placement:
        _unfinished[1].close()
    me, members, store = placement.rank, range(placement.world_size), None
    table: dict[int, dict[str, Any]] = {me: {**bootstrap.host_identity(), "worlds": _worlds_begun}}
    if placement.world_size > 1:
        store = bootstrap.connect(placement, timeout_s)
    with bootstrap.world_group(store, me) as group, joining.present(store, group, me):
        if store is not None:
            left_s = max(0.001, deadline - time.monotonic())
            table = bootstrap.exchange(store, group, members, me, table[me], left_s)
        before = max(int(row.get("worlds", 0)) for row in table.values())
        key = "world" if before == 0 else f"world#{before + 1}"
        rows = {n: table[n] for n in members}
        world = Communicator(key, rows, me, store)
        _unfinished = placement, world
        left_s = max(0.001, deadline - time.monotonic())
        world._join(left_s, group)
    _keep(world)
    _worlds_begun, _unfinished = before + 1, None
    timeline_writer.rank_in_world = me
    return world


def reform(
    key: str,
    rows: Mapping[int, Mapping[str, Any]],
    me: int,
    store: bootstrap.KeyValueStore | None,
    group: str,
) -> Communicator:
    """The communicator `key` with other ranks than before, once they have joined: the same object,
    so that what is compiled for it stays. Internal: for jaxring/_src/elastic_run.py.

    Args:
      rows: bootstrap.host_identity by rank, of which `me` is this process's.
      group: in which they are present in the store; another one for each epoch.
    """
    comm = _reformed.get(key)
    if comm is None:
        comm = _reformed[key] = Communicator(key, rows, me, store)
    comm._set_members(rows, me, store, f"@{group}")
    try:
        comm._join(config.timeout_s, group)
    except BaseException:
        comm.close()
        raise
    with _lock:
        if _world is None:
            _keep(comm)  # what init() gives in helpers of the training
    return comm


def current() -> Communicator | None:
    """What init() gives to those that call it again."""
    return _world


def _keep(comm: Communicator) -> None:
    """Makes it this process's world until it is closed; under _lock."""
    global _world
    _world = comm
    comm._when_closed = _forget


def _forget(comm: Communicator) -> None:
    global _world
    with _lock:
        if _world is comm:
            _world = None
