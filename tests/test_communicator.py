import socket

import numpy as np
import pytest

import jaxring
from jaxring._src import sharding


def test_world_of_one():
    comm = jaxring.init()
    try:
        assert (comm.rank, comm.world_size, comm.local_rank, comm.local_world_size) == (0, 1, 0, 1)
        assert comm.hosts == (socket.gethostname(),)
        assert jaxring.init() is comm
        with pytest.raises(jaxring.UsageError, match="rank 0 of 1 already"):
            jaxring.init(1, 2, "localhost:5000")
        half = comm.split("a")
        assert half is not None
        assert half.world_size == 1
        assert comm.split(None) is None
        with pytest.raises(jaxring.UsageError, match="expected color as an int"):
            comm.split(1.5)  # pyright: ignore[reportArgumentType]
    finally:
        comm.close()
    with pytest.raises(jaxring.UsageError, match="closed"):
        comm.split(0)
    with jaxring.init() as again:
        assert again != comm
        assert len({again, comm, again}) == 2


@pytest.mark.parametrize(("size", "n"), [(10, 4), (3, 4), (0, 2), (8, 4), (1000, 7)])
def test_shares_cover_all_once(size, n):
    data = np.arange(size)
    parts = [sharding.share_of(data, rank, n) for rank in range(n)]
    np.testing.assert_array_equal(np.concatenate(parts), data)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_share_of_containers():
    class Samples:  # as in PyTorch: single indices only
        def __len__(self):
            return 5

        def __getitem__(self, i):
            return i + int(i) * 10

    x = np.arange(10).reshape(5, 2)
    assert sharding.share_of([1, 2, 3, 4, 5], 1, 2) == [4, 5]
    assert sharding.share_of((1, 2, 3), 0, 2) == (1, 2)
    assert sharding.share_of("abc", 0, 2) == "ab"
    assert sharding.share_of(range(5), 1, 2) == range(3, 5)
    assert sharding.share_of(Samples(), 1, 2) == [33, 44]
    images, labels = sharding.share_of((x, x[:, 0]), 0, 2)
    assert images.shape == (3, 2)
    assert labels.shape == (3,)
    assert sharding.share_of({"a": x}, 1, 2)["a"].shape == (2, 2)
    assert [a.shape for a in sharding.share_of([x, x, x], 0, 2)] == [
        (5, 2)
    ] * 2  # a list of samples
    with pytest.raises(jaxring.UsageError, match=r"same first dimension, got \[4, 5\]"):
        sharding.share_of((x, x[:4]), 0, 2)
    with pytest.raises(jaxring.UsageError, match="got generator"):
        sharding.share_of((i for i in range(3)), 0, 2)
