"""Sixty random injections; 1,000 by the command that docs/reliability.md names."""

import json
import os
import subprocess
import sys

import pytest

SOAK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "soak.py")


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_sixty_injections(tmp_path):
    """In two halves at once, as most of the time is waiting for deadlines and for processes that
    start: five minutes at most on two cores; the limit allows for a machine that is shared."""
    halves = []
    for first in (0, 30):
        result = tmp_path / f"from{first}.json"
        command = [sys.executable, SOAK, "--seed", "60", "--first", str(first), "--count", "30"]
        process = subprocess.Popen(
            [*command, "--json", str(result)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        halves.append((process, result))
    for process, result in halves:
        print(process.communicate(timeout=1400)[0][-20_000:])
        found = json.loads(result.read_text())
        assert found["failures"] == []
        assert found["leaks"] == []
        assert (process.returncode, found["injections"]) == (0, 30)
