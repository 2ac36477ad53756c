"""Who belongs to an epoch: the rules alone, with a clock of their own and no connection."""

import pytest

from jaxring._src.elastic_gathering import Gathering, Offer
from jaxring._src.elastic_state import Standing
from jaxring._src.elastic_sync import agreed


class Job:
    """A gathering of processes by name, and what it has told each of them last."""

    def __init__(self, size=4, min_ranks=2):
        self.size, self.min_ranks, self.now = size, min_ranks, 0.0
        self.told = {}
        self.gathering = Gathering(self.told.__setitem__, lambda: self.now)

    def enter(self, *members):
        for member in members:
            self.gathering.enter(member)

    def offer(self, *members, suspects=()):
        """Each with the number that its name ends with."""
        for member in members:
            offer = Offer(int(member[-1]), self.size, self.min_ranks, 10.0, tuple(suspects))
            self.told.pop(member, None)
            self.gathering.offer(member, offer)
            self.gathering.look()

    def leave(self, *members, finished=False):
        for member in members:
            self.gathering.leave(member, finished)
            self.gathering.look()

    def pass_s(self, seconds, gone=0):
        self.now += seconds
        self.gathering.look(gone)

    def formed(self, member):
        """The members of the epoch that `member` was told of last, or None."""
        message = self.told.get(member, {})
        return [m["member"] for m in message["formed"]["members"]] if "formed" in message else None


@pytest.fixture
def job():
    """Four processes in their first epoch."""
    job = Job()
    job.enter("a0", "a1", "a2", "a3")
    job.offer("a0", "a1", "a2", "a3")
    assert job.formed("a0") == ["a0", "a1", "a2", "a3"]
    return job


def test_the_first_epoch_has_all_in_order_of_their_numbers():
    job = Job(3)
    job.enter("a0", "a1", "a2")
    job.offer("a2", "a0")
    assert job.formed("a0") is None
    job.offer("a1")
    assert all(job.formed(m) == ["a0", "a1", "a2"] for m in ("a0", "a1", "a2"))


def test_the_first_epoch_forms_without_those_that_ended_or_do_not_come():
    job = Job(4)
    job.enter("a0", "a1")
    job.offer("a0", "a1")
    job.pass_s(1, gone=1)
    assert job.formed("a0") is None
    job.pass_s(1, gone=2)
    assert job.formed("a0") == ["a0", "a1"]
    job = Job(4)
    job.enter("a0", "a1")
    job.offer("a0", "a1")
    job.pass_s(9)
    assert job.formed("a0") is None
    job.pass_s(2)
    assert job.formed("a0") == ["a0", "a1"]


def test_survivors_keep_their_order_and_wait_for_each_other_only(job):
    job.leave("a1")
    job.offer("a3", "a2")
    assert job.formed("a3") is None  # a0 lives and has not come yet
    job.offer("a0")
    assert job.formed("a3") == ["a0", "a2", "a3"]
    assert job.gathering.epoch == 2


def test_the_last_to_die_while_others_wait_for_it(job):
    job.leave("a0")
    job.offer("a1", "a2")
    job.leave("a3")
    assert job.formed("a1") == ["a1", "a2"]


def test_a_suspect_is_not_waited_for_but_taken_if_it_comes(job):
    job.offer("a0", "a1", suspects=["a3"])
    job.offer("a2")
    assert job.formed("a0") == ["a0", "a1", "a2"]
    job = Job(3)
    job.enter("a0", "a1", "a2")
    job.offer("a0", "a1", "a2")
    job.offer("a0", suspects=["a2"])
    job.offer("a2")
    job.offer("a1")
    assert job.formed("a0") == ["a0", "a1", "a2"]


