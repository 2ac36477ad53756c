"""What `jaxring run` starts on each rank: a Python script or module, or any other program."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import zipfile

from jaxring import errors

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?$")
# -P: jaxring itself must not be looked for in the current folder, which may be a source tree.
_DISTRIBUTED = ("-P", "-m", "jaxring.cli.distributed_child")
_HEAD_BYTES = 4096


def command(module: str | None, program: list[str], distributed: bool) -> list[str]:
    """The whole command line of each process; UsageError if it could not run, before any starts.

    Args:
      module: of `-m`; then `program` holds its arguments only.
      program: a script, or as mpirun takes it a program, with its arguments.
      distributed: jax.distributed.initialize() is to be called first, which needs Python.
    """
    child = _DISTRIBUTED if distributed else ()
    if module is not None:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            raise errors.UsageError(f"run: no module named {module!r}; is it installed, or here?")
        return [sys.executable, *child, "-m", module, *program]
    if not program:
        raise errors.UsageError("run: no script given; for example: jaxring run -n 4 train.py")
    name, *rest = program
    if _PYTHON.match(os.path.basename(name)) and not name.endswith(".py"):
        return _python(name, rest, child)
    if _is_script(name):
        return [sys.executable, *child, *program]
    found = shutil.which(name)
    if found is None:
        raise errors.UsageError(
            f"run: {name!r} is neither a Python program nor executable"
            if os.path.exists(name)
            else f"run: no script {name!r} in {os.getcwd()}, and no such program in PATH"
        )
    if distributed:
        raise errors.UsageError(
            f"run: --distributed needs a Python script or module, {name!r} is another program"
        )
    return [found, *rest]


def _python(name: str, rest: list[str], child: tuple[str, ...]) -> list[str]:
    """`python …`, as mpirun users type it: the one that is named."""
    found = shutil.which(name)
    if found is None:
        raise errors.UsageError(f"run: no program {name!r} in PATH")
    if not rest:
        raise errors.UsageError(f"run: {name} needs a script; for example: {name} train.py")
    if not rest[0].startswith("-"):
        _is_script(rest[0])  # says at once if it is not there
        if not os.path.exists(rest[0]):
            raise errors.UsageError(f"run: no script {rest[0]!r} in {os.getcwd()}")
    elif child and rest[0] != "-m":
        raise errors.UsageError(
            f"run: --distributed takes {name} SCRIPT or {name} -m MODULE, got {name} {rest[0]}"
        )
    return [found, *child, *rest]


def _is_script(path: str) -> bool:
    """Whether Python can run it: source, a zip file, or a folder with a __main__.py."""
    if os.path.isdir(path):
        if os.path.exists(os.path.join(path, "__main__.py")):
            return True
        raise errors.UsageError(f"run: {path!r} is a folder without a __main__.py; give a script")
    if not os.path.isfile(path):
        return False
    if zipfile.is_zipfile(path):
        return True
    try:
        with open(path, "rb") as f:
            head = f.read(_HEAD_BYTES)
    except OSError as e:
        raise errors.UsageError(f"run: {path!r} cannot be read ({e.strerror})") from None
    if path.endswith((".py", ".pyc")):
        return True
    if head.startswith(b"#!"):
        return b"python" in head.split(b"\n", 1)[0]
    return b"\0" not in head
