"""docs/testing.md shows every entry of tests/jax_suite/exceptions.toml, and no other."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_docs_show_the_exceptions():
    with open(ROOT / "tests" / "jax_suite" / "exceptions.toml", "rb") as file:
        groups = tomllib.load(file)["exception"]
    listed = {
        (test.split("::")[-1], ", ".join(group["modes"]), group["reason"])
        for group in groups
        for test in group["tests"]
    }
    text = (ROOT / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| `(test\w+)` \| ([a-z, ]+) \| (.+) \|$", text, re.M)
    assert sorted(rows) == sorted(listed)
