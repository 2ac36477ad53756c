"""The same code with jax.lax and with jaxring: function x transform x check_vma x mesh x dtypes.

Every rank and position holds a different value, so that a rule that is wrong about ranks, axes or
factors cannot give the right answer. Dtypes are the leaves of one pytree.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxring


class Lax:
    """jax.lax, with what it lacks written in its own terms."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lax, name)

    def pbroadcast(self, x, axis_name, source):  # lax has no lowering for CPUs
        def one(x):
            here = lax.axis_index(axis_name) == source
            y = lax.psum(jnp.where(here, x, jnp.zeros_like(x)), axis_name)
            return vary_over(axis_name, y.astype(x.dtype), x)

        return jax.tree.map(one, x)

    def psum_scatter(self, x, axis_name, *, scatter_dimension=0, tiled=False, **kw):
        """Its batching rule names a wrong batch dimension with tiled=False (jax 0.10 ... 0.12)."""

        def one(x):
            y = jnp.moveaxis(x, scatter_dimension, 0)
            if not tiled:
                return lax.psum_scatter(y, axis_name, tiled=True, **kw)[0]
            return lax.psum_scatter(
                x, axis_name, scatter_dimension=scatter_dimension, tiled=True, **kw
            )

        return jax.tree.map(one, x)

    def all_to_all(self, x, axis_name, split_axis, concat_axis, *, tiled=False, **kw):
        """Its transpose fails with tiled=False and two axes (jax 0.10 ... 0.12)."""

        def one(x):
            if tiled:
                return lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True, **kw)
            rows = jnp.moveaxis(x, split_axis, 0)
            rows = lax.all_to_all(rows, axis_name, 0, 0, tiled=True, **kw)
            return jnp.moveaxis(rows, 0, concat_axis)

        return jax.tree.map(one, x)


class DifferentiableLax(Lax):
    """pmax and pmin, which lax cannot differentiate."""

    def _pick(self, f, x, axis_name, groups):
        to: dict[str, Any] = {} if groups else {"to": "invarying"}

        def one(x):
            rows = lax.all_gather(
                x, axis_name, axis_index_groups=groups, **to if checked(x) else {}
            )
            return f(rows, 0)

        return jax.tree.map(one, x)

    def pmax(self, x, axis_name, axis_index_groups=None):
        return self._pick(jnp.max, x, axis_name, axis_index_groups)

    def pmin(self, x, axis_name, axis_index_groups=None):
        return self._pick(jnp.min, x, axis_name, axis_index_groups)


def checked(x: Any) -> bool:
    return bool(jax.typeof(x).manual_axis_type.varying)


def vary_over(axis_name: Any, y: Any, like: Any) -> Any:
    missing = jax.typeof(like).manual_axis_type.varying - jax.typeof(y).manual_axis_type.varying
    return lax.pcast(y, tuple(missing), to="varying") if missing else y


# Compilation is most of the time.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False


# -- What is compared ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class At:
    """Where a call is made: the mesh, the axes, the groups, and so the number p of ranks."""

    mesh: tuple[tuple[str, int], ...]
    axis: Any
    groups: Any = None

    @property
    def p(self) -> int:
        if self.groups:
            return len(self.groups[0])
        names = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        return int(np.prod([dict(self.mesh)[a] for a in names]))

    @property
    def kw(self) -> dict[str, Any]:
        return {"axis_index_groups": self.groups} if self.groups else {}


GRID = (("x", 2), ("y", 3))
PLACES = {
    "line": At((("x", 4),), "x"),
    "rows": At(GRID, "y"),
    "grid": At(GRID, ("x", "y")),
    "turned": At(GRID, ("y", "x")),
    "alone": At((("x", 1), ("y", 2)), "x"),
    "groups": At((("x", 4),), "x", ((0, 3), (2, 1))),
}

