"""install() and replacing_lax(): where lax's collectives go through jaxring, and where not."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring

RANKS = 4
ROWS = np.arange(12, dtype=np.float32).reshape(RANKS, 3) ** 2


@pytest.fixture
def installed():
    jaxring.install()
    yield
    jaxring.uninstall()


def summed(spmd):
    return jax.jit(spmd.map(lambda x: lax.psum(x, "x")))


def call(f):
    """`f` of the rows, waited for, so that what was carried is counted."""
    return np.asarray(f(ROWS))


def total(rows=ROWS):
    return np.broadcast_to(rows.sum(0), rows.shape)


def test_scope(spmd, carried):
    """Case 14 of the design's list, found while planning: a function that was jitted with lax."""
    f = summed(spmd)
    np.testing.assert_array_equal(f(ROWS), total())
    assert carried() == {}
    with jaxring.replacing_lax():
        again = summed(spmd)
        np.testing.assert_array_equal(again(ROWS), total())
        assert sum(carried().values()) == RANKS
        np.testing.assert_array_equal(f(ROWS), total())
        assert sum(carried().values()) == RANKS
    np.testing.assert_array_equal(f(ROWS), total())
    np.testing.assert_array_equal(again(ROWS), total())
    assert carried() == {}


def test_both_executables_stay_cached(spmd, carried):
    traces = []

    def f(x):
        traces.append(x)
        return lax.psum(x, "x")

    jitted = jax.jit(spmd.map(f))
    for _ in range(3):
        call(jitted)
        assert carried() == {}
        with jaxring.replacing_lax():
            call(jitted)
        assert sum(carried().values()) == RANKS
    assert len(traces) == 2


def test_for_the_process(spmd, carried):
    f = summed(spmd)
    call(f)
    jaxring.install()
    try:
        jaxring.install()  # twice is once
        np.testing.assert_array_equal(f(ROWS), total())
        assert sum(carried().values()) == RANKS
    finally:
        jaxring.uninstall()
    call(f)
    assert carried() == {}


def test_install_and_scope_share_executables(spmd, carried):
    traces = []

    def traced(x):
        traces.append(x)
        return lax.psum(x, "x")

    f = jax.jit(spmd.map(traced))
    with jaxring.replacing_lax():
        call(f)
    jaxring.install()
    call(f)
    jaxring.uninstall()
    assert sum(carried().values()) == 2 * RANKS
    assert len(traces) == 1


def test_nested_and_left_by_an_exception(spmd, carried):
    f = summed(spmd)
    with jaxring.replacing_lax():
        with pytest.raises(KeyError), jaxring.replacing_lax():
            {}[f"leaves the inner one after {call(f)}"]
        call(f)
        assert sum(carried().values()) == 2 * RANKS
    with pytest.raises(KeyError), jaxring.replacing_lax():
        {}["leaves the outer one"]
    call(f)
    assert carried() == {}


