"""The soak's modules are scripts beside each other; its injections serve the small tests too."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import soak_world
from soak_plan import Injection


@pytest.fixture(scope="module")
def pool():
    """Processes that go through the injections of a module."""
    made = soak_world.Pool(3, sys.stderr)
    yield made
    made.close()


@pytest.fixture
def inject(pool):
    """inject(kind, moment, victim, …): does it to three ranks and checks all that is promised."""

    def run(kind, moment, victim, **details):
        plan = {"number": 1, "seed": 0, "world_size": 3, "collective": "allreduce", "size": 720}
        plan |= {"algorithm": "auto", "stage": "table", "delay_s": 0.02, "launches": 6}
        plan |= {"deadline_s": 30.0, "served": False}
        if moment == "during":
            plan["size"] = 400_000
        injection = Injection(
            **{**plan, "kind": kind, "moment": moment, "victim": victim, **details}
        )
        outcome = soak_world.run(pool, injection)
        assert outcome.problems == []

    return run
