"""Settings: one table, read by attributes, environment variables, `jaxring info` and the docs.

    jaxring.config.timeout_s                      # read
    jaxring.config.update("timeout_s", 60)        # for the process
    with jaxring.config.override(algorithm="ring"):
        step(params)                              # for a scope

Each setting can also be given as the environment variable JAXRING_ + its name in capitals.

*Trace-time* settings are part of `jax.jit`'s cache key: a change recompiles, and going back finds
the old executable. `override` holds them for the calling thread. *Run-time* settings belong to the
process, because the engine's own threads read them; `override` holds them, in all threads, until
its scope ends.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jaxring._src import settings as _rules
from jaxring._src.native_facts import algorithm_names
from jaxring._src.settings import Setting
from jaxring.errors import UsageError

__all__ = ["Config", "Setting", "config"]

_LEVELS = ("debug", "info", "warning", "error")


class Config:
    """All settings; there is one object, `jaxring.config`."""

    timeout_s = Setting(
        300.0,
        "run",
        _rules.seconds,
        "a number of seconds > 0",
        "Deadline of every wait, in seconds; then TimeoutError.",
    )
    warn_s = Setting(
        30.0,
        "run",
        _rules.seconds,
        "a number of seconds > 0",
        "After this many seconds of waiting, log who is missing.",
    )
    log_level = Setting(
        "warning",
        "run",
        _rules.one_of(*_LEVELS),
        f"one of {', '.join(_LEVELS)}",
        "Level of the logger named jaxring.",
    )
    flight_dir = Setting(
        "",
        "run",
        _rules.folder,
        "a folder that exists and can be written, or an empty text",
        "Folder for records of the last operations, written on an error or SIGUSR2; empty: none.",
    )
    timeline = Setting(
        "",
        "run",
        _rules.json_file,
        "a name that ends in .json, in a folder that can be written, or an empty text",
        "File of trace events for Perfetto, trace.json: rank 3 writes trace.3.json; empty: none.",
    )
    transport = Setting(
        "auto",
        "run",
        _rules.one_of("auto", "tcp", "verbs"),
        '"auto", "tcp" or "verbs"',
        "Between hosts: the provider of libfabric; auto: tcp. Counts at init.",
    )
    interface = Setting(
        "auto",
        "run",
        _rules.text,
        "the name of a network interface, or an address",
        "Between hosts: this host's network interface, or its address there, to listen at; auto:"
        " the one that leads to the coordinator. Counts at init.",
    )
    algorithm = Setting(
        "auto",
        "trace",
        _rules.selection(algorithm_names),
        f"one of {', '.join(algorithm_names())}, a table such as"
        ' "direct:0-64k;ring:1m-max" of these names, or a file by `jaxring tune`',
        'Algorithm for calls that say "auto": a name, a table of names by message size, or the file'
        " of such a table.",
    )
    deterministic = Setting(
        False,
        "trace",
        _rules.switch,
        "True or False",
        "Sum in rank order: the same bits for every bucket and chunk size.",
    )
    bucket_bytes = Setting(
        32 << 20,
        "trace",
        _rules.at_least_one_byte,
        "bytes >= 1, such as 32m",
        "Largest fused operation of gradients, in bytes.",
    )
    chunk_bytes = Setting(
        0,
        "trace",
        _rules.bytes,
        "bytes >= 0, such as 256k",
        "Bytes that one hop moves; 0 chooses by message size.",
    )
    in_place = Setting(
        False,
        "trace",
        _rules.switch,
        "True or False",
        "An allreduce writes its result over its operand: no fresh memory where the operand is"
        " donated or a temporary of the program; XLA copies an operand that is still needed.",
    )
    fallback = Setting(
        "error",
        "trace",
        _rules.one_of("error", "lax"),
        '"error" or "lax"',
        "What a call that jaxring cannot serve does: raise, or use jax.lax and warn once.",
    )

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._subscribers: dict[str, list[Callable[[Any], None]]] = {}
        for setting in self.settings():
            if (text := os.environ.get(setting.variable)) is not None:
                setting.set_base(setting.validate(text, given_as=setting.variable), "environment")

    @classmethod
    def settings(cls) -> tuple[Setting[Any], ...]:
        """The table, in its order."""
        return tuple(s for s in vars(cls).values() if isinstance(s, Setting))

    def update(self, name: str, value: Any) -> None:
        """Sets `name` for the process; UsageError for an unknown name or a meaningless value."""
        setting = self._find(name)
        checked = setting.validate(value)
        with self._lock:
            setting.set_base(checked, "update")
            self._changed(setting)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Sets for the process what a file of `jaxring.tuning.tune_step` or `jaxring tune` says.

        On every rank the same file. UsageError if it is none, and then nothing is set.
        """
        found = _rules.settings_of_file(path)
        for name, value in found.items():
            self._find(name).validate(value)
        for name, value in found.items():
            self.update(name, value)

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[None]:
        """Holds settings for a `with` scope; all are checked before the first one changes."""
        checked = [(self._find(name), value) for name, value in values.items()]
        checked = [(setting, setting.validate(value)) for setting, value in checked]
        with contextlib.ExitStack() as stack:
            for setting, value in checked:
                stack.enter_context(setting.scope(value, self._changed))
            yield

    def subscribe(self, name: str, callback: Callable[[Any], None]) -> None:
        """Calls `callback(value)` now and after each change of the run-time setting `name`."""
        setting = self._find(name)
        if setting.when != "run":
            raise UsageError(
                f"{name} counts at trace time: read config.{name} while tracing, don't subscribe"
            )
        with self._lock:
            self._subscribers.setdefault(name, []).append(callback)
            callback(setting.value)

    def _changed(self, setting: Setting[Any]) -> None:
        with self._lock:
            for callback in self._subscribers.get(setting.name, ()):
                callback(setting.value)

    def _find(self, name: str) -> Setting[Any]:
        setting = vars(type(self)).get(name)
        if not isinstance(setting, Setting):
            raise UsageError(
                f"unknown setting {name!r}; there are {', '.join(s.name for s in self.settings())}"
            )
        return setting

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            self._find(name)  # a misspelt name must not become a new attribute
        super().__setattr__(name, value)


config = Config()
