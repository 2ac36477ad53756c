"""Gathers small objects by the store, for what has to be known before a collective can run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxring import errors
from jaxring._src.store import KeyValueStore

LOOK_S = 0.5  # how often a rank that waits for others looks whether they live


def exchange(
    store: KeyValueStore,
    prefix: str,
    members: Sequence[int],
    me: int,
    mine: Mapping[str, Any],
    timeout_s: float,
    look: Callable[[], None] | None = None,
    known: Mapping[int, Mapping[str, Any]] | None = None,
) -> dict[int, dict[str, Any]]:
    """Gathers one small JSON object from each member; all get the same table, by member.

    Args:
      look: called every LOOK_S meanwhile; may raise.
      known: host_identity of the members, where they have met before.

    Raises:
      TimeoutError: not all came in time; `missing_ranks` names them.
      PeerError: one that was `present` in the group `prefix` has ended.
      UsageError: another process has come as this member.
    """
    deadline = time.monotonic() + timeout_s
    store.set(f"{prefix}/member/{me}", json.dumps(dict(mine)))
    try:
        if me == members[0]:
            rows = {}
            for member in members:
                left_s = max(0.0, deadline - time.monotonic())
                row = _parsed(
                    _get(store, f"{prefix}/member/{member}", left_s, prefix, look), f"rank {member}"
                )
                rows[str(member)] = row
            store.set(f"{prefix}/table", json.dumps(rows))
        else:
            table_text = _get(store, f"{prefix}/table", timeout_s, prefix, look)
            rows = _parsed(table_text, f"rank {members[0]}")
    except TimeoutError:
        raise _missing(store, prefix, members, timeout_s, known or {}) from None
    if sorted(rows) != sorted(map(str, members)) or not all(
        isinstance(row, dict) for row in rows.values()
    ):
        raise errors.UsageError(
            f"init: rank {members[0]} sent a table of {sorted(rows)} instead of ranks"
            f" {list(members)}; do all ranks run the same jaxring?"
        )
    table = {int(m): row for m, row in rows.items()}
    if table[me] != dict(mine):
        raise errors.UsageError(
            f"rank {me} is taken: process {table[me].get('pid')} came as rank {me} before process "
            f"{os.getpid()}; each rank is one process that calls init once"
        )
    return table


def _get(
    store: KeyValueStore, key: str, timeout_s: float, group: str, look: Callable[[], None] | None
) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        wait_s = left_s if look is None else min(LOOK_S, left_s)
        try:
            return store.get(key, wait_s, group)
        except TimeoutError:
            if look is None or left_s <= LOOK_S:
                raise
        look()


def _parsed(text: str, sender: str) -> dict[str, Any]:
    """The JSON object that another process wrote; UsageError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise errors.UsageError(
            f"init: {sender} sent {text[:40]!r} instead of a JSON object; do all ranks run the same"
            " jaxring?"
        )
    return value


def _missing(
    store: KeyValueStore,
    prefix: str,
    members: Sequence[int],
    timeout_s: float,
    known: Mapping[int, Mapping[str, Any]],
) -> errors.TimeoutError:
    told: dict[int, Mapping[str, Any]] = {}
    for member in members:
        with contextlib.suppress(TimeoutError):
            told[member] = _parsed(store.get(f"{prefix}/member/{member}", 0.0), f"rank {member}")
    ranks = [rank for rank, member in enumerate(members) if member not in told] or [0]
    first = members[ranks[0]]
    who = known.get(first) or told.get(first, {})
    said = (
        "rank 0 did not answer"
        if first in told
        else f"ranks {ranks} of {len(members)} have not come"
    )
    places = [
        f"rank {rank} is pid {row['pid']} on {row['host']}; "
        for rank in ranks
        if (row := known.get(members[rank]))
    ]
    call, where = ("init", "jaxring.init()") if prefix.startswith("init/") else ("split", "split")
    return errors.TimeoutError(
        f"{call}: {said} within {timeout_s:.3g} s; {''.join(places)}check that they run and reach "
        f"{where}, or raise timeout_s",
        missing_ranks=ranks,
        rank=ranks[0],
        host=who.get("host"),
        pid=who.get("pid"),
    )
