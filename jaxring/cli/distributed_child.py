"""Runs a script or module after jax.distributed.initialize(): `jaxring run --distributed`.

usage: python -m jaxring.cli.distributed_child SCRIPT ARGS… | -m MODULE ARGS…
"""

from __future__ import annotations

import os
import runpy
import sys

from jaxring.bootstrap import initialize_jax_distributed


def main(arguments: list[str]) -> None:
    initialize_jax_distributed()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
