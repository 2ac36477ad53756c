"""`jaxring timeline`: what to do with the files that the setting `timeline` has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jaxring import timeline
from jaxring.cli import shown
from jaxring.errors import UsageError

HELP = """Put the timelines of a job's processes into one file for Perfetto.

Each process writes its own where the setting `timeline` names a file:

  JAXRING_TIMELINE=trace.json jaxring run -n 4 train.py

  jaxring timeline merge trace.*.json -o trace.json

Open the result at https://ui.perfetto.dev or in chrome://tracing.

Exit codes: 0; 2 if a file is no timeline, or two are of one rank.
"""

app = typer.Typer(cls=shown.Group, help=HELP, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _commands() -> None:
    pass


_commands.__doc__ = HELP


@app.command("merge", cls=shown.Command, help=HELP)
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files of single processes.")],
    output: Annotated[Path, typer.Option("-o", help="The file to write.")] = Path("trace.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    # trace.json of an earlier time is among trace*.json, but not a part.
    parts = [file for file in files if file.resolve() != output.resolve()]
    merged = timeline.merge(parts)
    try:
        output.write_text(json.dumps(merged))
    except OSError as e:
        raise UsageError(f"timeline: {output} cannot be written ({e.strerror})") from None
    slices = sum(event["ph"] == "X" for event in merged["traceEvents"])
    if as_json:
        done = {"output": str(output), "slices": slices, "clocks": merged["clocks"]}
        print(json.dumps(done, indent=1))
        return
    hosts = {clock["host"] for clock in merged["clocks"].values()}
    text = (
        f"{output}: {_counted(slices, 'slice')} of {_counted(len(parts), 'process', 'processes')} "
        f"on {_counted(len(hosts), 'host')}"
    )
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def _counted(number: int, one: str, several: str | None = None) -> str:
    return f"{number} {one if number == 1 else several or one + 's'}"
