"""Where a call stands in the module that is being lowered: its index, and the call before it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
import weakref
from typing import Any

from jax.extend.mlir import ir

# How many results of calls that overlap with work a call may have as operands, see held_results.
HELD_RESULTS = 256

# A result: the position of its call in the block, its number there, its type. Not the value, which
# would keep its module alive.
_Place = tuple[int, int, Any]


@dataclasses.dataclass
class _Module:
    name: str
    calls: itertools.count[int] = dataclasses.field(default_factory=itertools.count)
    # Of each block: which result of the last ordered call carries the order, and what is held.
    last: dict[int, tuple[_Place, list[_Place]]] = dataclasses.field(default_factory=dict)


_lock = threading.Lock()
_modules: weakref.WeakKeyDictionary[Any, _Module] = weakref.WeakKeyDictionary()
_modules_of_name: collections.Counter[str] = collections.Counter()


def next_site(module: Any) -> tuple[str, int]:
    """(identity of the module that is being lowered, index of this call in program order)."""
    with _lock:
        entry = _modules.get(module)
        if entry is None:
            name = ir.StringAttr(module.operation.attributes["sym_name"]).value
            entry = _Module(f"{name}#{_modules_of_name[name]}")
            _modules_of_name[name] += 1
            _modules[module] = entry
        return entry.name, next(entry.calls)


def previous_call(ctx: Any, target: str) -> list[tuple[Any, Any]]:
    """(result, type) of the ordered call before this one in its block, if there is one.

    As an operand of this call it makes XLA keep the two in program order. Executables of different
    processes may differ by work of one rank only, and XLA then schedules independent calls
    differently. Two ranks were then seen to wait for each other in different calls (in
    tests/multiprocess/test_matching.py, guards_against_nan), as if XLA:CPU ran small programs one
    call at a time, waiting for each; its source was not read. Neither tokens of JAX's ordered
    effects (hundreds of us for each launch) nor optimization_barrier (removed before scheduling)
    would do. Calls in different functions or loops of a program are not ordered.
    """
    return _results(ctx, target)[0]


def held_results(ctx: Any, target: str) -> list[tuple[Any, Any]]:
    """(result, type) of the calls before this one in its block that overlap with work.

    As operands of this call they keep their buffers until it is done. XLA likes to use a gradient
    as soon as it is reduced, to save memory, and to give its buffer to the next layer but one,
    whose computation would wait for that reduction: the gradients of a backward pass are held to
    its last call, as they are where all are reduced together.
    """
    return _results(ctx, target)[1]


def _results(ctx: Any, target: str) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    point: Any = ir.InsertionPoint.current
    operations = point.block.operations
    known = _modules[ctx.module_context.module].last.get(hash(point.block))
    # A block that JAX has thrown away may have had this one's address: is it really one of ours?
    if known is None or not _is_call(operations, known[0][0], target):
        return [], []
    carrier, held = known

    def of(place: _Place) -> tuple[Any, Any]:
        return operations[place[0]].operation.results[place[1]], place[2]

    return [of(carrier)], [of(place) for place in held]


def _is_call(operations: Any, index: int, target: str) -> bool:
    if not 0 <= index < len(operations):
        return False
    attributes = operations[index].operation.attributes
    return "call_target_name" in attributes and (
        ir.StringAttr(attributes["call_target_name"]).value == target
    )


def note_call(
    ctx: Any, target: str, result: int, kind: Any, operands: Any = (), overlapping: Any = ()
) -> None:
    """Remembers the call just emitted, the last operation of its block.

    Args:
      result: the number of the result that the next call waits for.
      kind: its type.
      operands: over which the call may have written, so that they can't be held any longer.
      overlapping: the types of all its results, if it overlaps with work.
    """
    point: Any = ir.InsertionPoint.current
    block, last = point.block, _modules[ctx.module_context.module].last
    index, gone = len(block.operations) - 1, set(operands)
    before = last[hash(block)][1] if (results := held_results(ctx, target)) else []
    held = [place for place, (x, _) in zip(before, results, strict=True) if x not in gone]
    held += [(index, number, aval) for number, aval in enumerate(overlapping)]
    last[hash(block)] = (index, result, kind), held[-HELD_RESULTS:]


def named(label: str) -> contextlib.AbstractContextManager[Any]:
    """Within it operations are called by the label instead of by their primitive, so that XLA calls
    its instruction, and the profiler the slice, by the call's name."""
    if not label:
        return contextlib.nullcontext()
    return ir.Location.name(label, childLoc=ir.Location.current)  # pyright: ignore[reportArgumentType]


def label(ctx: Any, name: str) -> str:
    """How errors, records and the timeline call a call: its name behind those of the
    jax.named_scopes around it, as JAX's own profiler has them."""
    scopes = [s for s in str(ctx.name_stack).split("/") if s and not s.startswith("jit(")]
    if scopes and scopes[-1].startswith("jaxring."):  # ours, of a call without a name
        scopes.pop()
    return "/".join(scopes) or name
