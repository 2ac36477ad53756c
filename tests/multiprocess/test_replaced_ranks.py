"""A process that takes a dead rank's place knows nothing of the worlds that the others have been
in; it joins their next one all the same."""

import subprocess
import sys

from jaxring._src.store_server import StoreServer

RANK = """
import sys
import jax.numpy as jnp
import jaxring

rank, worlds, coordinator = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for _ in range(worlds):
    with jaxring.init(rank, 2, coordinator, timeout_s=30) as comm:
        assert int(jaxring.allreduce(jnp.int32(rank + 1), comm)) == 3
"""


def start(rank: int, worlds: int, coordinator: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", RANK, str(rank), str(worlds), coordinator]
    return subprocess.Popen(command, stderr=subprocess.PIPE)


def ended_well(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()


def free_port() -> int:
    server = StoreServer("127.0.0.1", 0, "")
    server.close()
    return server.address[1]


def test_a_replaced_rank_joins_the_next_world():
    coordinator = f"127.0.0.1:{free_port()}"
    survivor = start(0, 2, coordinator)
    try:
        for _ in range(2):
            ended_well(start(1, 1, coordinator))
        ended_well(survivor)
    finally:
        survivor.kill()
        survivor.communicate()
