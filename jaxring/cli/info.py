"""`jaxring info`: what is installed, what would be used, and what is off and why."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from jaxring import errors
from jaxring._src import placement, primitive
from jaxring.config import Config, config

# Variables with our prefix that are not settings.
JOB_VARIABLES = frozenset(
    f"JAXRING_{name}"
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "COORDINATOR",
        "SECRET",
        "SERVED",
    )
)


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show versions, devices, backends, transports and settings, and what is off and why."""
    facts = collect(os.environ)
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    console = Console()
    for title in ("versions", "devices", "place"):
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for name, value in facts[title].items():
            table.add_row(name, str(value))
        console.print(table)
    for title, columns in (
        ("backends", ("platform", "state")),
        ("transports", ("transport", "state")),
        ("algorithms", ("name", "rank_order", "summary")),
        ("settings", ("name", "value", "default", "source", "when", "doc")),
    ):
        table = Table(*columns, title=title, title_justify="left")
        for row in facts[title]:
            table.add_row(*(str(row[c]) for c in columns))
        console.print(table)
    for warning in facts["warnings"]:
        console.print(f"[yellow]warning:[/] {warning}")


def collect(env: Mapping[str, str]) -> dict[str, Any]:
    """All that the command shows, as one JSON-able dict."""
    lists = primitive.lists()
    return {
        "versions": _versions(),
        "devices": _devices(),
        "place": _place(env),
        "backends": _backends(),
        "transports": _transports(lists["transports"]),
        "collectives": list(lists["collectives"]),
        "ops": list(lists["ops"]),
        "dtypes": list(lists["dtypes"]),
        "algorithms": [dict(row) for row in lists["algorithms"]],
        "settings": [
            {
                "name": s.name,
                "value": getattr(config, s.name),
                "default": s.default,
                "source": s.source,
                "when": f"{s.when} time",
                "variable": s.variable,
                "doc": s.doc,
            }
            for s in Config.settings()
        ],
        "warnings": _warnings(env),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("jaxring", "jax", "jaxlib", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _devices() -> dict[str, str]:
    try:
        devices = jax.devices()
    except RuntimeError as e:
        return {"none": str(e).splitlines()[0]}
    counts: dict[str, int] = {}
    for device in devices:
        kind = f"{device.platform} ({device.device_kind})"
        counts[kind] = counts.get(kind, 0) + 1
    return {kind: f"{count} device{'s' * (count > 1)}" for kind, count in counts.items()}


def _place(env: Mapping[str, str]) -> dict[str, Any]:
    try:
        place = placement.discover(env=env)
    except errors.UsageError as e:
        return {"error": e.message}
    return {"rank": place.rank, "world size": place.world_size, "from": place.source}


def _backends() -> list[dict[str, str]]:
    off = "off: this build has CPU kernels only; for arrays on GPUs use jax.lax"
    return [{"platform": "cpu", "state": "on"}, {"platform": "cuda", "state": off}]


def _transports(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    found = [{"transport": row["name"], "state": f"on: {row['summary']}"} for row in rows]
    off = "off: ranks on several hosts are not served by this version"
    return [*found, {"transport": "between hosts", "state": off}]


def _warnings(env: Mapping[str, str]) -> list[str]:
    known = {s.variable for s in Config.settings()} | JOB_VARIABLES
    unknown = sorted(n for n in env if n.startswith("JAXRING_") and n not in known)
    return [f"{name} is set but is no setting of this version" for name in unknown]
