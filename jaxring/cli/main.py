"""Assembles the commands."""

from __future__ import annotations

import sys

import typer

from jaxring import errors
from jaxring.cli.bench import bench
from jaxring.cli.info import info
from jaxring.cli.run import RunCommand, run

app = typer.Typer(
    name="jaxring",
    help="Collectives for JAX: start processes, look at the installation, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=RunCommand)(run)
app.command("info")(info)
app.command("bench")(bench)


def main() -> None:
    """Entry point of the console script; errors of usage become one sentence and exit code 2."""
    try:
        app(prog_name="jaxring")
    except errors.Error as e:
        print(f"jaxring: {e.message}", file=sys.stderr)
        sys.exit(2 if isinstance(e, errors.UsageError) else 1)
