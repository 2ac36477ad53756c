"""Eight runs of the elastic soak; 100 by the command that docs/reliability.md names. And that the
oracle can say no."""

import json
import os
import subprocess
import sys

import elastic_soak
import elastic_steps as steps
import pytest
from elastic_plan import STEPS, draw

SOAK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "elastic_soak.py")


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_eight_elastic_trainings(tmp_path):
    """Two at once, as most of the time is waiting for deadlines and for processes that start."""
    result = tmp_path / "result.json"
    command = [sys.executable, SOAK, "--seed", "8", "--count", "8", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    print((done.stdout + done.stderr)[-40_000:])
    found = json.loads(result.read_text())
    assert found["failures"] == {}
    assert (done.returncode, found["runs"]) == (0, 8)
    assert found["worlds_shrunk"] > 0
    assert found["worlds_grown"] > 0


def test_plans_are_drawn_again_alike_and_leave_enough_ranks():
    for number in range(200):
        plan = draw(1, number)
        assert plan == draw(1, number)
        assert plan.full >= plan.min_ranks
        assert all(event.slot != plan.keeper for event in plan.events)


def rows(history):
    digests, residuals = steps.replay(history)
    size = history[-1][0]
    done = {"slot": 0, "again": 0, "digest": digests[-1], "history": history}
    ended = [{**done, "finished": r, "residual": residuals[r], "origin": r} for r in range(size)]
    told = {"slot": 1, "again": 0, "committed": 5, "digest": digests[4]}
    return [told, *ended]


def test_the_oracle_can_say_no():
    history = [[2, 0]] + [[2, -1]] * 9 + [[1, 1]] + [[1, -1]] * (STEPS - 11)
    assert elastic_soak.check(rows(history)) == history
    for position, name in ((0, "digest"), (1, "digest"), (1, "residual")):
        wrong = rows(history)
        wrong[position][name] += 1
        with pytest.raises(AssertionError, match=r"oracle's|is lost"):
            elastic_soak.check(wrong)
    other = [*history[:10], [1, 0], *history[11:]]  # another rank's residual
    assert rows(other)[1]["digest"] != rows(history)[1]["digest"]
