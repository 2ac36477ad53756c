"""What all commands have: help with examples and exit codes, --json, one-sentence errors."""

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jaxring.cli import main as cli

COMMANDS = ["run", "info", "bench", "tune", "simulate", "flight", "timeline merge"]


def help_of(command: str) -> str:
    result = CliRunner().invoke(
        cli.app, [*command.split(), "--help"], terminal_width=100, env={"NO_COLOR": "1"}
    )
    assert result.exit_code == 0
    return result.stdout


def test_all_commands_are_checked():
    groups = {group.name for group in cli.app.registered_groups}
    names = {command.name for command in cli.app.registered_commands} | groups
    assert names == {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_codes(command):
    text = help_of(command)
    assert re.search(rf"jaxring {command}\b", text.split("Options")[0]), text
    assert "Exit code" in text, text
    assert not re.search("<(bool|list)", text), text


@pytest.mark.parametrize("command", COMMANDS)
def test_output_for_programs(command):
    assert "--json" in help_of(command)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "--foo"], "jaxring bench: No such option: --foo; see jaxring bench --help"),
        (["bench", "allreduce", "-b", "x"], "expected a size such as 16, 4K or 64M, got 'x'"),
        (
            ["bench", "allreduce", "-n"],
            "jaxring bench: Option '-n' requires an argument; see",
        ),
        (
            ["bench", "allreduce", "-n", "0"],
            "for '-n': expected greater than or equal to 1; see",
        ),
        (["run", "-n"], "jaxring run: Option '-n' requires an argument"),
        (["run", "-n", "2", "-m"], "jaxring run: Option '-m' requires an argument"),
        (
            ["simulate", "--within", "1us"],
            "expected latency,bandwidth such as 1us,10GB/s, got",
        ),
        (["simulate", "--collective", "x"], "use one of allreduce, "),
        (["nothing"], "jaxring: No such command 'nothing'"),
        (["timeline", "merge"], "jaxring timeline merge: Missing argument"),
        (["simulate", "--ranks", "0"], "expected world sizes from 1 to 16384"),
        (["flight", "/"], "/ holds no flight-*.json"),
        (["flight", "/no/such/file"], "/no/such/file is no flight record: FileNotFoundError"),
        (["bench", "allreduce", "--plot", "/no/such/a.png"], "there is no /no/such; name a file"),
        (["bench", "allreduce", "--plot", "a.txt2"], "a name that ends in .png, .svg or .pdf"),
        (["bench", "allreduce", "--json", "/"], "--json: / is a folder"),
        (["tune", "-o", "/no/such/a.json"], "-o: /no/such/a.json lies in no folder"),
        (["simulate", "--plot", "/no/such/a.png"], "--plot: /no/such/a.png lies in no folder"),
        (["run", "-n", "2", "--json", "/no/such/a", "x.py"], "run: --json: /no/such/a lies in no"),
        (["run", "-n", "2"], "run: no script given"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxring", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    text = capsys.readouterr().err
    assert end.value.code == 2
    assert sentence in text
    assert text.count("\n") == 1


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "jaxring")


def test_what_happens_while_modules_are_imported():
    """A setting without a meaning is one sentence; Ctrl-C ends it without a traceback."""
    command = [sys.executable, "-m", "jaxring", "info"]
    env = {**os.environ, "JAXRING_TIMEOUT_S": "abc"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "jaxring: JAXRING_TIMEOUT_S: expected a number of seconds > 0, got 'abc'\n"
    )
    program = (  # the signal comes when jax is being imported
        "import os, signal, sys\n"
        # ignored where the tests run in a shell's background
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.argv = ['/bin/jaxring', 'info']\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'jax': os.kill(os.getpid(), 2)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import jaxring.cli.main"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_exit_code_of_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "jaxring", "bench", "--foo"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jaxring bench: ")
