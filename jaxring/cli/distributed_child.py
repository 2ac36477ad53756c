"""Runs a script or module after jax.distributed.initialize(): `jaxring run --distributed`.

usage: python -P -m jaxring.cli.distributed_child SCRIPT ARGS… | -m MODULE ARGS…
"""

from __future__ import annotations

import os
import runpy
import sys

from jaxring.bootstrap import initialize_jax_distributed


def main(arguments: list[str]) -> None:
    initialize_jax_distributed()
    is_module = arguments[0] == "-m"
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(arguments[0]))
    if not os.environ.get("PYTHONSAFEPATH"):  # what `python` itself would put there
        sys.path.insert(0, folder)
    if is_module:
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