def test_scope_belongs_to_its_thread(spmd, carried):
    """Two threads call one function at the same time, one inside and one outside."""
    f = summed(spmd)
    barrier = threading.Barrier(2, timeout=60)
    results = {}

    def work(inside):
        for i in range(10):
            barrier.wait()
            if inside:
                with jaxring.replacing_lax():
                    results[inside, i] = np.asarray(f(ROWS + i))
            else:
                results[inside, i] = np.asarray(f(ROWS + i))

    threads = [threading.Thread(target=work, args=(inside,)) for inside in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (_, i), y in results.items():
        np.testing.assert_array_equal(y, total(ROWS + i))
    assert len(results) == 20
    assert sum(carried().values()) == 10 * RANKS


def test_installed_for_all_threads(spmd, carried, installed):
    f = summed(spmd)
    thread = threading.Thread(target=call, args=(f,))
    thread.start()
    thread.join()
    assert sum(carried().values()) == RANKS


def test_pmap(carried):
    f = jax.pmap(lambda x: lax.psum(x, "x"), axis_name="x")
    np.testing.assert_array_equal(f(ROWS), total())
    assert carried() == {}
    with jaxring.replacing_lax():
        np.testing.assert_array_equal(f(ROWS), total())
        assert sum(carried().values()) == RANKS
    call(f)
    assert carried() == {}


def test_eager(spmd, carried, installed):
    got = spmd.map(lambda x: lax.psum(x, "x"))(ROWS)
    np.testing.assert_array_equal(got, total())
    assert sum(carried().values()) == RANKS


def test_control_flow(spmd, carried, installed):
    def f(x):
        def body(carry, _):
            carry = lax.psum(carry, "x") / 8
            return lax.pcast(carry, "x", to="varying") if spmd.check_vma else carry, None

        x, _ = lax.scan(body, x, None, length=2, unroll=2)
        x = lax.fori_loop(0, 2, lambda _, c: body(c, None)[0], x)
        return lax.cond(x.sum() < 0, lambda x: x, lambda x: body(x, None)[0], x)

    got = spmd(f, ROWS)
    np.testing.assert_allclose(got, total() / 8 / 2**4, rtol=1e-6)
    assert sum(carried().values()) == 5 * RANKS


def test_over_several_axes_and_under_vmap(grid, carried, installed):
    rows = np.arange(6 * 6, dtype=np.float32).reshape(6, 2, 3)

    def f(x):
        return (
            lax.psum(x, ("y", "x")),
            jax.vmap(lambda r: lax.psum(r, "y"), 1, 1)(x),
            lax.pmax(x, "x"),
        )

    both, batched, largest = grid(f, rows)
    by_axes = rows.reshape(2, 3, 2, 3)
    np.testing.assert_array_equal(both, np.broadcast_to(rows.sum(0), rows.shape))
    np.testing.assert_array_equal(batched, by_axes.sum(1).repeat(3, 0).reshape(rows.shape))
    np.testing.assert_array_equal(largest, np.tile(by_axes.max(0), (2, 1, 1)))
    assert sum(carried().values()) == 3 * 6


def test_several_calls_stay_apart(spmd, installed):
    """Calls with equal types must not share one call index, as cached lowerings would."""

    def f(x):
        return [lax.psum(x + i, "x") for i in range(6)]

    for i, y in enumerate(spmd(f, ROWS)):
        np.testing.assert_array_equal(y, total(ROWS + i))


def test_uneven_groups(make_spmd, carried, installed):
    spmd = make_spmd({"x": RANKS}, check_vma=False)
    got = spmd(lambda x: lax.psum(x, "x", axis_index_groups=[[0, 2, 3], [1]]), ROWS)
    expected = np.stack([ROWS[[0, 2, 3]].sum(0), ROWS[1], *[ROWS[[0, 2, 3]].sum(0)] * 2])
    np.testing.assert_array_equal(got, expected)
    assert sum(carried().values()) > 0


@pytest.mark.parametrize("f", [lax.pmax, lax.pmin])
def test_nan_propagates(spmd, f, installed):
    """XLA:CPU drops it; numpy keeps it."""
    rows = ROWS.copy()
    rows[1, 2] = np.nan
    got = spmd(lambda x: f(x, "x"), rows)
    assert np.isnan(got[:, 2]).all()
    assert not np.isnan(got[:, :2]).any()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bool", "int32"), ("int8", "int8"), ("bfloat16", "bfloat16"), ("complex64", "complex64")],
)
def test_dtypes(spmd, dtype, expected, carried, installed):
    rows = (ROWS % 7).astype(dtype)
    got = spmd(lambda x: lax.psum(x, "x"), rows)
    assert got.dtype == expected
    sums = rows.astype(expected).sum(0, dtype=expected)
    np.testing.assert_array_equal(got, np.broadcast_to(sums, rows.shape))
    assert sum(carried().values()) == RANKS
    if dtype == "bool":
        got = spmd(lambda x: lax.pmax(x, "x"), rows)
        np.testing.assert_array_equal(got, np.broadcast_to(rows.max(0), rows.shape))
        assert sum(carried().values()) == RANKS


def test_settings_apply(spmd, carried, installed):
    f = summed(spmd)
    for algorithm in ("ring", "tree"):
        with jaxring.config.override(algorithm=algorithm):
            np.testing.assert_array_equal(f(ROWS), total())
        assert carried() == {algorithm: RANKS}


def test_names_in_errors(spmd, installed):
    """A device that skips the call is named, and so is the call."""

    def f(x):
        skips = lax.axis_index("x") == 2
        return lax.cond(skips, lambda x: x, lambda x: spmd.vary(lax.psum(x, "x")), x)

    with (
        jaxring.config.override(timeout_s=0.5),
        pytest.raises(jax.errors.JaxRuntimeError, match=r"lax\.psum") as caught,
    ):
        spmd(f, ROWS)
    error = jaxring.errors.from_exception(caught.value)
    assert isinstance(error, jaxring.TimeoutError)
    assert error.missing_ranks == (2,)


# -- What stays lax's ------------------------------------------------------------------------------


def test_axes_that_xla_partitions_stay_lax(make_spmd, carried, installed, check_vma):
    mesh = make_spmd({"x": 2, "y": 2}).mesh
    f = jax.shard_map(
        lambda x: lax.psum(x, "x"),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(),
        axis_names={"x"},
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(f)(ROWS), ROWS[:2] + ROWS[2:])
    assert carried() == {}


def test_groups_of_one_stay_lax(check_vma, make_spmd, carried, installed):
    spmd = make_spmd({"x": 1, "y": 2}, check_vma)
    np.testing.assert_array_equal(spmd(lambda x: lax.psum(x, "x"), ROWS[:2]), ROWS[:2])
    assert carried() == {}


def test_positional_axes_stay_lax(make_spmd, carried, installed):
    spmd = make_spmd({"x": RANKS}, check_vma=False)
    got = spmd(lambda x: lax.psum(x[:, None], ("x", 0)), ROWS)
    np.testing.assert_array_equal(got[:, 0], np.full(RANKS, ROWS.sum()))
    assert carried() == {}


def test_dtypes_that_we_lack_stay_lax(make_spmd, carried, installed):
    spmd = make_spmd({"x": RANKS}, check_vma=False)
    rows = (ROWS % 3).astype(jnp.int4)
    got = spmd(lambda x: lax.psum(x, "x"), rows)
    np.testing.assert_array_equal(got.astype(int), total(rows.astype(int)))
    assert carried() == {}


def test_constants_and_sizes_fold(spmd, carried, installed):
    assert spmd(lambda x: x[0] * 0 + lax.psum(2, "x") + lax.axis_size("x"), ROWS)[0] == 12
    assert carried() == {}
