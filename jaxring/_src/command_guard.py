"""What the command `jaxring` does about a Ctrl-C, or a setting in the environment without a
meaning, while its modules are still being imported: that takes a second, and main() is not there
yet. Of other programs that import jaxring it leaves everything alone."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it


def is_command() -> bool:
    """Whether this process is `jaxring …` or `python -m jaxring …`."""
    name = sys.argv[0] if sys.argv else ""
    if name != "-m":  # what it is while Python looks for the module
        return os.path.basename(name) == "jaxring"
    arguments = sys.orig_argv
    return "-m" in arguments and arguments[arguments.index("-m") + 1 :][:1] == ["jaxring"]


def _begin() -> None:
    if is_command():
        sys.excepthook = _explain
        if (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):  # not ignored, as by nohup
            signal.signal(signal.SIGINT, _leave)


def end() -> None:
    """main() looks after both from here."""
    if sys.excepthook is _explain:
        sys.excepthook = sys.__excepthook__
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: Any) -> None:
    os._exit(INTERRUPTED)  # nothing has begun; an exception might be caught by what is imported


def _explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if kind.__name__ != "UsageError":
        return sys.__excepthook__(kind, error, trace)
    print(f"jaxring: {error}", file=sys.stderr)
    raise SystemExit(2)


_begin()
