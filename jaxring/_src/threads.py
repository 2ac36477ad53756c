"""Threads that end with the process, and what to say where the system gives none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jaxring import errors


def start(target: Callable[..., Any], name: str, *args: Any) -> threading.Thread:
    """A daemon thread that runs target(*args); UsageError if it cannot be had."""
    thread = threading.Thread(target=target, name=name, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError as e:
        raise errors.UsageError(
            f"the system gives this process no thread for {name} ({e}); raise its limit (ulimit "
            "-u, or the container's limit of processes)"
        ) from None
    return thread
