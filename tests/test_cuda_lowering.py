"""What is lowered for GPUs, on a machine that has none: the custom calls and their attributes."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxring
from jaxring._src import cuda, cuda_connections, cuda_lowering

X = np.arange(4 * 4 * 8, dtype=np.float32).reshape(4, 4, 8)
CHECKS = [jax.export.DisabledSafetyCheck.custom_call("jaxring_collective")]

# Of an operand (4, 8) on each of 4 ranks, with the types of two packed leaves and of the result.
CALLS = {
    "allreduce": (lambda x, a: jaxring.allreduce(x, a), "64xf32", "64xf32"),
    "reduce_scatter": (lambda x, a: jaxring.reduce_scatter(x, a), "4x16xf32", "16xf32"),
    "all_gather": (lambda x, a: jaxring.all_gather(x, a), "64xf32", "4x64xf32"),
    "all_to_all": (lambda x, a: jaxring.all_to_all(x, a, 0, 0), "4x16xf32", "4x16xf32"),
    "broadcast": (lambda x, a: jaxring.broadcast(x, a, 2), "64xf32", "64xf32"),
    "reduce": (lambda x, a: jaxring.reduce(x, a, "max", root=1), "64xf32", "64xf32"),
    "ppermute": (lambda x, a: jaxring.ppermute(x, a, [(0, 1), (1, 0)]), "64xf32", "64xf32"),
}
every_call = pytest.mark.parametrize("name", CALLS)


def custom_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if "custom_call @jaxring_collective" in line]


def attribute(line: str, name: str) -> str:
    """The text of an attribute of a custom call, as the module prints it."""
    found = re.search(rf'\b{name} = (dense<[^>]*>|"[^"]*"|[^ ,}}]+)', line)
    assert found, (name, line)
    return found[1].strip('"')


def exported(f: Any, *xs: Any) -> str:
    return jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=CHECKS)(
        *xs
    ).mlir_module()


@every_call
def test_leaves_are_packed_into_one_buffer(spmd, name):
    call, packed, result = CALLS[name]
    (line,) = custom_calls(exported(spmd.map(lambda x: call([x, x + 1], "x")), X))
    assert line.endswith(f": (tensor<{packed}>) -> (tensor<i32>, tensor<{result}>)") or (
        f": (tensor<{packed}>) -> (tensor<i32>, tensor<{result}>) loc" in line
    )
    assert attribute(line, "collective") == name
    assert attribute(line, "shapes") == "float32[4,8] float32[4,8]"
    assert attribute(line, "group_members") == "dense<[0, 1, 2, 3]>"
    assert attribute(line, "group_sizes") == "dense<4>"
    assert attribute(line, "ordered") == "true"
    assert "has_side_effect = true" in line


def test_attributes_of_a_call(make_spmd):
    spmd = make_spmd({"x": 4})
    with jaxring.config.override(deterministic=True):
        text = exported(spmd.map(lambda x: jaxring.reduce(x, "x", "mean", root=3, name="grads")), X)
    (line,) = custom_calls(text)
    assert attribute(line, "op") == "mean"
    assert attribute(line, "root") == "3"
    assert attribute(line, "name") == "grads"
    assert attribute(line, "deterministic") == "true"
    # Nothing of this machine: XLA says on the other which rank a device is.
    for table in ("device_ids", "processes", "local_ids"):
        assert attribute(line, table) == "dense<>"


def test_calls_are_chained_and_numbered(spmd):
    def f(x: Any) -> Any:
        return [jaxring.allreduce(x, "x"), jaxring.allreduce((x > 0).astype(jnp.int32), "x")]

    first, second = custom_calls(exported(spmd.map(f), X))
    assert [attribute(line, "call") for line in (first, second)] == ["0", "1"]
    result = re.match(r"\s*(%\w+):2 =", first)
    assert result
    assert f"@jaxring_collective({result[1]}#0, " in second


def test_a_barrier_passes_its_leaves_in_place(spmd):
    f = spmd.map(lambda x: jaxring.barrier("x", {"a": x, "b": x.astype(jnp.int32)}))
    (line,) = custom_calls(exported(f, X))
    assert line.count("output_operand_alias<") == 2
    assert attribute(line, "shapes") == ""


def test_pmap():
    f = jax.pmap(lambda x: jaxring.allreduce(x, "x"), axis_name="x", devices=jax.devices()[:4])
    (line,) = custom_calls(exported(f, X))
    assert attribute(line, "group_members") == "dense<[0, 1, 2, 3]>"


def test_sub_axes_and_permuted_meshes(make_spmd):
    spmd = make_spmd({"x": 2, "y": 3}, devices=jax.devices()[5::-1])
    x = np.zeros((6, 3), np.float32)
    (line,) = custom_calls(exported(spmd.map(lambda x: jaxring.allreduce(x, "x")), x))
    assert attribute(line, "group_members") == "dense<[0, 3, 1, 4, 2, 5]>"
    assert attribute(line, "group_sizes") == "dense<2>"


def test_an_abstract_mesh():
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(
        lambda x: jaxring.allreduce(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )
    traced = jax.jit(f).trace(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert len(custom_calls(traced.lower(lowering_platforms=("cuda",)).as_text())) == 1


def test_nothing_is_emitted_for_one_device(make_spmd):
    spmd = make_spmd({"x": 1, "y": 4})
    assert custom_calls(exported(spmd.map(lambda x: jaxring.allreduce(x, "x")), X[:, :1])) == []


def test_install(spmd):
    with jaxring.replacing_lax():
        text = exported(spmd.map(lambda x: lax.psum(x, "x")), X)
    (line,) = custom_calls(text)
    assert attribute(line, "collective") == "allreduce"


def test_symbolic_shapes(make_spmd):
    (n,) = jax.export.symbolic_shape("n")
    f = make_spmd({"x": 4}).map(lambda x: jaxring.allreduce([x, x + 1], "x"))
    text = exported(f, jax.ShapeDtypeStruct((4, n, 2), np.float32))
    assert len(custom_calls(text)) == 1


@pytest.mark.parametrize("has_rows", [False, True])
def test_packing_and_its_inverse(has_rows):
    leaves = [np.arange(12.0).reshape(4, 3), np.arange(16.0).reshape(4, 2, 2), np.ones((4, 0))]
    leaves = [leaf.astype(np.float32) for leaf in leaves]
    packed = cuda_lowering._joined(leaves, has_rows)
    assert packed.shape == ((4, 7) if has_rows else (28,))
    back = cuda_lowering._cut(packed, [jax.typeof(jnp.asarray(x)) for x in leaves], has_rows)
    for leaf, got in zip(leaves, back, strict=True):
        np.testing.assert_array_equal(leaf, got)


# -- What cannot be served, on a machine that has GPUs ---------------------------------------------


class Native:
    """A stand-in for jaxring._cuda."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.reason = ""
        self.peers = True

    def why_not_served(self, collective: str, op: str, dtype: str, *how: Any) -> str:
        self.log.append((collective, op, dtype, *how))
        return self.reason

    def all_peers(self, devices: list[int]) -> bool:
        return self.peers

    def why_not_by_nccl(self, collective: str, op: str, dtype: str, deterministic: bool) -> str:
        return f"NCCL has no {op} of {dtype}" if dtype == "bfloat16" else ""


