"""What all collectives share: fusing, meshes of one device, meshes that XLA partitions in part,
other platforms, export."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxring

X = np.random.default_rng(0).normal(size=(4, 4, 8)).astype(np.float32)

# Of an operand (p, 8) on each of p ranks.
CALLS = {
    "allreduce": lambda x, a: jaxring.allreduce(x, a),
    "reduce_scatter": lambda x, a: jaxring.reduce_scatter(x, a),
    "all_gather": lambda x, a: jaxring.all_gather(x, a),
    "all_to_all": lambda x, a: jaxring.all_to_all(x, a, 0, 0),
    "broadcast": lambda x, a: jaxring.broadcast(x, a),
    "reduce": lambda x, a: jaxring.reduce(x, a, "max"),
    "ppermute": lambda x, a: jaxring.ppermute(x, a, [(0, 0)]),
    "barrier": lambda x, a: jaxring.barrier(a, x),
}
every_call = pytest.mark.parametrize("name", CALLS)


def line():
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def emitted(f, *xs):
    return jax.jit(f).lower(*xs).as_text().count("custom_call @jaxring_collective")


@every_call
def test_leaves_of_a_dtype_travel_together(spmd, name):
    f = spmd.map(lambda x: CALLS[name]([x, x + 1, (x > 0).astype(jnp.int32), x * 2], "x"))
    assert emitted(f, X) == (1 if name == "barrier" else 2)


@every_call
def test_buckets(spmd, name):
    f = spmd.map(lambda x: CALLS[name]([x, x + 1, x + 2], "x"))
    with jaxring.config.override(bucket_bytes=300):  # a leaf has 128 bytes
        assert emitted(f, X) == (1 if name == "barrier" else 2)


@every_call
def test_nothing_is_emitted_for_one_device(make_spmd, check_vma, name):
    spmd = make_spmd({"x": 1, "y": 4}, check_vma)
    f = spmd.map(lambda x: CALLS[name](x, "x"))
    x = X[:, :1]
    assert emitted(f, x) == 0
    expected = {
        "reduce_scatter": x[:, 0],
        "all_gather": x[:, None],
    }.get(name, x)
    np.testing.assert_array_equal(spmd(lambda x: CALLS[name](x, "x"), x), expected)


def test_groups_of_one_and_an_empty_permutation(make_spmd):
    spmd = make_spmd({"x": 4}, False)
    alone = [[0], [1], [2], [3]]
    got = spmd(lambda x: jaxring.all_gather(x, "x", axis_index_groups=alone), X)
    np.testing.assert_array_equal(got, X[:, None])
    one = make_spmd({"x": 1}, False)
    np.testing.assert_array_equal(one(lambda x: jaxring.ppermute(x, "x", []), X[:1]), 0 * X[:1])


@pytest.mark.parametrize("name", [name for name in CALLS if name != "barrier"])
def test_empty_pytrees(spmd, name):
    got = spmd(lambda x: (x, CALLS[name]({}, "x")), X)
    assert got[1] == {}


@every_call
@pytest.mark.parametrize("mode", ["checked", "unchecked"])
def test_explicit_axes_that_are_not_manual(name, mode):
    mesh = jax.make_mesh((4, 2), ("x", "e"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(X, jax.NamedSharding(mesh, P("x", None, "e")))

    def run(call):
        f = jax.shard_map(
            lambda x: spread(call(x[0], "x"), mode)[None],
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
            axis_names={"x"},
            check_vma=mode == "checked",
        )
        return jax.jit(f)(x)

    ours = run(CALLS[name])
    assert "e" in jax.typeof(ours).sharding.spec
    full = jax.shard_map(
        lambda x: spread(CALLS[name](x[0], "x"), mode)[None],
        mesh=line(),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=mode == "checked",
    )
    np.testing.assert_allclose(ours, jax.jit(full)(X), rtol=1e-6)


def spread(y, mode):
    if mode == "unchecked" or "x" in jax.typeof(y).manual_axis_type.varying:
        return y
    return lax.pcast(y, "x", to="varying")


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jaxring.reduce_scatter(x, "x", scatter_dimension=1, tiled=True),
        lambda x: jaxring.all_gather(x, "x", axis=1, tiled=True),
        lambda x: jaxring.all_to_all(x, "x", 1, 0, tiled=True),
        lambda x: jaxring.all_to_all(x, "x", 0, 1, tiled=True),
    ],
    ids=["reduce_scatter", "all_gather", "split", "concat"],
)
def test_cut_along_an_explicit_axis(call):
    mesh = jax.make_mesh((4, 2), ("x", "e"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(X, jax.NamedSharding(mesh, P("x", None, "e")))
    f = jax.shard_map(
        lambda x: call(x[0])[None], in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, mesh=mesh
    )
    text = r"dimension 1, which the call cuts or joins, is sharded over the Explicit mesh axis 'e'"
    with pytest.raises(jaxring.UsageError, match=text):
        jax.jit(f)(x)


@every_call
def test_auto_axes_that_are_not_manual(name):
    mesh = jax.make_mesh((4, 2), ("x", "auto"), axis_types=(AxisType.Auto,) * 2)
    f = jax.shard_map(
        lambda x: spread(CALLS[name](x[0], "x"), "checked")[None],
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
        axis_names={"x"},
    )
    text = rf"^jaxring.{name}: XLA partitions the Auto mesh axes \('auto',\).*fallback"
    with pytest.raises(jaxring.UsageError, match=text):
        jax.jit(f)(X)
    with (
        jaxring.config.override(fallback="lax"),
        pytest.warns(UserWarning, match=r"jax\.lax serves it instead"),
    ):
        lowered = jax.jit(f).lower(X)
    assert "jaxring_collective" not in lowered.as_text()
    if name in ("broadcast", "ppermute"):  # the rest has partitioner trouble of lax's own
        got = lowered.compile()(X)
        full = jax.shard_map(
            lambda x: spread(CALLS[name](x[0], "x"), "checked")[None],
            mesh=jax.make_mesh(
                (4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
            ),
            in_specs=P("x"),
            out_specs=P("x"),
        )
        np.testing.assert_allclose(got, jax.jit(full)(X), rtol=1e-6)


def lowered_for_tpu(f):
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        lambda x: spread(f(x[0], "x"), "checked")[None],
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct(X.shape, X.dtype))
    return traced.lower(lowering_platforms=("tpu",)).as_text()


@every_call
def test_platform_without_a_backend(name):
    with pytest.raises(
        jaxring.UsageError, match=rf"^jaxring.{name}: jaxring has no backend for tpu"
    ):
        lowered_for_tpu(CALLS[name])
    with (
        jaxring.config.override(fallback="lax"),
        pytest.warns(UserWarning, match=r"no backend for tpu; jax\.lax serves it instead"),
    ):
        text = lowered_for_tpu(CALLS[name])
    assert "jaxring_collective" not in text
    assert "stablehlo." in text


@every_call
def test_abstract_mesh_and_export(name):
    mesh = line()
    f = jax.jit(
        jax.shard_map(
            lambda x: spread(CALLS[name](x[0], "x"), "checked")[None],
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        )
    )
    exported = jax.export.export(
        f, disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jaxring_collective")]
    )(X)
    again = jax.export.deserialize(exported.serialize())
    x = jax.device_put(X, jax.NamedSharding(mesh, P("x")))
    np.testing.assert_array_equal(again.call(x), f(X))


@every_call
def test_inputs_are_not_written(spmd, name):
    """The in-place barrier copies an operand that is needed again."""
    x = jax.device_put(X, jax.NamedSharding(spmd.mesh, P("x")))
    jax.block_until_ready(jax.jit(spmd.map(lambda x: (CALLS[name](x, "x"), x + 1)))(x))
    np.testing.assert_array_equal(x, X)


@every_call
def test_donation(spmd, name):
    x = jax.device_put(X, jax.NamedSharding(spmd.mesh, P("x")))
    f = spmd.map(lambda x: CALLS[name](x + 0, "x"))
    expected = np.asarray(jax.jit(f)(x))
    if expected.shape == X.shape:
        np.testing.assert_array_equal(jax.jit(f, donate_argnums=0)(x), expected)
        assert x.is_deleted()


@every_call
def test_name_appears_in_errors_and_calls(spmd, name):
    def named(x):
        f = getattr(jaxring, name)
        args = {"all_to_all": (0, 0), "ppermute": ([(0, 0)],)}.get(name, ())
        return f("x", x, name="mine") if name == "barrier" else f(x, "x", *args, name="mine")

    assert 'name = "mine"' in jax.jit(spmd.map(named)).lower(X).as_text()
    with pytest.raises(
        jaxring.UnboundAxisError, match=rf"^jaxring.{name} 'mine': axis name 'x' is"
    ):
        named(X)
