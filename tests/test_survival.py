"""What programs do to a collective, each checked for the whole family: transforms, control flow,
odd shapes, donation, export."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxring

RANKS = 4
X = (np.arange(RANKS * RANKS * 3).reshape(RANKS, RANKS, 3) * 7919 % 251).astype(np.float32)
SHIFT = [(r, (r + 1) % RANKS) for r in range(RANKS)]

# name -> (function of a rank's (4, 3) row that gives a (4, 3) row, the same on the rows of all
# ranks). All are linear.
FAMILY = {
    "allreduce": (
        lambda x: jaxring.allreduce(x, "x"),
        lambda xs: np.broadcast_to(xs.sum(0), xs.shape),
    ),
    "reduce_scatter": (
        lambda x: x * 0 + jaxring.reduce_scatter(x, "x"),
        lambda xs: np.broadcast_to(xs.sum(0)[:, None], xs.shape),
    ),
    "all_gather": (
        lambda x: jaxring.all_gather(x[1], "x"),
        lambda xs: np.broadcast_to(xs[:, 1], xs.shape),
    ),
    "all_to_all": (
        lambda x: jaxring.all_to_all(x, "x", 0, 0),
        lambda xs: np.swapaxes(xs, 0, 1),
    ),
    "broadcast": (
        lambda x: jaxring.broadcast(x, "x", root=2),
        lambda xs: np.broadcast_to(xs[2], xs.shape),
    ),
    "reduce": (
        lambda x: jaxring.reduce(x, "x", root=1),
        lambda xs: np.where((np.arange(RANKS) == 1)[:, None, None], xs.sum(0), 0),
    ),
    "ppermute": (lambda x: jaxring.ppermute(x, "x", SHIFT), lambda xs: np.roll(xs, 1, 0)),
    "barrier": (lambda x: jaxring.barrier("x", x), lambda xs: xs),
}


@pytest.fixture(params=FAMILY)
def member(request):
    return FAMILY[request.param]


def test_inner_jit_called_twice(spmd, member):
    f, reference = member
    inner = jax.jit(f)
    got = spmd(lambda x: inner(x) + 2 * inner(3 * x), X)
    np.testing.assert_array_equal(got, 7 * reference(X))


def test_loops_and_branches(spmd, member):
    """scan with unroll, while, and cond with a predicate that is equal on all ranks."""
    f, reference = member

    def g(x):
        scanned = lax.scan(lambda _, s: (None, f(x * s)), None, jnp.arange(3.0), unroll=2)[1]
        looped = lax.while_loop(
            lambda state: state[0] < 2,
            lambda state: (state[0] + 1, spmd.vary(f(state[1]))),
            (0, x),
        )[1]
        positive = jaxring.allreduce(x.sum(), "x") > 0
        branched = lax.cond(positive, lambda: spmd.vary(f(x)), lambda: spmd.vary(f(-x)))
        return scanned, looped, branched

    scanned, looped, branched = spmd(g, X)
    np.testing.assert_array_equal(scanned, reference(X)[:, None] * np.arange(3)[:, None, None])
    np.testing.assert_array_equal(looped, reference(reference(X)))
    np.testing.assert_array_equal(branched, reference(X))


def test_differentiation(spmd, member):
    """remat, custom_vjp, linearize and linear_transpose against the map itself, which is linear."""
    f, reference = member
    tangent = X[::-1].copy()

    def loss(f):
        return lambda x: jnp.sum(jnp.sin(1e-2 * f(x)))

    doubled = jax.custom_vjp(f)
    doubled.defvjp(lambda x: jax.vjp(f, x), lambda pull, ct: (2 * pull(ct)[0],))

    def g(x, t):
        y, linear = jax.linearize(f, x)
        return {
            "linearize": (y, linear(t)),
            "grad": jax.grad(loss(f))(x),
            "remat": jax.grad(loss(jax.checkpoint(f)))(x),
            "custom_vjp": jax.grad(loss(doubled))(x),
        }

    got = spmd(g, X, tangent)
    np.testing.assert_array_equal(got["linearize"][0], reference(X))
    np.testing.assert_array_equal(got["linearize"][1], reference(tangent))
    np.testing.assert_allclose(got["remat"], got["grad"], rtol=1e-6)
    np.testing.assert_allclose(got["custom_vjp"], 2 * got["grad"], rtol=1e-6)
    # Over all ranks' rows: <ct, f(x)> = <f^T(ct), x>, exactly for these integers.
    (pulled,) = jax.jit(jax.linear_transpose(spmd.map(f), X))(tangent)
    assert np.vdot(pulled, X) == np.vdot(tangent, reference(X))


def test_donation(spmd, member):
    f, reference = member
    sharding = jax.NamedSharding(spmd.mesh, P("x"))
    x, kept = (jax.device_put(X, sharding) for _ in range(2))
    got = jax.jit(spmd.map(lambda x, kept: f(x) + 0 * kept), donate_argnums=0)(x, kept)
    np.testing.assert_array_equal(got, reference(X))
    np.testing.assert_array_equal(kept, X)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_zero_size(spmd, member, dtype):
    f, _ = member
    got = spmd(lambda x: jnp.asarray(f(x)).astype(dtype), X[..., :0].astype(dtype))
    assert got.shape == (RANKS, RANKS, 0)


def test_abstract_mesh_lowers(spmd, member):
    f, _ = member
    g = jax.shard_map(
        lambda x: spmd.vary(f(x[0]))[None],
        mesh=spmd.mesh.abstract_mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=spmd.check_vma,
    )
    traced = jax.jit(g).trace(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert "jaxring_collective" in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_export(spmd, member):
    """Called on the same devices and on others; see also test_survival_processes.py."""
    f, reference = member
    check = jax.export.DisabledSafetyCheck.custom_call("jaxring_collective")
    exported = jax.export.export(jax.jit(spmd.map(f)), disabled_checks=[check])(
        jax.ShapeDtypeStruct(X.shape, X.dtype)
    )
    again = jax.export.deserialize(exported.serialize())
    for devices in (jax.devices()[:RANKS], jax.devices()[: RANKS - 1 : -1][:RANKS]):
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        x = jax.device_put(X, jax.NamedSharding(mesh, P("x")))
        np.testing.assert_array_equal(jax.jit(again.call)(x), reference(X))


# -- A predicate that differs between ranks --------------------------------------------------------


def test_divergent_predicate(spmd):
    """lax.psum ends the process here. We name both calls."""

    def f(x):
        return lax.cond(
            lax.axis_index("x") == 2,
            lambda x: spmd.vary(jaxring.allreduce(x, "x", name="then")),
            lambda x: spmd.vary(jaxring.allreduce(2 * x, "x", "max", name="else")),
            x,
        )

    with (
        jaxring.config.override(timeout_s=1),
        pytest.raises(jax.errors.JaxRuntimeError) as caught,
    ):
        spmd(f, X)
    error = jaxring.errors.from_exception(caught.value)
    assert isinstance(error, jaxring.MismatchError)
    assert "then'" in str(error)  # in the scope of its branch
    assert "else'" in str(error)
    np.testing.assert_array_equal(spmd(FAMILY["allreduce"][0], X), FAMILY["allreduce"][1](X))


# -- Case 7 of the design's list: jax #3970, jax-finufft #226 --------------------------------------


def test_gradients_equal_those_of_one_process(spmd):
    """Through allreduce plainly, and inside a scan."""
    weights = X[0] / 100

    def model(reduce):
        def loss(w, x):
            plain = reduce(jnp.sum(jnp.tanh(w * x / 100)))

            def step(carry, row):
                return carry * 0.5 + reduce(jnp.sum(row * w)), None

            return plain + lax.scan(step, plain * 0, x / 100)[0]

        return loss

    def single(w):
        return sum(model(lambda v: v)(w, x) for x in X)  # every rank's loss is this sum

    expected = jax.grad(single)(weights)

    def inside(x):
        g = jax.grad(model(lambda v: jaxring.allreduce(v, "x")))(jnp.asarray(weights), x)
        # check_vma=True sums over the ranks; without it each cotangent is summed, the gradient not
        return g if spmd.check_vma else jaxring.allreduce(g, "x", "mean")

    for row in spmd(inside, X):
        np.testing.assert_allclose(row, expected, rtol=1e-5)
