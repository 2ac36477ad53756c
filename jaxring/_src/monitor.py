"""The threads that tell an operator what the engine has to say while ranks wait, and write the
flight record: the engine itself prints nothing and knows no files. One thread for each native
module, as each has an engine of its own: jaxring._native and, for GPUs, jaxring._cuda."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any

from jaxring._src import threads
from jaxring.config import config

DUMP_SIGNAL = signal.SIGUSR2
_STOP_S = 5.0
_LONG_S = 3600.0  # events wake the thread before

_logger = logging.getLogger("jaxring")
_lock = threading.Lock()
_threads: dict[ModuleType, threading.Thread] = {}


def start(native: ModuleType) -> None:
    """Starts the thread and the handling of signals, once; called when a communicator is made."""
    if not listen_to(native):
        return
    _catch_interrupts(native)
    _report_uncaught(native)
    if config.flight_dir and signal.getsignal(DUMP_SIGNAL) == signal.SIG_DFL:
        native.install_dump_handler(int(DUMP_SIGNAL))


def listen_to(source: ModuleType) -> bool:
    """Starts the thread for the events of one native module; False if there is one already."""
    with _lock:
        if source in _threads:
            return False
        _threads[source] = threads.start(_run, "jaxring-monitor", source)
    return True


def _catch_interrupts(native: ModuleType) -> None:
    # A program with a handler of its own for Ctrl-C decides for itself what that means.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        native.install_interrupt_handler()


def _report_uncaught(native: ModuleType) -> None:
    """Where nobody catches the error of a wait that a Ctrl-C has ended, Python's KeyboardInterrupt
    is still to come: while the traceback is printed, of which nothing is left then."""
    report = sys.excepthook

    def hook(interrupt: BaseException | None, kind: Any, value: Any, trace: Any) -> None:
        if interrupt is None:
            return report(kind, value, trace)
        interrupt.__context__ = value
        report(type(interrupt), interrupt, interrupt.__traceback__)
        raise SystemExit(128 + signal.SIGINT)

    # Not a function of Python's: that would be interrupted at its beginning.
    sys.excepthook = functools.partial(native.after_signals, hook)


def stop() -> None:
    """Ends the threads when the process ends, once all has been said.

    A thread that came back from native code into an interpreter that is gone would abort the
    process: Python unwinds it by pthread_exit, which C++ destructors do not let through.
    """
    for source, thread in list(_threads.items()):
        source.stop_events()
        thread.join(_STOP_S)


def _run(native: ModuleType) -> None:
    while True:
        event = native.next_event(_LONG_S)
        if event is None:
            continue
        if event["kind"] == "stop":
            return
        if event["kind"] == "interrupts":  # after asyncio.run, or in the next cell of a notebook
            _catch_interrupts(native)
        elif event["kind"] == "stall":
            _logger.warning("%s", event["text"])
        elif event["kind"] == "note":
            _logger.info("%s", event["text"])
        elif config.flight_dir:
            reason = event["text"] or f"signal {DUMP_SIGNAL.name}"
            try:
                path = dump(config.flight_dir, reason)
                _logger.info("flight record written to %s: %s", path, reason)
            except OSError as e:
                _logger.warning("the flight record could not be written: %s", e)


def dump(folder: str, reason: str) -> str:
    """Writes this process's flight record; `jaxring flight` merges those of several processes.

    Returns: the file's path. A later dump of the same process replaces it, as it holds more.
    """
    host, pid = socket.gethostname(), os.getpid()
    path = os.path.join(folder, f"flight-{host}-{pid}.json")
    record = {
        "host": host,
        "pid": pid,
        "reason": reason,
        "written_s": time.time(),
        "operations": [row for source in list(_threads) for row in source.flight_record()],
    }
    with open(f"{path}.part", "w") as f:
        json.dump(record, f)
    os.replace(f"{path}.part", path)  # never half a file
    return path