# Of an operand (p, 2p, 3) on each rank.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "psum": lambda m, x, at: m.psum(x, at.axis, **at.kw),
    "pmean": lambda m, x, at: m.pmean(x, at.axis, **at.kw),
    "pmax": lambda m, x, at: m.pmax(x, at.axis, **at.kw),
    "pmin": lambda m, x, at: m.pmin(x, at.axis, **at.kw),
    "psum_scatter": lambda m, x, at: m.psum_scatter(x, at.axis, **at.kw),
    "psum_scatter_tiled": lambda m, x, at: m.psum_scatter(
        x, at.axis, scatter_dimension=1, tiled=True, **at.kw
    ),
    "all_gather": lambda m, x, at: m.all_gather(x, at.axis, axis=1, **at.kw),
    "all_gather_tiled": lambda m, x, at: m.all_gather(x, at.axis, axis=-1, tiled=True, **at.kw),
    "all_gather_invarying": lambda m, x, at: m.all_gather(x, at.axis, to="invarying"),
    "all_to_all": lambda m, x, at: m.all_to_all(x, at.axis, 0, 1, **at.kw),
    "all_to_all_back": lambda m, x, at: m.all_to_all(
        jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), x), at.axis, 2, 0, **at.kw
    ),
    "all_to_all_tiled": lambda m, x, at: m.all_to_all(x, at.axis, 1, 2, tiled=True, **at.kw),
    "ppermute": lambda m, x, at: m.ppermute(x, at.axis, [(i, (i + 1) % at.p) for i in range(at.p)]),
    "ppermute_partial": lambda m, x, at: m.ppermute(x, at.axis, [(at.p - 1, 0)]),
    "pshuffle": lambda m, x, at: m.pshuffle(x, at.axis, [*range(1, at.p), 0]),
    "pswapaxes": lambda m, x, at: m.pswapaxes(x, at.axis, 0, **at.kw),
    "pbroadcast": lambda m, x, at: m.pbroadcast(x, at.axis, at.p - 1),
}
INVARIANT = {"psum", "pmean", "pmax", "pmin"}
WITHOUT_GROUPS = {
    "all_gather_invarying", "ppermute", "ppermute_partial", "pshuffle", "pbroadcast",
}  # fmt: skip


def loss(tree: Any) -> Any:
    """Nonlinear, with another weight for every element. No sines: they take XLA long to compile."""

    def weighted(y: Any) -> Any:
        weights = np.linspace(1, 2, y.size, dtype=np.float32).reshape(y.shape)
        return jnp.sum((y * y.conj()).real * y.real * weights)

    return sum(weighted(y) for y in jax.tree.leaves(tree))


def tangent(x: Any) -> Any:
    return jax.tree.map(lambda x: x * x - 1, x)


