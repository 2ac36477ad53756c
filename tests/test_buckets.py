"""Which leaves of a pytree travel together."""

import numpy as np
import pytest

from jaxring._src.buckets import pack, pack_backward


@pytest.mark.parametrize(
    ("kinds", "sizes", "limit", "expected"),
    [
        ("", [], 4, []),
        ("a", [9], 4, [[0]]),
        ("aaa", [1, 2, 3], 6, [[0, 1, 2]]),
        ("aaa", [1, 2, 3], 5, [[0, 1], [2]]),
        ("aab", [3, 3, 1], 4, [[0], [1], [2]]),
        ("abab", [1, 1, 1, 1], 9, [[0, 2], [1, 3]]),
        ("aaa", [9, 1, 1], 4, [[0], [1, 2]]),
        ("aa", [0, 0], 1, [[0, 1]]),
    ],
)
def test_pack(kinds, sizes, limit, expected):
    assert pack(kinds, sizes, limit) == expected


def test_pack_backward_fills_from_the_last_leaf():
    assert pack("aaa", [3, 1, 1], 4) == [[0, 1], [2]]
    assert pack_backward("aaa", [3, 1, 1], 4) == [[1, 2], [0]]


def test_every_leaf_is_in_one_bucket_of_its_kind():
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(0, 40))
        kinds = [str(k) for k in rng.integers(0, 3, count)]
        sizes = [int(s) for s in rng.integers(0, 20, count)]
        for packed in (pack(kinds, sizes, 25), pack_backward(kinds, sizes, 25)):
            assert sorted(i for bucket in packed for i in bucket) == list(range(count))
            for bucket in packed:
                assert bucket == sorted(bucket)
                assert len({kinds[i] for i in bucket}) == 1
                assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= 25
