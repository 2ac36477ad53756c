"""Seats in a gathering over real connections to a store's server, without ranks."""

import concurrent.futures
import json
import time

import pytest

from jaxring import errors
from jaxring._src.elastic_seat import StoreSeat
from jaxring._src.store import TcpStore
from jaxring._src.store_server import GONE_KEY


@pytest.fixture
def seat(server):
    """seat(number): a place in a job of three."""
    seats = []

    def take(number, wait_s=30.0):
        seats.append(StoreSeat(TcpStore(server.address, "secret"), "g", number, 3, wait_s))
        return seats[-1]

    yield take
    for taken in seats:
        taken.leave(False)


@pytest.fixture
def form():
    """form(*seats): all at once; the epochs, or errors, in their order."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:

        def all_at_once(*seats, timeout_s=20.0, min_ranks=2):
            rows = [{"name": f"seat {i}"} for i in range(len(seats))]
            futures = [
                pool.submit(seat.form, row, [], min_ranks, timeout_s)
                for seat, row in zip(seats, rows, strict=True)
            ]
            return [future.exception() or future.result() for future in futures]

        yield all_at_once


def test_all_get_the_same_members_and_what_they_say(seat, form):
    epochs = form(seat(2), seat(0), seat(1))
    assert [epoch.rank for epoch in epochs] == [2, 0, 1]
    assert all(epoch.members == epochs[0].members for epoch in epochs)
    assert [m.row["name"] for m in epochs[0].members] == ["seat 1", "seat 2", "seat 0"]


def test_one_that_ends_is_not_waited_for_and_new_ones_are_told_of(seat, form):
    first, second, third = seat(0), seat(1), seat(2)
    form(first, second, third)
    third.leave(False)
    begin = time.monotonic()
    epochs = form(first, second)
    assert time.monotonic() - begin < 5
    assert [(e.number, e.rank, len(e.members)) for e in epochs] == [(2, 0, 2), (2, 1, 2)]
    assert not first.newcomers()
    late = seat(2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        joined = pool.submit(late.form, {}, [], 2, 20.0)
        deadline = time.monotonic() + 5
        while not (first.newcomers() and second.newcomers()) and time.monotonic() < deadline:
            time.sleep(0.01)
        epochs = form(first, second)
        assert joined.result().rank == 2
    assert [e.number for e in epochs] == [3, 3]
    assert not first.newcomers()


def test_deadlines(server, seat, form):
    (error,) = form(seat(0), timeout_s=0.3)
    assert isinstance(error, errors.TimeoutError)
    assert "fewer than min_ranks=2 ranks have come within 0.3 s" in str(error)
    first, second = seat(0, wait_s=0.2), seat(1, wait_s=0.2)
    assert [e.number for e in form(first, second)] == [1, 1]  # the third does not come
    (error,) = form(seat(2), timeout_s=0.3)
    assert "2 ranks are at work and have not committed within 0.3 s" in str(error)


def test_the_launcher_tells_who_is_gone(server, seat, form):
    TcpStore(server.address, "secret").set(f"{GONE_KEY}0", "1")
    assert [e.number for e in form(seat(0), seat(2))] == [1, 1]


def test_the_last_word_and_the_end_of_the_store(server, seat, form):
    first, second = seat(0), seat(1)
    form(first, second, seat(2))
    first.leave(True)
    assert form(second) == [None]
    third = seat(2)
    (error,) = form(third)
    assert isinstance(error, errors.AbortedError)
    assert "finished the training without this process" in str(error)
    third._connection.close()
    third._connection = TcpStore(server.address, "secret").gather("other", "m")
    third._connection.send_bytes(json.dumps({"do": "something else"}).encode())
    (error,) = form(third)
    assert isinstance(error, errors.PeerError)
    assert "the store in which ranks meet is gone" in str(error)
    assert not third.newcomers()
