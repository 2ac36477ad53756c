"""Finds the settings with which a training step is fastest, on the machines that it runs on.

tuned = jaxring.tuning.tune_step(step, params, state, batch, output="tuned.json")
with jaxring.config.override(**tuned.settings):  # now
    train(step, params, state, batches)
jaxring.config.load("tuned.json")  # in the next job, on every rank
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxring._src.allreduce import allreduce
from jaxring.communicator import Communicator
from jaxring.config import config
from jaxring.errors import UsageError

__all__ = ["Tuned", "tune_step"]

_M = 1 << 20
# What is this much faster than the settings in force counts: less is noise.
LEAST_GAIN = 1.03


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune_step` has found.

    Attributes:
      settings: names and values of the best ones, `bucket_bytes` and `chunk_bytes`.
      step_s: the median time of a step with them, in seconds, on the slowest rank.
      before_s: with the settings that were in force.
      rows: all that was measured: dicts with bucket_bytes, chunk_bytes and step_s.
    """

    settings: dict[str, int]
    step_s: float
    before_s: float
    rows: list[dict[str, Any]]


def tune_step(
    step: Callable[..., Any],
    *args: Any,
    comm: Communicator | None = None,
    bucket_bytes: Sequence[int] = (1 * _M, 4 * _M, 16 * _M, 32 * _M, 128 * _M),
    chunk_bytes: Sequence[int] = (0, 256 << 10, 1 * _M),
    rounds: int = 5,
    output: str | Path | None = None,
) -> Tuned:
    """Times `step(*args)` with other sizes of buckets and chunks, and says which are best.

    First the sizes of buckets are tried, then with the best one those of chunks. Candidates take
    turns, so that what else the machine does meets all of them alike. Every rank must call it with
    the same arguments of its own; all get the same answer, from the slowest rank's times.

    Args:
      step: a jitted function, or one that calls such; it is compiled once for each candidate.
      args: what it is called with, again and again; if it donates some, each call gets copies.
      comm: the communicator that the step uses, if it uses one; meshes need nothing.
      bucket_bytes, chunk_bytes: the candidates, in bytes, besides the settings in force; 0 as
        chunk_bytes is "by message size".
      rounds: how often each candidate is timed.
      output: a JSON file to write, by rank 0, for `jaxring.config.load`.

    Returns:
      A `Tuned`. The settings in force stay unless another one is at least 3 % faster.

    Raises:
      UsageError (a ValueError): no function, rounds < 1, or a candidate that is no size.

    Example, for a step that takes parameters and a batch:

        tuned = jaxring.tuning.tune_step(step, params, batch, comm=comm, output="tuned.json")
        with jaxring.config.override(**tuned.settings):
            params = step(params, batch)
    """
    if not callable(step):
        raise UsageError(
            f"tune_step: expected a function first, got {step!r}; write tune_step(step, *args)"
        )
    if rounds < 1:
        raise UsageError(f"tune_step: expected rounds >= 1, got {rounds}")
    best = {"bucket_bytes": config.bucket_bytes, "chunk_bytes": config.chunk_bytes}
    first, rows, before_s = best, [], 0.0
    for name, sizes in (("bucket_bytes", bucket_bytes), ("chunk_bytes", chunk_bytes)):
        candidates = [best]
        candidates += [c for s in sizes if (c := {**best, name: int(s)}) != best]
        times_s = _slowest(_median_times_s(step, args, candidates, rounds), comm)
        rows += [{**c, "step_s": t} for c, t in zip(candidates, times_s, strict=True)]
        before_s = before_s or times_s[0]
        fastest = int(np.argmin(times_s))
        if times_s[fastest] * LEAST_GAIN < times_s[0]:
            best = candidates[fastest]
    step_s = min(row["step_s"] for row in rows if _settings_of(row) == best)
    tuned = Tuned(best, step_s if best != first else before_s, before_s, rows)
    if output is not None and (comm.rank if comm else jax.process_index()) == 0:
        Path(output).write_text(json.dumps(dataclasses.asdict(tuned), indent=1) + "\n")
    return tuned


def _settings_of(row: dict[str, Any]) -> dict[str, int]:
    return {name: row[name] for name in ("bucket_bytes", "chunk_bytes")}


def _median_times_s(
    step: Callable[..., Any], args: Any, candidates: list[dict[str, int]], rounds: int
) -> list[float]:
    times_s: list[list[float]] = [[] for _ in candidates]
    donates = True  # until it is seen that it does not: what has been donated is lost
    for round in range(-1, rounds):  # the first one compiles, and is not counted
        for candidate, of_candidate in zip(candidates, times_s, strict=True):
            given = jax.block_until_ready(jax.tree.map(_copy, args)) if donates else args
            with config.override(**candidate):
                start = time.perf_counter()
                jax.block_until_ready(step(*given))
                if round >= 0:
                    of_candidate.append(time.perf_counter() - start)
            donates = donates and any(map(_is_deleted, jax.tree.leaves(given)))
    return [statistics.median(t) for t in times_s]


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _is_deleted(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _slowest(times_s: list[float], comm: Communicator | None) -> list[float]:
    """The largest of all ranks' times: every rank must come to the same decision."""
    own = np.asarray(times_s, np.float32)
    if comm is not None:
        return np.asarray(allreduce(own, comm, "max", name="tune_step")).tolist()
    if jax.process_count() == 1:
        return own.tolist()
    mesh = jax.make_mesh((jax.device_count(),), ("devices",), axis_types=(AxisType.Auto,))
    rows = jax.make_array_from_callback(
        (mesh.size, own.size), NamedSharding(mesh, P("devices")), lambda _: own[None]
    )
    largest = jax.shard_map(
        lambda row: allreduce(row[0], "devices", "max", name="tune_step"),
        mesh=mesh,
        in_specs=P("devices"),
        out_specs=P(),
    )
    return np.asarray(jax.jit(largest)(rows).addressable_data(0)).tolist()
