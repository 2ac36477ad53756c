"""Pytest plugin of run.py: puts jaxring in lax's place and writes each test's outcome to a file.

Not imported by this repository's own tests; run.py loads it into a pytest of its own.
"""

import collections
import json
import os
import types
from typing import Any

import pytest

NAMES = (
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "psum_scatter",
    "all_gather",
    "all_to_all",
    "ppermute",
    "pbroadcast",
)


def pytest_configure(config: pytest.Config) -> None:
    mode = os.environ["JAX_SUITE_MODE"]
    if mode == "install":
        import jaxring

        jaxring.install()
    elif mode == "names":
        replace_names()


def replace_names() -> None:
    """What tests see as jax.lax is a copy with our functions; JAX's and our own code, which were
    imported before, keep lax's (lax.axis_size, for one, is a psum)."""
    import jax

    import jaxring

    copy = types.ModuleType("jax.lax")
    vars(copy).update(vars(jax.lax))
    vars(copy).update({name: getattr(jaxring, name) for name in NAMES})
    setattr(jax, "lax", copy)  # noqa: B010


def record(**entry: Any) -> None:
    with open(os.environ["JAX_SUITE_LOG"], "a") as log:
        log.write(json.dumps(entry) + "\n")


def seen() -> set[str]:
    """Tests that a run before this one, which ended early, has begun."""
    if not os.path.exists(os.environ["JAX_SUITE_LOG"]):
        return set()
    with open(os.environ["JAX_SUITE_LOG"]) as log:
        return {entry["test"] for entry in map(json.loads, log) if "test" in entry}


def name_of(nodeid: str) -> str:
    return nodeid.rsplit("/", 1)[-1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    done = seen()
    items[:] = [item for item in items if name_of(item.nodeid) not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    record(test=name_of(nodeid), outcome="crashed")  # unless another outcome follows


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        record(test=name_of(report.nodeid), outcome=report.outcome, text=report.longreprtext)


def pytest_sessionfinish() -> None:
    carried: collections.Counter[str] = collections.Counter()
    if os.environ["JAX_SUITE_MODE"] != "lax":
        import jaxring

        for row in jaxring.stats():
            carried[row["collective"]] += row["operations"]
    record(carried=carried)