def test_one_that_does_not_come_is_left_out_after_a_while_and_is_new_when_it_does(job):
    job.offer("a0", "a1", "a2")
    job.pass_s(9)
    assert job.formed("a0") is None
    job.pass_s(2)
    assert job.formed("a0") == ["a0", "a1", "a2"]
    job.offer("a3", suspects=["a1"])  # it wakes, and knows only that its epoch has failed
    assert job.formed("a3") is None
    assert job.told["a1"] == {"newcomers": True}
    job.offer("a0", "a2")  # at a commit
    assert job.formed("a3") is None
    job.offer("a1")
    assert job.formed("a3") == ["a0", "a1", "a2", "a3"]


def test_new_ones_wait_for_a_commit_and_come_last(job):
    job.leave("a0")
    job.offer("a1", "a2", "a3")
    job.enter("b0")
    job.offer("b0")
    job.pass_s(100)
    assert job.formed("b0") is None
    job.offer("a1", "a2", "a3")
    assert job.formed("b0") == ["a1", "a2", "a3", "b0"]


def test_fewer_than_the_minimum_wait_for_new_ones():
    """Case 4 of the field: horovod #3494."""
    job = Job(3, min_ranks=2)
    job.enter("a0", "a1", "a2")
    job.offer("a0", "a1", "a2")
    job.leave("a0", "a1")
    job.offer("a2")
    job.pass_s(100)
    assert job.formed("a2") is None
    job.enter("b0")
    job.offer("b0")
    assert job.formed("a2") == job.formed("b0") == ["a2", "b0"]


def test_when_all_have_died_their_successors_begin_anew(job):
    job.leave("a0", "a1", "a2", "a3")
    job.enter("b0", "b1", "b2", "b3")
    job.offer("b1", "b0", "b3")
    assert job.formed("b0") is None
    job.offer("b2")
    assert job.formed("b0") == ["b0", "b1", "b2", "b3"]


def test_one_that_has_withdrawn_is_not_taken(job):
    job.enter("b0")
    job.offer("b0")
    job.gathering.withdraw("b0")
    assert job.told["b0"] == {"withdrawn": {"running": 4}}
    job.offer("a0", "a1", "a2", "a3")
    assert job.formed("a0") == ["a0", "a1", "a2", "a3"]


def test_those_who_wait_too_are_not_at_work(job):
    job.leave("a1", "a2", "a3")
    job.offer("a0")
    job.gathering.withdraw("a0")
    assert job.told["a0"] == {"withdrawn": {"running": 0}}


def test_when_one_has_finished_all_have(job):
    job.enter("b0")
    job.offer("b0")
    job.leave("a2", finished=True)
    assert job.told["b0"] == {"finished": False}
    job.offer("a1")  # did not hear of it, as a2 was closing
    assert job.told["a1"] == {"finished": True}


def test_one_that_was_left_out_of_the_last_epoch_has_not_finished_with_it(job):
    """Found by the soak: it had returned from train, was frozen, and took itself for rank 0."""
    job.offer("a1", "a2", "a3", suspects=["a0"])
    job.leave("a1", finished=True)
    job.offer("a0")
    assert job.told["a0"] == {"finished": False}


def test_one_that_is_not_of_the_epoch_finishes_nothing(job):
    job.enter("b0")
    job.leave("b0", finished=True)
    assert not job.gathering.finished


@pytest.mark.parametrize(
    ("standings", "expected"),
    [
        ([(0, 0), (0, 0)], (0, 0)),  # all new: rank 0's initial values
        ([(1, 5), (1, 5), (1, 5)], (0, 5)),
        (
            [(1, 5), (1, 6), (1, 6)],
            (0, 5),
        ),  # one had not prepared 6, so nobody was told that it counts
        ([(1, 6), (1, 6), (1, 6)], (0, 6)),  # all had; somebody may have been told
        ([(0, 0), (3, 7), (3, 8)], (1, 7)),  # a new one in front
        ([(2, 9), (3, 7), (0, 0)], (1, 7)),  # was left out of epoch 3, whatever it had prepared
        ([(2, 4), (0, 0)], (0, 4)),  # the others have all died: better than nothing
    ],
)
def test_what_is_common_counts(standings, expected):
    assert agreed([Standing(*s) for s in standings]) == expected
