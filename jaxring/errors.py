"""The kinds of errors that jaxring raises, and how to get them back out of JAX's.

Under `jax.jit` XLA turns every error of a handler into a `JaxRuntimeError`, or from the second call
on perhaps a `ValueError` (jit's fast path, program on the calling thread), whose text contains the
kind, for example ``jaxring.TimeoutError: allreduce …``. `from_exception` gives the typed object:

    try:
        step(params, batch).block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError) as e:
        error = jaxring.errors.from_exception(e)
        if isinstance(error, jaxring.TimeoutError):
            print(error.missing_ranks)
"""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "AbortedError",
    "Error",
    "MismatchError",
    "PeerError",
    "TimeoutError",
    "UnboundAxisError",
    "UsageError",
    "from_exception",
]

_ATTRIBUTES = ("missing_ranks", "rank", "host", "pid", "call", "sequence", "signatures")


class Error(Exception):
    """Base of all errors of jaxring.

    Attributes that do not apply to an error, or are not known, are None.

    Attributes:
      missing_ranks: tuple of the ranks that did not come (TimeoutError).
      rank, host, pid: the process that the error is about: which died, left or disagrees, or of
        the `missing_ranks` the first one.
      call: text that names the call, for example ``allreduce 'gradients'``.
      sequence: which operation on its communicator it was, counted from 0.
      signatures: what each side called: the texts that differ (MismatchError).
    """

    missing_ranks: tuple[int, ...] | None
    rank: int | None
    host: str | None
    pid: int | None
    call: str | None
    sequence: int | None
    signatures: Sequence[str] | None

    def __init__(self, message: str = "", **attributes: Any):
        unknown = set(attributes) - set(_ATTRIBUTES)
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: unknown attributes {sorted(unknown)}; known: {_ATTRIBUTES}"
            )
        super().__init__(message)
        if (missing := attributes.get("missing_ranks")) is not None:
            attributes["missing_ranks"] = tuple(missing)
        # In __dict__, which pickle restores: testing.spawn sends errors between processes.
        self.__dict__.update({name: attributes.get(name) for name in _ATTRIBUTES})

    @property
    def message(self) -> str:
        """The sentence, without the kind."""
        return str(self.args[0]) if self.args else ""


class UsageError(Error, ValueError):
    """A call that cannot work as written; raised while tracing or before anything runs."""


class UnboundAxisError(UsageError, NameError):
    """An axis name that no enclosing shard_map, pmap or vmap binds."""


class MismatchError(Error):
    """Ranks disagree about the call: shape, dtype, op, algorithm, order or number of calls."""


class TimeoutError(Error, builtins.TimeoutError):
    """A wait has reached its deadline (`timeout_s`); `missing_ranks` says who did not come."""


class PeerError(Error):
    """Another rank's process died or closed its connection."""


class AbortedError(Error):
    """The communicator was aborted, here or by another rank, or an earlier error broke it."""


_KINDS: dict[str, type[Error]] = {
    kind.__name__: kind
    for kind in (UsageError, UnboundAxisError, MismatchError, TimeoutError, PeerError, AbortedError)
}
_PATTERN = re.compile(r"jaxring\.(" + "|".join(_KINDS) + r"): ([^\n]*)")
_details_sources: list[Callable[[str], Mapping[str, Any] | None]] = []


def from_exception(exception: BaseException) -> BaseException:
    """The typed error that `exception`'s text, or that of what caused it, carries.

    Args:
      exception: any exception, usually that of a jitted call.

    Returns:
      An object of one of the kinds above, with the attributes that this process still knows and
      with `exception` as its `__cause__`; `exception` itself if it is typed or not about jaxring.
    """
    for candidate in _chain(exception):
        if isinstance(candidate, Error):
            return candidate
        error = parse(str(candidate))
        if error is not None:
            error.__cause__ = exception
            return error
    return exception


def parse(text: str) -> Error | None:
    """The typed error in `text` of the form ``…jaxring.<Kind>: <sentence>``, or None."""
    match = _PATTERN.search(text)
    if match is None:
        return None
    kind, message = _KINDS[match[1]], match[2].rstrip()
    attributes: dict[str, Any] = {}
    for source in _details_sources:
        found = source(message)
        attributes.update({k: v for k, v in (found or {}).items() if k in _ATTRIBUTES})
    return kind(message, **attributes)


def said(exception: BaseException) -> str:
    """Its kind and message, as other ranks are told: text in which nothing is trimmed on its way,
    since what is known of an error is found again by its text."""
    name = type(exception).__name__
    return f"{name}: {exception}".rstrip() if str(exception).strip() else name


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """Around native functions, which raise RuntimeError("jaxring.<Kind>: …"): raises the kind."""
    try:
        yield
    except RuntimeError as e:
        error = parse(str(e))
        if error is None:
            raise
        raise error from None


def add_details_source(source: Callable[[str], Mapping[str, Any] | None]) -> None:
    """`source(sentence)` fills in attributes; jaxring/_src/engine.py adds the native module's."""
    if source not in _details_sources:
        _details_sources.append(source)


def _chain(exception: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = exception
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