def scanned(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Two steps, which differ."""

    def step(factor, x):
        return factor + 1, f(jax.tree.map(lambda x: x * factor.astype(x.dtype), x))

    def run(x):
        return lax.scan(step, jnp.float32(1), jax.tree.map(lambda x: jnp.stack([x, -x]), x))[1]

    return run


def second_vjp(f, x):
    def pulled(x):
        y, back = jax.vjp(f, x)
        return back(jax.tree.map(lambda y: y * y, y))[0]

    return jax.vjp(pulled, x)[1](tangent(x))


VALUES: dict[str, Callable[..., Any]] = {
    "jit": lambda f, x: f(x),
    "vmap": lambda f, x: jax.vmap(f, 1, 1)(jax.tree.map(lambda x: jnp.stack([x, -x], 1), x)),
    "cond": lambda f, x: lax.cond(jnp.array(True), f, f, x),
}
DERIVATIVES: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x: jax.grad(lambda x: loss(f(x)))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (tangent(x),)),
    "vjp_of_vjp": second_vjp,
    "grad_of_vmap": lambda f, x: jax.grad(lambda x: loss(VALUES["vmap"](f, x)))(x),
    "remat": lambda f, x: jax.grad(
        lambda x: loss(jax.checkpoint(f)(jax.tree.map(lambda x: 2 * x, x)))
    )(x),
}


# -- The matrix ------------------------------------------------------------------------------------


def operand(at: At, dtypes: list[str], seed: int = 0) -> dict[str, Any]:
    ranks = int(np.prod([size for _, size in at.mesh]))
    rng = np.random.default_rng(seed)
    shape = (ranks, at.p, 2 * at.p, 3)

    def of(dtype: str) -> Any:
        kind = jnp.dtype(dtype)
        if jnp.issubdtype(kind, jnp.complexfloating):
            return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(kind)
        if jnp.issubdtype(kind, jnp.integer):
            return rng.integers(-9 if kind.kind == "i" else 0, 9, shape).astype(kind)
        return rng.normal(size=shape).astype(kind) if dtype != "bool" else rng.random(shape) < 0.5

    return {dtype: of(dtype) for dtype in dtypes}


def close(ours: Any, theirs: Any) -> None:
    def one(path: Any, a: Any, b: Any) -> None:
        name = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        small = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize <= 2
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        tolerance = 0.02 if small else 2e-5
        np.testing.assert_allclose(
            a.astype(wide), b.astype(wide), rtol=tolerance, atol=tolerance, err_msg=name
        )

    jax.tree_util.tree_map_with_path(one, ours, theirs)


def cases(*places: str, modes: tuple[bool, ...] = (True, False)) -> Any:
    return pytest.mark.parametrize(
        ("name", "place", "check_vma"),
        [
            pytest.param(name, place, mode, id=f"{name}-{place}-{'un' * (not mode)}checked")
            for name in FUNCTIONS
            for place in places
            for mode in modes
            if not (place == "groups" and (name in WITHOUT_GROUPS or (name in INVARIANT and mode)))
        ],
    )


class Comparison:
    """Runs a function of one library's module on both, and compares."""

    def __init__(self, make_spmd: Any, name: str, place: str, check_vma: bool):
        if name == "all_gather_invarying" and not check_vma:
            name = "all_gather"  # without types jax 0.12 says that it is; 0.10 differs
        if place == "turned" and name.startswith(("ppermute", "pshuffle")):
            place = "grid"  # lax numbers ranks by the mesh's order instead
        self.name, self.at = name, PLACES[place]
        self.spmd = make_spmd(dict(self.at.mesh), check_vma)

    def function(self, m: Any) -> Callable[[Any], Any]:
        return lambda x: FUNCTIONS[self.name](m, x, self.at)

    def all_of(self, transforms: dict[str, Any]) -> Callable[..., Any]:
        chosen = dict(transforms)
        if self.at.groups and self.name.startswith(("all_to_all", "pswapaxes")):
            chosen = {k: t for k, t in chosen.items() if "vmap" not in k}  # lax has no rule
        return lambda f, x: {key: transform(f, x) for key, transform in chosen.items()}

    def check(
        self, f: Callable[..., Any], reference: Any, dtypes: list[str], inside: bool = True
    ) -> None:
        """Compares the results of a function on all ranks.

        Args:
          f: (collective, operands) -> pytree of results, of a rank; or with inside=False of all.
        """

        def by(m: Any, x: Any) -> Any:
            collective = self.function(m)
            if inside:
                return self.spmd.map(lambda x: f(collective, x))(x)
            return f(self.spmd.map(collective), x)

        x = operand(self.at, dtypes)
        ours, theirs = (
            jax.tree.map(np.asarray, jax.jit(functools.partial(by, m), compiler_options=QUICK)(x))
            for m in (jaxring, reference)
        )
        close(ours, theirs)


@cases("line", "turned", "alone", "groups")
def test_values(make_spmd, name, place, check_vma):
    case = Comparison(make_spmd, name, place, check_vma)
    case.check(case.all_of(VALUES), Lax(), ["float32"])


@cases("rows", "groups")
def test_gradient_on_part_of_the_axes(make_spmd, name, place, check_vma):
    Comparison(make_spmd, name, place, check_vma).check(
        lambda f, x: (f(x), jax.grad(lambda x: loss(f(x)))(x)), DifferentiableLax(), ["float32"]
    )


@cases("line", "turned")
def test_derivatives(make_spmd, name, place, check_vma):
    case = Comparison(make_spmd, name, place, check_vma)
    case.check(case.all_of(DERIVATIVES), DifferentiableLax(), ["float32"])


@cases("line")
def test_scan(make_spmd, name, place, check_vma):
    Comparison(make_spmd, name, place, check_vma).check(
        lambda f, x: (scanned(f)(x), jax.grad(lambda x: loss(scanned(f)(x)))(x)),
        DifferentiableLax(),
        ["float32"],
    )


@cases("turned")
def test_gradient_outside(make_spmd, name, place, check_vma):
    dtypes = ["float32", "complex64"] if name not in ("pmax", "pmin") else ["float32"]
    Comparison(make_spmd, name, place, check_vma).check(
        lambda f, x: jax.grad(lambda x: loss(f(x)))(x), DifferentiableLax(), dtypes, inside=False
    )


@cases("line")
def test_eager(make_spmd, name, place, check_vma):
    case = Comparison(make_spmd, name, place, check_vma)
    x = operand(case.at, ["float32"])
    ours, theirs = (
        jax.tree.map(np.asarray, case.spmd.map(case.function(m))(x)) for m in (jaxring, Lax())
    )
    close(ours, theirs)


@cases("line", modes=(False,))
def test_dtypes(make_spmd, name, place, check_vma):
    dtypes = ["bfloat16", "float16", "int8", "uint16", "complex64"]
    if name in ("pmax", "pmin"):
        dtypes.remove("complex64")
    if not name.startswith("psum_scatter"):  # lax refuses
        dtypes.append("bool")
    if not name.startswith("p") or name.startswith("pp"):
        dtypes += ["float8_e4m3fn", "uint32", "int16"]
    Comparison(make_spmd, name, place, check_vma).check(lambda f, x: f(x), Lax(), dtypes)


@cases("line", modes=(False,))
def test_wide_dtypes(make_spmd, name, place, check_vma):
    with jax.enable_x64(True):
        dtypes = ["float64", "int64", "uint64", "complex128"]
        if name in ("pmax", "pmin"):
            dtypes.remove("complex128")
        Comparison(make_spmd, name, place, check_vma).check(lambda f, x: f(x), Lax(), dtypes)
