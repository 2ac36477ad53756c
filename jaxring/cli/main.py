"""Assembles the commands."""

from __future__ import annotations

import gc
import sys
from typing import Annotated, Any

import typer

from jaxring import errors
from jaxring._src import command_guard
from jaxring._src.command_guard import INTERRUPTED
from jaxring.cli import shown
from jaxring.cli.bench import bench
from jaxring.cli.flight import flight
from jaxring.cli.info import info, versions
from jaxring.cli.run import RunCommand, run
from jaxring.cli.simulate import HELP as SIMULATE_HELP
from jaxring.cli.simulate import simulate
from jaxring.cli.timeline import app as timeline
from jaxring.cli.tune import tune

app = typer.Typer(
    name="jaxring",
    cls=shown.Group,
    help="Collectives for JAX: start processes, look at the installation, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", cls=RunCommand)(run)
app.command("info", cls=shown.Command)(info)
app.command("bench", cls=shown.Command)(bench)
app.command("tune", cls=shown.Command)(tune)
app.command("flight", cls=shown.Command)(flight)
app.command("simulate", cls=shown.Command, help=SIMULATE_HELP)(simulate)
app.add_typer(timeline, name="timeline")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxring {versions()['jaxring']}")
        raise typer.Exit


@app.callback()
def _of_all(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and end."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script; errors of usage become one sentence and exit code 2."""
    command_guard.end()
    try:
        code = app(prog_name="jaxring", standalone_mode=False)
    except errors.Error as e:
        print(f"jaxring: {e.message}", file=sys.stderr)
        code = 2 if isinstance(e, errors.UsageError) else 1
    except Exception as e:
        code = _of_click(e)
        if code is None:
            raise
    finally:
        gc.freeze()  # else the interpreter's end looks through all of JAX's objects: 0.4 s
    sys.exit(code or 0)


def _of_click(e: Any) -> int | None:
    """Says what click found and gives the exit code; None for any other exception. By names, since
    recent typer brings a copy of click of its own."""
    kinds = {kind.__name__ for kind in type(e).__mro__}
    if "Abort" in kinds:  # Ctrl-C
        return INTERRUPTED
    if "NoArgsIsHelpError" in kinds:
        e.show()
    elif "ClickException" in kinds:
        print(in_one_sentence(e), file=sys.stderr)
    else:
        return None
    return e.exit_code


def in_one_sentence(problem: Any) -> str:
    """Such as "jaxring bench: No such option: --size; see jaxring bench --help"."""
    context = getattr(problem, "ctx", None)
    command = context.command_path if context is not None else "jaxring"
    text = " ".join(problem.format_message().split()).rstrip(".")
    text = text.removeprefix("Invalid value: ").replace("Input should be", "expected")
    text = text.replace(", unable to parse string as an integer", "")
    text = text.replace(", unable to parse string as a number", "")
    return f"{command}: {text}; see {command} --help"
