"""What a Communicator exchanges outside traced code."""

import numpy as np
import pytest

import jaxring
from jaxring.testing import spawn


def objects(comm):
    mine = {"rank": comm.rank, "data": "x" * (comm.rank * 700), "none": None}
    everyone = comm.all_gather_object(mine)
    config = comm.broadcast_object({"lr": 0.1, "of": comm.rank} if comm.rank == 2 else None, root=2)
    first = comm.broadcast_object([comm.rank] * 5000)
    return everyone, config, first


def uneven(comm):
    rows = np.arange(comm.rank * 2 * 3, dtype=np.float32).reshape(-1, 3) + 100 * comm.rank
    return np.asarray(comm.all_gather_uneven(rows)), comm.all_gather_uneven(np.ones(1, bool))


def on_three_ranks(comm):
    return objects(comm), uneven(comm)


@pytest.fixture(scope="module")
def three_ranks():
    return spawn(on_three_ranks, 3)


def test_objects_of_any_size_reach_every_rank(three_ranks):
    expected = [{"rank": r, "data": "x" * (r * 700), "none": None} for r in range(3)]
    for (everyone, config, first), _ in three_ranks:
        assert everyone == expected
        assert config == {"lr": 0.1, "of": 2}
        assert first == [0] * 5000


def test_uneven_arrays_are_joined_in_rank_order(three_ranks):
    expected = np.concatenate(
        [np.arange(r * 6, dtype=np.float32).reshape(-1, 3) + 100 * r for r in range(3)]
    )
    for _, (rows, flags) in three_ranks:
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(flags, [True] * 3)


def differing(comm):
    with pytest.raises(jaxring.MismatchError, match=r"rank \d has float32\[2, .\] and rank \d"):
        comm.all_gather_uneven(np.zeros((2, 3 + comm.rank), np.float32))
    with pytest.raises(jaxring.UsageError, match="got a scalar"):
        comm.all_gather_uneven(1.0)
    with pytest.raises(jaxring.UsageError, match="root 2 is no rank"):
        comm.broadcast_object(1, root=2)
    with pytest.raises(jaxring.UsageError, match="function cannot be pickled"):
        comm.all_gather_object(lambda: 0)
    return comm.all_gather_object(comm.rank)


def another_call(comm):
    try:
        return comm.broadcast_object(1) if comm.rank == 0 else comm.all_gather_object(1)
    except Exception as e:
        return jaxring.errors.from_exception(e)


def errors_of_two_ranks(comm):
    return differing(comm), another_call(comm)


def test_errors_leave_the_communicator_usable_but_a_mismatch():
    for ranks, error in spawn(errors_of_two_ranks, 2):
        assert ranks == [0, 1]
        assert isinstance(error, jaxring.MismatchError)


def test_a_world_of_one():
    with jaxring.init() as comm:
        assert comm.all_gather_object("a") == ["a"]
        assert comm.broadcast_object((1, 2)) == (1, 2)
        np.testing.assert_array_equal(comm.all_gather_uneven(np.arange(3)), [0, 1, 2])
