"""Runs a script or module after jax.distributed.initialize(): `jaxring run --distributed`.

usage: python -m jaxring.cli.distributed_child SCRIPT ARGS… | -m MODULE ARGS…
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

import jax

from jaxring import bootstrap
from jaxring._src.store import format_address, parse_address
from jaxring.config import config


def initialize() -> None:
    """Joins jax.distributed under the rank that `jaxring run` gave; rank 0 finds a free port."""
    placement = bootstrap.discover()
    assert placement.coordinator is not None
    store = bootstrap.connect(placement, config.timeout_s)
    if placement.rank == 0:
        host, _ = parse_address(placement.coordinator)
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, 0), family=family) as free:
            store.set("jax.distributed", format_address(host, free.getsockname()[1]))
    # Several processes of a host share its GPUs: each takes the one of its number.
    several = int(os.environ.get("JAXRING_LOCAL_WORLD_SIZE", "1")) > 1
    jax.distributed.initialize(
        store.get("jax.distributed", config.timeout_s),
        num_processes=placement.world_size,
        process_id=placement.rank,
        local_device_ids=[int(os.environ["JAXRING_LOCAL_RANK"])] if several else None,
        cluster_detection_method="deactivate",
    )


def main(arguments: list[str]) -> None:
    initialize()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
