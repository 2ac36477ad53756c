"""`jaxring bench --compare`: have we lost against the peer since a run that was saved?

Absolute times of two days differ more than releases do; but the peer took turns with us in the same
processes, so the ratio of both is what two runs have in common.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxring.cli.bench_table import Row
from jaxring.cli.bench_worker import Spec
from jaxring.errors import UsageError

# What has to be alike for ratios to be compared; sizes need not be.
_SAME = ("collective", "dtype", "op", "mode", "processes", "devices", "against", "chain", "outputs")


def read(path: Path, spec: Spec) -> list[Row]:
    """The rows of a file by `jaxring bench --json`.

    Raises: UsageError: it is none, or measures something else than `spec`.
    """
    try:
        document = json.loads(path.read_text())
        old, rows = document["spec"], document["rows"]
        alone = not all(row["ratio"] > 0 and row["size_bytes"] > 0 for row in rows)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UsageError(
            f"bench: --compare: {path} is no file by jaxring bench --against … --json"
            f" ({type(e).__name__}: {e})"
        ) from None
    if spec.against is None or alone:
        raise UsageError("bench: --compare compares ratios to a peer; give both runs --against lax")
    for name in _SAME:
        if (new := asdict(spec)[name]) != old.get(name):
            raise UsageError(
                f"bench: --compare: {path} has {name} {old.get(name)!r}, this run {new!r}; measure"
                " alike"
            )
    return rows


def compare(old: list[Row], new: list[Row], tolerance: float) -> dict[str, Any]:
    """What became of the ratio at each size that both have.

    Args:
      tolerance: a size has lost if its ratio is lower by more than this factor.

    Returns: Keys "sizes" (size_bytes, before, now, change, counts, lost), "change" (the geometric
      mean of those that count, or None) and "lost" (whether any size has, or all together by more
      than the square root of the factor). Rounds in a virtual machine's slow mode don't count.
    """
    before = {row["size_bytes"]: row for row in old}
    pairs = [(before[row["size_bytes"]], row) for row in new if row["size_bytes"] in before]
    if not pairs:
        known = ", ".join(str(size) for size in before)
        raise UsageError(f"bench: --compare: no size is in both runs; the saved one has {known}")
    sizes = []
    for then, now in pairs:
        change = now["ratio"] / then["ratio"]
        counts = not (then.get("slow_rounds") or now.get("slow_rounds"))
        sizes.append(
            {
                "size_bytes": now["size_bytes"],
                "before": then["ratio"],
                "now": now["ratio"],
                "change": change,
                "counts": counts,
                "lost": counts and change < 1 / tolerance,
            }
        )
    changes = [one["change"] for one in sizes if one["counts"]]
    mean = math.exp(sum(map(math.log, changes)) / len(changes)) if changes else None
    # Noise of single sizes averages out, so the mean may move less.
    lost = mean is not None and mean < 1 / math.sqrt(tolerance)
    return {"sizes": sizes, "change": mean, "lost": lost or any(one["lost"] for one in sizes)}


def text(result: dict[str, Any], path: Path) -> str:
    """For the terminal: a line for each size, and the verdict."""
    lines = [f"# the peer's time over ours, {path.name} -> now"]
    for one in result["sizes"]:
        mark = "  LOST" if one["lost"] else "" if one["counts"] else "  (slow mode: does not count)"
        lines.append(
            f"{one['size_bytes']:>10} {one['before']:7.2f} -> {one['now']:7.2f}"
            f"  x {one['change']:.2f}{mark}"
        )
    if result["change"] is None:
        return "\n".join([*lines, "bench: nothing can be said: all sizes met the slow mode"])
    verdict = "lost against the peer" if result["lost"] else "no loss against the peer"
    return "\n".join([*lines, f"bench: {verdict}; geometric mean x {result['change']:.2f}"])
