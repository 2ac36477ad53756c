"""The drop-ins: signatures and constants are lax's; values are in test_parity."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import Tracer

import jaxring

NAMES = [
    "psum", "pmean", "pmax", "pmin", "psum_scatter", "all_gather", "all_to_all", "ppermute",
    "pbroadcast", "pshuffle", "pswapaxes",
]  # fmt: skip
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    """Every call of lax's binds in the same way; ours may have keywords more."""
    ours = inspect.signature(getattr(jaxring, name)).parameters
    theirs = inspect.signature(getattr(lax, name)).parameters
    positional = [p for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == [p.name for p in positional]
    for parameter in theirs.values():
        own = ours[parameter.name]
        assert (own.kind, own.default) == (parameter.kind, parameter.default)
    extra = [p for n, p in ours.items() if n not in theirs]
    assert all(p.kind is p.KEYWORD_ONLY for p in extra)


def test_re_exported():
    assert jaxring.pcast is lax.pcast


@pytest.mark.parametrize("name", ["axis_index", "axis_size"])
def test_of_axes_as_in_lax(spmd, name):
    ours, theirs = getattr(jaxring, name), getattr(lax, name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    rows = np.zeros((4, 1), np.int32)
    np.testing.assert_array_equal(
        spmd(lambda x: x + ours("x"), rows), spmd(lambda x: x + theirs("x"), rows)
    )
    with pytest.raises(NameError, match="nope"):
        ours("nope")


@pytest.mark.parametrize("name", NAMES)
def test_documented(name):
    text = inspect.getdoc(getattr(jaxring, name))
    assert text
    assert "Derivative:" in text or "otherwise as" in text
    assert "Example" in text


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin"])
@pytest.mark.parametrize(
    "value", [1, 2.5, True, np.float16(2), np.int8(3), np.arange(3), [1, 2.0]], ids=repr
)
def test_constants_fold_as_in_lax(spmd, name, value):
    def f(x):
        ours = getattr(jaxring, name)(value, "x")
        theirs = getattr(lax, name)(value, "x")

        def same(a, b):
            if isinstance(b, Tracer):  # pmax and pmin do not fold there
                a, b = jax.typeof(a), jax.typeof(b)
                assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
                assert a.manual_axis_type == b.manual_axis_type
            else:
                assert type(a) is type(b)

        jax.tree.map(same, ours, theirs)
        return jax.tree.map(jnp.asarray, (ours, theirs))

    ours, theirs = spmd(f, X)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_axis_size_by_psum(spmd):
    def f(x):
        size = jaxring.psum(1, "x")
        assert type(size) is int
        return x / size

    np.testing.assert_allclose(spmd(f, X), X / 4)


@pytest.mark.parametrize("name", ["psum", "pmean", "pmax", "pmin", "psum_scatter", "pswapaxes"])
def test_errors_carry_the_name_that_was_called(name):
    args = (0,) if name == "pswapaxes" else ()
    with pytest.raises(jaxring.UnboundAxisError, match=rf"^jaxring.{name}: axis name 'i' is not"):
        getattr(jaxring, name)(X, "i", *args)


def test_groups_under_check_vma(make_spmd):
    groups = [[0, 1], [2, 3]]
    checked, unchecked = make_spmd({"x": 4}, True), make_spmd({"x": 4}, False)
    for name in ("psum", "pmean", "pmax", "pmin"):
        f = functools.partial(getattr(jaxring, name), axis_name="x", axis_index_groups=groups)
        with pytest.raises(jaxring.UsageError, match=rf"jaxring.{name}: with axis_index_groups"):
            checked(f, X)
        unchecked(f, X)
    f = lambda x: jaxring.psum_scatter(x[:2], "x", axis_index_groups=groups)  # noqa: E731
    np.testing.assert_array_equal(checked(f, X), unchecked(f, X))


def test_pmap():
    def f(x):
        total = jaxring.psum(x, "i")
        return total, jaxring.all_gather(x, "i"), jaxring.ppermute(x, "i", [(0, 1)])

    total, gathered, permuted = jax.pmap(f, axis_name="i")(X)
    np.testing.assert_allclose(total, np.broadcast_to(X.sum(0), X.shape), rtol=1e-6)
    np.testing.assert_array_equal(gathered, np.broadcast_to(X, (4, *X.shape)))
    np.testing.assert_array_equal(permuted[1], X[0])
