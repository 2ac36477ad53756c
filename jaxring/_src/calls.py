"""What every collective's call carries besides operands and ranks: algorithm, name, settings."""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jax.interpreters import mlir

from jaxring._src import buckets, custom_call, engine, native_facts, partial_auto
from jaxring._src.axes import Where
from jaxring._src.settings import MAX_BYTES, parse_selection
from jaxring.config import config
from jaxring.errors import UsageError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_warned: set[tuple[str, int, str]] = set()


@dataclasses.dataclass(frozen=True)
class How:
    """How a call is carried out. A static parameter of every primitive.

    Attributes:
      algorithms: (name, smallest, largest message in bytes), as the setting `algorithm` has it.
      name: the user's name of the call, or "".
      deterministic, chunk_bytes: the settings of these names.
      in_place: the setting of this name, where the collective can heed it.
      fallback: whether lax serves the call on a platform without a backend.
      layout: text of what else ranks must agree on: the dimension that is cut.
      overlaps: results lie where the operands were, if the program has computed these itself.
        XLA would give such an operand's buffer to what it computes next, which would then wait for
        the call. (An argument is nobody else's, and writing over it costs a copy.)
    """

    algorithms: tuple[tuple[str, int, int], ...] = ()
    name: str = ""
    deterministic: bool = False
    chunk_bytes: int = 0
    fallback: bool = False
    in_place: bool = False
    layout: str = ""
    overlaps: bool = False

    def algorithm_for(self, size_bytes: int) -> str:
        """The algorithm's name for a message of this size."""
        fitting = (n for n, low, high in self.algorithms if low <= size_bytes <= high)
        return next(fitting, "auto")


def serving(collective: str) -> list[str]:
    """The names of the algorithms that serve a collective."""
    entries = native_facts.lists()["algorithms"]
    return [e["name"] for e in entries if collective in e.get("collectives", ["allreduce"])]


def describe(collective: str, name: str | None) -> str:
    """How errors call the call: ``jaxring.allreduce 'gradients'``; UsageError for a name that is
    none."""
    if name is not None and not isinstance(name, str):
        raise UsageError(f"jaxring.{collective}: expected name as a string or None, got {name!r}")
    return f"jaxring.{collective}" + (f" {name!r}" if name else "")


def how(
    algorithm: str, name: str | None, call: str, collective: str = "allreduce", op: str = "sum"
) -> How:
    """Checks the algorithm's name against the native list and takes the trace-time settings.

    A name in the setting `algorithm` that does not serve the collective means "auto".

    Raises:
      UsageError: an unknown algorithm, one that does not serve the collective, or under
        `deterministic` one that does not sum in rank order.
    """
    entries = native_facts.lists()["algorithms"]
    known = [entry["name"] for entry in entries]
    if algorithm == "auto":
        selection = parse_selection(config.algorithm)
    else:
        selection = ((algorithm, 0, MAX_BYTES),)
    chosen = [n for n, _, _ in selection]
    for unknown in (n for n in chosen if n not in known):
        raise UsageError(f"{call}: unknown algorithm {unknown!r}; use {one_of(known)}")
    able = serving(collective)
    if algorithm != "auto" and algorithm not in able:
        raise UsageError(
            f"{call}: algorithm {algorithm!r} does not serve {collective}; use"
            f" {one_of(dict.fromkeys(['auto', *able]))}"
        )
    if config.deterministic and op:
        rank_order = [e["name"] for e in entries if e["rank_order"] and e["name"] in able]
        for other in (n for n in chosen if n in able and n not in ("auto", *rank_order)):
            raise UsageError(
                f"{call}: algorithm {other!r} does not sum in rank order, which deterministic=True"
                f" asks for; use {one_of(dict.fromkeys(['auto', *rank_order]))}"
            )
    return How(
        tuple((n if n in able else "auto", low, high) for n, low, high in selection),
        name or "",
        config.deterministic,
        config.chunk_bytes,
        config.fallback == "lax",
        config.in_place and collective == "allreduce",
    )


def lower(
    ctx: Any,
    values: Sequence[Any],
    collective: str,
    where: Where,
    how: How,
    *,
    alone: Callable[..., Any] = lambda x: x,
    **attributes: Any,
) -> Sequence[Any]:
    """The lowering rule where there is a backend: one custom call, or none if every rank is alone.

    Args:
      alone: the result of a rank that is alone, from its operand.
      attributes: those of `custom_call.emit` that the collective has besides.
    """
    groups = custom_call.groups_of(ctx, where, describe(collective, how.name))
    if groups and max(len(g) for g in groups) == 1:
        return mlir.lower_fun(lambda *xs: [alone(x) for x in xs])(ctx, *values)
    size_bytes = max(
        sum(buckets.size_bytes(aval) for aval in avals) for avals in (ctx.avals_in, ctx.avals_out)
    )
    return custom_call.emit(
        ctx,
        values,
        collective=collective,
        algorithm=how.algorithm_for(size_bytes),
        groups=groups,
        where=where,
        how=how,
        **{"in_place": how.in_place, **attributes},
    )


# -- lax in our place (fallback="lax") -------------------------------------------------------------


def served_by_lax(where: Where, how: How, call: str) -> bool:
    """Whether lax must serve the call because XLA partitions some mesh axes itself.

    Raises:
      UsageError: so it is, and the setting `fallback` does not allow it.
    """
    auto, _ = partial_auto.others(where)
    if not auto:
        return False
    problem = f"{call}: XLA partitions the Auto mesh axes {auto} and would gather the operand"
    if not how.fallback:
        raise UsageError(
            f"{problem}; let jax.shard_map make all axes manual, make these Explicit"
            " (jax.make_mesh's axis_types), or set"
            ' jaxring.config.update("fallback", "lax")'
        )
    warn_once(f"{problem}; jax.lax serves it instead")
    return True


def without_backend(collective: str, by_lax: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering rule on platforms for which there is no backend, or none that can serve a call.

    Args:
      by_lax: (operand, where=, **params) -> result, with jax.lax.
    """

    def rule(
        ctx: Any, *values: Any, where: Where, how: How, why: str = "", **params: Any
    ) -> Sequence[Any]:
        platforms = ", ".join(ctx.platforms or ctx.module_context.platforms)
        call = describe(collective, how.name)
        problem = f"{call}: {why or f'jaxring has no backend for {platforms}'}"
        if not how.fallback or where.communicator:
            there = "" if why else f"; it has one for {', '.join(engine.backends())}"
            raise UsageError(
                f"{problem}{there}; compute {'on CPUs' if why else 'there'}, or on a mesh set"
                ' jaxring.config.update("fallback", "lax")'
            )
        warn_once(f"{problem}; jax.lax serves it instead")
        return mlir.lower_fun(lambda *xs: [by_lax(x, where=where, **params) for x in xs])(
            ctx, *values
        )

    return rule


# -- Text ------------------------------------------------------------------------------------------


def one_of(names: Any) -> str:
    """Text such as "sum, mean or max"."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def warn_once(text: str) -> None:
    """Warns at the user's line, once for each line and text.

    Not left to Python's own once-per-line rule, because tracing the same line again is not news and
    test runners switch that rule off.
    """
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    site = (frame.f_code.co_filename, frame.f_lineno, text)
    if site not in _warned:
        warnings.warn(text, UserWarning, stacklevel=depth)
        _warned.add(site)