class Gpu:
    platform = "gpu"

    def __init__(self, number: int, host: int = 0):
        self.process_index = 0
        self.id = self.local_hardware_id = number
        self.slice_index = host


@pytest.fixture
def gpus(monkeypatch):
    """This process has four GPUs, as far as the lowering sees."""
    native = Native()
    found = [Gpu(i) for i in range(4)]
    monkeypatch.setattr(cuda, "has_gpus", lambda: True)
    monkeypatch.setattr(cuda, "module", lambda: native)
    monkeypatch.setattr(cuda, "register", lambda: None)
    monkeypatch.setattr(cuda, "gives_cliques", lambda: True)
    monkeypatch.setattr(cuda_lowering, "_devices", lambda mesh: found)
    return native, found


def lowered(f: Any, *xs: Any) -> str:
    return jax.jit(f).trace(*xs).lower(lowering_platforms=("cuda",)).as_text()


def test_tables_of_this_processs_gpus(gpus, spmd):
    native, _ = gpus
    (line,) = custom_calls(lowered(spmd.map(lambda x: jaxring.allreduce(x, "x")), X))
    assert attribute(line, "local_ids") == "dense<[0, 1, 2, 3]>"
    assert native.log == [("allreduce", "sum", "float32", "auto", False, 4)]


def unserved(f: Any, why: str) -> None:
    with pytest.raises(jaxring.UsageError, match=why):
        lowered(f, X)
    with (
        jaxring.config.override(fallback="lax"),
        pytest.warns(UserWarning, match=rf"{why}.*; jax\.lax serves it instead"),
    ):
        text = lowered(f, X)
    assert custom_calls(text) == []
    assert "stablehlo.all_reduce" in text


