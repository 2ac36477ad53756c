"""The child's side of jaxring.testing.spawn, and the files in which task and results travel.

Pickles go through a folder of mode 0700 that the parent has made for this one job; nothing comes
from elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxring import bootstrap, errors
from jaxring._src import world


@dataclass
class Result:
    """What a rank returned, or the exception that it raised."""

    value: Any = None
    exception: BaseException | None = None


def write_task(
    folder: Path, fn: Callable[..., Any], args: tuple[Any, ...], distributed: bool
) -> None:
    """Writes down how to import `fn`, and its arguments; UsageError if a child could not import
    it."""
    module = inspect.getmodule(fn)
    name = getattr(fn, "__qualname__", "")
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if module is None or found is not fn:
        raise errors.UsageError(
            f"spawn: expected a function at the top level of a module, got {fn!r}; a new process "
            "has to import it"
        )
    where = {
        "module": module.__name__,
        "file": getattr(module, "__file__", None),
        "function": name,
        "path": sys.path,
        "distributed": distributed,
    }
    with open(folder / "task", "wb") as f:
        pickle.dump(where, f)
        pickle.dump(args, f)  # apart: reading them may need the module to be loaded


def read_result(folder: Path, rank: int) -> Result | None:
    try:
        with open(folder / f"result-{rank}", "rb") as f:
            return pickle.load(f)
    except FileNotFoundError:
        return None


def _write_result(folder: Path, rank: int, result: Result) -> None:
    temporary = folder / f"unfinished-{rank}"
    with open(temporary, "wb") as f:
        pickle.dump(result, f)
    os.replace(temporary, folder / f"result-{rank}")


def _load(name: str, file: str | None) -> ModuleType:
    """The module called `name`, from `file` where its name alone does not lead there.

    So it is with the main script and with test modules of pytest's import mode "importlib"."""
    if name != "__main__":
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            pass
        else:
            if file is None or getattr(module, "__file__", None) == file:
                return module
    if file is None:
        raise errors.UsageError(f"spawn: module {name!r} has no file; define the function in one")
    # Not as "__main__", whose part under `if __name__ == "__main__"` must not run here.
    spec = importlib.util.spec_from_file_location(name.replace("__main__", "__mp_main__"), file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for end in (i for i, letter in enumerate(name) if letter == "."):
        # Pickle imports the packages above a module too, which here may exist in name only.
        sys.modules.setdefault(name[:end], ModuleType(name[:end]))
    sys.modules[name] = sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _picklable(exception: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(exception))
    except Exception:
        return RuntimeError(f"{type(exception).__name__}: {exception}")
    return exception


def main(name: str) -> None:
    """Runs the task in the folder `name` as the rank that the environment says."""
    folder = Path(name)
    with open(folder / "task", "rb") as f:
        where = pickle.load(f)
        sys.path[:] = where["path"]
        function: Any = _load(where["module"], where["file"])
        args = pickle.load(f)
    for part in where["function"].split("."):
        function = getattr(function, part)
    rank = int(os.environ["JAXRING_RANK"])
    try:
        if where["distributed"]:
            bootstrap.initialize_jax_distributed()
        comm = world.init()
        value = function(comm, *args)
        value = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, value)
        _write_result(folder, rank, Result(value=value))
        comm.close()
    except BaseException as e:
        traceback.print_exc()
        _write_result(folder, rank, Result(exception=_picklable(e)))
        sys.exit(1)
