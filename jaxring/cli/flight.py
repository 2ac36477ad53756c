"""`jaxring flight`: merges the flight records of a job's processes into one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from jaxring.errors import UsageError

Key = tuple[int, int, int, int]  # launch, iteration, call, copy: program order
Row = dict[str, Any]


HELP = """Show where the ranks of a job first differ, from the records that its processes have left.

Records are written to the folder JAXRING_FLIGHT_DIR on an error, or on SIGUSR2.

Examples:

  JAXRING_FLIGHT_DIR=records jaxring run -n 4 train.py

  jaxring flight records

  jaxring flight records/flight-node0-4711.json   (the last operations of one process)

  jaxring flight records --json                   (a line of JSON for each communicator)

Exit codes: 0, also where ranks differ; 2 if there are no records.
"""


def flight(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="The job's folder of records (its flight_dir), or files.",
        ),
    ],
    context: Annotated[int, typer.Option(min=0, help="Operations before the divergence.")] = 5,
    most: Annotated[int, typer.Option("--rows", min=1, help="Operations at most.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    records = read(paths)
    for communicator, ranks in by_communicator(records).items():
        keys = sorted({key for operations in ranks.values() for key in operations})
        first = first_divergence(keys, ranks)
        if as_json:
            print(json.dumps(summary(communicator, ranks, keys, first)))
            continue
        start = max(0, len(keys) - most if first is None else keys.index(first) - context)
        show(communicator, ranks, keys[start : start + most], first)


flight.__doc__ = HELP


def read(paths: list[Path]) -> list[Row]:
    """The records of folders and files; UsageError if there are none or one can't be read."""
    records = []
    for file in [file for path in paths for file in files_of(path)]:
        try:
            record = json.loads(file.read_text())
            if missing := {"host", "pid", "operations"} - set(record):
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
        except (OSError, ValueError, TypeError) as e:
            raise UsageError(f"{file} is no flight record: {type(e).__name__}: {e}") from None
        records.append(record)
    return records


def files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("flight-*.json"))
    if not files:
        raise UsageError(
            f"{path} holds no flight-*.json; set JAXRING_FLIGHT_DIR to it and run the job again,"
            " or send its processes SIGUSR2"
        )
    return files


def by_communicator(records: list[Row]) -> dict[str, dict[int, dict[Key, Row]]]:
    """Communicator -> rank -> operations by key."""
    result: dict[str, dict[int, dict[Key, Row]]] = {}
    for record in records:
        for row in record["operations"]:
            key = (row["launch"], row["iteration"], row["call"], row["copy"])
            row |= {"host": record["host"], "pid": record["pid"]}
            result.setdefault(row["communicator"], {}).setdefault(row["rank"], {})[key] = row
    return result


def first_divergence(keys: list[Key], ranks: dict[int, dict[Key, Row]]) -> Key | None:
    """The first operation that some rank has not entered, enters as another, or has not finished.

    A rank remembers a limited number; what it did before these is not held against it.
    """
    begins = {
        rank: min(operations) if min(row["number"] for row in operations.values()) > 0 else keys[0]
        for rank, operations in ranks.items()
    }
    for key in keys:
        rows = [ops.get(key) for rank, ops in ranks.items() if key >= begins[rank]]
        signatures = {row["signature"] for row in rows if row}
        if (
            None in rows
            or len(signatures) > 1
            or any(row["outcome"] != "done" for row in rows if row)
        ):
            return key
    return None


def summary(
    communicator: str, ranks: dict[int, dict[Key, Row]], keys: list[Key], first: Key | None
) -> Row:
    names = ("launch", "iteration", "call", "copy")
    return {
        "communicator": communicator,
        "ranks": sorted(ranks),
        "operations": len(keys),
        "first_divergence": None if first is None else dict(zip(names, first, strict=True)),
        "by_rank": None
        if first is None
        else {rank: state(operations.get(first)) for rank, operations in sorted(ranks.items())},
    }


def state(row: Row | None) -> str:
    if row is None:
        return "not entered"
    return f"{row['outcome'] or 'waiting'}: {row['signature']}"


def show(communicator: str, ranks: dict[int, dict[Key, Row]], keys: list[Key], first: Any) -> None:
    verdict = "no divergence" if first is None else f"first divergence: {describe(first)}"
    table = Table(title=f"communicator {communicator}: {verdict}", title_justify="left")
    table.add_column("operation")
    for rank, operations in sorted(ranks.items()):
        row = next(iter(operations.values()))
        table.add_column(f"rank {rank}\n{row['host']} pid {row['pid']}")
    for key in keys:
        cells = [cell(operations.get(key)) for _, operations in sorted(ranks.items())]
        table.add_row(describe(key), *cells, style="bold red" if key == first else None)
    Console().print(table)


def describe(key: Key) -> str:
    launch, iteration, call, copy = key
    extra = f" iteration {iteration}" if iteration else ""
    return f"launch {launch}{extra} call #{call}" + (f" copy {copy}" if copy else "")


def cell(row: Row | None) -> str:
    if row is None:
        return "-"
    times = ""
    if row["finished_s"]:
        times = f" {1e3 * (row['finished_s'] - row['arrived_s']):.1f} ms"
    name = f" '{row['name']}'" if row["name"] else ""
    return f"{row['outcome'] or 'waiting'}{times}{name}\n{row['signature'][:70]}"
