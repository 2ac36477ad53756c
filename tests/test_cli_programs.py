"""What `jaxring run` makes of its arguments, before anything starts."""

import shutil
import sys
import zipfile

import pytest

import jaxring
from jaxring.cli import programs

CHILD = ["-P", "-m", "jaxring.cli.distributed_child"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(name, content=b"", mode=0o644):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
        return name

    write("train.py", b"print(1)")
    write("train", b"print(1)")
    write("shebang", b"#!/usr/bin/env python3\nprint(1)", 0o755)
    write("tool", b"#!/bin/sh\necho", 0o755)
    write("data.bin", b"\0\1")
    write("package/__main__.py", b"print(1)")
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as z:
        z.writestr("__main__.py", "print(1)")
    return write


@pytest.mark.parametrize("name", ["train.py", "train", "shebang", "package", "app.pyz"])
def test_what_python_runs(folder, name):
    assert programs.command(None, [name, "-n", "3"], False) == [sys.executable, name, "-n", "3"]
    assert programs.command(None, [name], True) == [sys.executable, *CHILD, name]


def test_other_programs(folder, monkeypatch, tmp_path):
    """As with mpirun: from PATH, or by their path."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert programs.command(None, ["./tool", "-x"], False) == ["./tool", "-x"]
    assert programs.command(None, ["ls", "-l"], False) == [shutil.which("ls"), "-l"]
    assert programs.command(None, [sys.executable, "train.py"], False)[1:] == ["train.py"]
    assert programs.command(None, [sys.executable, "-u", "nope.py"], False)[1:] == ["-u", "nope.py"]
    named = programs.command(None, [sys.executable, "-m", "json.tool"], True)
    assert named == [sys.executable, *CHILD, "-m", "json.tool"]


@pytest.mark.parametrize(
    ("program", "distributed", "sentence"),
    [
        (["nope.py"], False, "no script 'nope.py' in "),
        (["nope"], False, "and no such program in PATH"),
        (["empty"], False, "'empty' is a folder without a __main__.py"),
        (["data.bin"], False, "'data.bin' is neither a Python program nor executable"),
        (["./tool"], True, "--distributed needs a Python script or module"),
        ([sys.executable], False, "needs a script"),
        ([sys.executable, "nope.py"], False, "no script 'nope.py'"),
        ([sys.executable, "empty"], False, "a folder without"),
        ([sys.executable, "-u", "train.py"], True, "--distributed takes"),
    ],
)
def test_what_cannot_run(folder, program, distributed, sentence):
    with pytest.raises(jaxring.UsageError, match=r"^run: ") as e:
        programs.command(None, program, distributed)
    assert sentence in str(e.value)