def test_what_the_kernels_lack(gpus, spmd):
    gpus[0].reason = "there is no such kernel"
    unserved(spmd.map(lambda x: jaxring.allreduce(x, "x")), "there is no such kernel")


def test_gpus_that_cannot_reach_each_other(gpus, spmd, monkeypatch):
    monkeypatch.setattr(cuda, "gives_cliques", lambda: False)
    gpus[0].peers = False
    f = spmd.map(lambda x: jaxring.allreduce(x, "x"))
    unserved(f, r"GPUs \[0, 1, 2, 3\] cannot read each other's memory")


def test_what_only_nccl_could_carry_and_cannot(gpus, spmd):
    gpus[0].peers = False
    f = spmd.map(lambda x: jaxring.allreduce(x, "x"))
    assert len(custom_calls(lowered(f, X))) == 1  # NCCL can
    g = spmd.map(lambda x: jaxring.allreduce(x.astype("bfloat16"), "x").astype("float32"))
    unserved(g, r"cannot read each other's memory, and NCCL has no sum of bfloat16")


@pytest.mark.parametrize("theirs", [None, "GPUs there are too old"])
def test_one_processs_reason_is_everybodys(gpus, make_spmd, monkeypatch, theirs):
    """Of two processes that lower one program, so that it stays one."""
    for gpu in gpus[1][2:]:
        gpu.process_index = 1
    tables = []

    def exchange(
        store: Any, prefix: str, members: Any, me: int, mine: Any, timeout_s: float
    ) -> Any:
        tables.append((prefix, members, me, mine))
        return {me: mine, 1: {"reason": theirs}}

    monkeypatch.setattr(cuda_connections.bootstrap, "exchange", exchange)
    monkeypatch.setattr(cuda_connections, "_agreed", {})
    monkeypatch.setattr(cuda_lowering, "JaxStore", lambda: None)
    f = make_spmd({"x": 4}).map(lambda x: jaxring.allreduce(x, "x"))
    assert len(custom_calls(lowered(f, X))) == 1  # an error needs no agreement
    assert tables == []
    with jaxring.config.override(fallback="lax"):
        if theirs is None:
            assert len(custom_calls(lowered(f, X))) == 1
        else:
            with pytest.warns(UserWarning, match=f"{theirs}.*; jax\\.lax serves it instead"):
                assert custom_calls(lowered(f, X)) == []
    assert [(members, me, mine) for _, members, me, mine in tables] == [
        ([0, 1], 0, {"reason": None})
    ]


def test_groups_of_unequal_size(make_spmd):
    spmd = make_spmd({"x": 4}, check_vma=False)
    f = spmd.map(lambda x: jaxring.allreduce(x, "x", axis_index_groups=[[0], [1, 2, 3]]))
    unserved(f, r"on GPUs all groups must have one size, but they have \[1, 3\]")


def test_no_module(gpus, spmd, monkeypatch):
    monkeypatch.setattr(cuda, "module", lambda: None)
    f = spmd.map(lambda x: jaxring.allreduce(x, "x"))
    with pytest.raises(
        jaxring.UsageError, match="jaxring has no backend for cuda; it has one for cpu;"
    ):
        lowered(f, X)
    assert len(custom_calls(exported(f, X))) == 1  # runs elsewhere
    with jaxring.replacing_lax():
        assert custom_calls(lowered(spmd.map(lambda x: lax.psum(x, "x")), X)) == []


@pytest.mark.parametrize(("dtype", "wide"), [("bfloat16", "f32"), ("int16", "i32")])
def test_sums_across_hosts_are_wider(gpus, make_spmd, dtype, wide):
    for gpu in gpus[1][2:]:
        gpu.slice_index = 1
    spmd = make_spmd({"x": 4})
    x = X.astype(dtype)
    (line,) = custom_calls(lowered(spmd.map(lambda x: jaxring.allreduce([x, x], "x")), x))
    assert f"(tensor<64x{wide}>) -> (tensor<i32>, tensor<64x{wide}>)" in line
    narrow = {"bfloat16": "bf16", "int16": "i16"}[dtype]
    (line,) = custom_calls(lowered(spmd.map(lambda x: jaxring.all_gather(x, "x")), x))
    assert f"x8x{narrow}>)" in line.split("->")[0]  # what only moves keeps its type


def test_across_hosts_nothing_is_in_rank_order(gpus, make_spmd):
    gpus[1][3].slice_index = 1
    f = make_spmd({"x": 4}).map(lambda x: jaxring.allreduce(x, "x"))
    with jaxring.config.override(deterministic=True):
        unserved(f, "deterministic=True does not reach across hosts")
