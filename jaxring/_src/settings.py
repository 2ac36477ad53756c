"""One row of the table in jaxring/config.py: a value with its default, sources and scopes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast, overload

import jax

from jaxring.errors import UsageError

T = TypeVar("T")
_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
MAX_BYTES = (1 << 63) - 1


def seconds(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not (number > 0 and math.isfinite(number)):
        raise ValueError
    return number


def bytes(value: Any) -> int:
    """An int, or text such as "512", "64k", "32M", "1MiB"."""
    if isinstance(value, str):
        match = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", value.strip().lower())
        if match is None:
            raise ValueError
        value = int(match[1]) * _SUFFIXES[match[2]]
    if isinstance(value, bool) or int(value) != value or not 0 <= value <= MAX_BYTES:
        raise ValueError
    return int(value)


def at_least_one_byte(value: Any) -> int:
    number = bytes(value)
    if number < 1:
        raise ValueError
    return number


def switch(value: Any) -> bool:
    if isinstance(value, str):
        value = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[
            value.strip().lower()
        ]
    if value not in (True, False):
        raise ValueError
    return bool(value)


def one_of(*names: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError
        return cast(str, value)

    return check


def text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value.strip()


def folder(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or (path and not os.access(path, os.W_OK | os.X_OK)):
        raise ValueError
    return os.path.abspath(path) if path else ""


def json_file(value: Any) -> str:
    path = os.fspath(value)
    if not path:
        return ""
    if not path.endswith(".json"):
        raise ValueError
    return os.path.join(folder(os.path.dirname(path) or "."), os.path.basename(path))


def parse_selection(text: str) -> tuple[tuple[str, int, int], ...]:
    """Parses the setting `algorithm` into (name, first byte count, last byte count) entries.

    Args:
      text: one name, ``"ring"``, or a table by message size, ``"direct:0-64k;ring:1m-max"``. Sizes
        are bytes with an optional k, m or g (powers of 1024); both ends belong to the range; the
        first entry that holds wins.

    Raises:
      ValueError: the text has another form.
    """
    if re.fullmatch(r"[a-z_]+", text):
        return ((text, 0, MAX_BYTES),)
    entries = []
    for part in text.split(";"):
        match = re.fullmatch(r"\s*([a-z_]+):(\w+)-(\w+)\s*", part)
        if match is None:
            raise ValueError
        low, high = bytes(match[2]), MAX_BYTES if match[3] == "max" else bytes(match[3])
        if low > high:
            raise ValueError
        entries.append((match[1], low, high))
    return tuple(entries)


def selection(known: Callable[[], Sequence[str]]) -> Callable[[Any], str]:
    """Checks the setting `algorithm`: a name, a table in a text, or a file by `jaxring tune`.

    Args:
      known: () -> the names of all algorithms.
    """

    def check(value: Any) -> str:
        text = os.fspath(value)
        if text.endswith(".json"):
            text = selection_of_file(text)
        if not {name for name, _, _ in parse_selection(text)} <= set(known()):
            raise ValueError
        return text

    return check


def selection_of_file(path: str) -> str:
    """The table that `jaxring tune` has written; ValueError if it is not one."""
    try:
        with open(path) as file:
            return cast(str, json.load(file)["algorithm"])
    except OSError:
        raise ValueError from None


def settings_of_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Names and values that a file of jaxring.tuning.tune_step, or of `jaxring tune`, holds."""
    try:
        with open(path) as file:
            document = json.load(file)
        found = document.get("settings", {"algorithm": document.get("algorithm")})
        return {str(name): value for name, value in found.items()}
    except (OSError, ValueError, AttributeError, TypeError) as e:
        raise UsageError(
            f"{path} is no file of settings, such as jaxring.tuning.tune_step and"
            f" `jaxring tune` write: {e}"
        ) from None


class Setting(Generic[T]):
    """One row of the table. As a class attribute of Config it is also the access to the value."""

    def __init__(self, default: T, when: str, check: Callable[[Any], T], expected: str, doc: str):
        assert when in ("trace", "run")
        self.name, self.default, self.when, self.expected, self.doc = (
            "",
            default,
            when,
            expected,
            doc,
        )
        self._check = check
        self._base: T = default
        self._base_source = "default"
        self._overrides: list[tuple[object, T]] = []  # run time only; the last one counts
        # A user context is part of jit's cache key; it has one value for the process and can have
        # another one in a thread.
        self._context = jax.make_user_context(default) if when == "trace" else None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "JAXRING_" + self.name.upper()

    def validate(self, value: Any, given_as: str | None = None) -> T:
        """The value in its own type; UsageError if it has no meaning for this setting."""
        try:
            return self._check(value)
        except (ValueError, TypeError, KeyError, OverflowError):
            raise UsageError(
                f"{given_as or self.name}: expected {self.expected}, got {value!r}"
            ) from None

    @property
    def value(self) -> T:
        if self._context is not None:
            return self._context.value
        return self._overrides[-1][1] if self._overrides else self._base

    @property
    def source(self) -> str:
        """Where the value comes from: default, environment, update or override."""
        return self._base_source if not self._overridden() else "override"

    def _overridden(self) -> bool:
        if self._context is not None:
            return self._context.value != self._base
        return bool(self._overrides)

    def set_base(self, value: T, source: str) -> None:
        self._base, self._base_source = value, source
        if self._context is not None:
            self._context.set_global(value)

    @contextlib.contextmanager
    def scope(self, value: T, changed: Callable[[Setting[Any]], None]) -> Iterator[None]:
        if self._context is not None:
            with self._context(value):
                yield
            return
        entry = (object(), value)
        self._overrides.append(entry)
        try:
            changed(self)
            yield
        finally:
            self._overrides.remove(entry)
            changed(self)

    @overload
    def __get__(self, instance: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Setting[T] | T:
        return self if instance is None else self.value

    def __set__(self, instance: Any, value: Any) -> None:
        instance.update(self.name, value)
