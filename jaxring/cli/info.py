"""`jaxring info`: what is installed, what would be used, and what is off and why."""

from __future__ import annotations

import ctypes
import difflib
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
from jaxring._src import cuda_state, native_facts, placement
from jaxring.cli import install_cost
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
        "RESTART",
        "LIBFABRIC",
    )
)


HELP = """Show versions, devices, backends, transports and settings, and what is off and why.

Examples:

  jaxring info

  jaxring info --json

  jaxring info --cost       (import time and size; starts Python five times)

Exit codes: 0; 2 for a setting in the environment that has no meaning.
"""


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    cost: Annotated[
        bool, typer.Option("--cost", help="Also measure import time, and the size on disk.")
    ] = False,
) -> None:
    facts = collect(os.environ)
    if cost:
        facts["cost"] = install_cost.measure()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    console = Console()
    for title in ("versions", "devices", "place", *(["cost"] if cost else [])):
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for name, value in facts[title].items():
            table.add_row(name, str(value))
        console.print(table)
    for title, columns in (
        ("backends", ("platform", "state")),
        ("cuda", ("part", "state")),
        ("transports", ("transport", "state")),
        ("algorithms", ("name", "rank_order", "summary")),
        ("settings", ("name", "value", "source", "when", "doc")),
    ):
        table = Table(*columns, title=title, title_justify="left")
        rows = facts[title] if title != "settings" else map(_narrow, facts[title])
        for row in rows:
            table.add_row(*(str(row[c]) for c in columns))
        console.print(table)
    for warning in facts["warnings"]:
        console.print(f"[yellow]warning:[/] {warning}")


info.__doc__ = HELP


def _narrow(setting: Mapping[str, Any]) -> dict[str, Any]:
    """A setting's row for a terminal of 80 columns: its default only where it is not its value."""
    source = setting["source"]
    if setting["value"] != setting["default"]:
        source += f",\nnot {setting['default']!r}"
    return {**setting, "source": source, "when": setting["when"].removesuffix(" time")}


def collect(env: Mapping[str, str]) -> dict[str, Any]:
    """All that the command shows, as one JSON-able dict."""
    lists = native_facts.lists()
    return {
        "versions": versions(),
        "devices": _devices(),
        "place": _place(env),
        "backends": _backends(),
        "cuda": cuda_state.parts(),
        "transports": _transports(lists["transports"], env),
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


def versions() -> dict[str, str]:
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
    # A bare AssertionError: JAX_PLATFORMS names only a platform without any device.
    except (RuntimeError, AssertionError) as e:
        what = f"JAX finds no device; JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', 'not set')}"
        return {"none": (str(e).splitlines() or [what])[0]}
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
    return [
        {"platform": "cpu", "state": "on"},
        {"platform": "cuda", "state": cuda_state.backend()},
    ]


def _transports(rows: list[dict[str, str]], env: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {
            "transport": row["name"],
            "state": _libfabric(row["summary"], env)
            if row["name"] == "libfabric"
            else f"on: {row['summary']}",
        }
        for row in rows
    ]


def _libfabric(summary: str, env: Mapping[str, str]) -> str:
    """It is loaded when ranks turn out to be on several hosts (xla_ffi/transport/ofi_fabric.cc)."""
    name = env.get("JAXRING_LIBFABRIC") or "libfabric.so.1"
    try:
        ctypes.CDLL(name)
    except OSError as e:
        return f"off: {e}; install it (Debian, Ubuntu: apt-get install libfabric1)"
    return f"on: {summary}"


def _warnings(env: Mapping[str, str]) -> list[str]:
    known = {s.variable for s in Config.settings()} | JOB_VARIABLES
    unknown = sorted(n for n in env if n.startswith("JAXRING_") and n not in known)
    meant = {name: difflib.get_close_matches(name, known, 1, 0.8) for name in unknown}
    return [
        f"{name} is set but is no setting of this version"
        + "".join(f"; is {other} meant?" for other in meant[name])
        for name in unknown
    ]
