"""The native engine of this process as a whole: how XLA comes to know it, what it has done, the
settings that it hears of, and its end."""

from __future__ import annotations

import atexit
import logging
import threading
from typing import Any, cast

import jax

from jaxring import _native, errors
from jaxring._src import cuda, joining, members, mesh_connections, monitor, timeline_writer, world
from jaxring.config import config

PLATFORMS = ("cpu", "cuda")  # those that can have a backend


def backends() -> tuple[str, ...]:
    """The platforms that this installation serves."""
    return PLATFORMS if cuda.module() is not None else PLATFORMS[:1]


_registered = False
_lock = threading.Lock()


def register() -> None:
    """Registers jaxring's custom call with XLA; the first lowering of a collective does it too.

    Needed in a process that runs what another one lowered, such as a program of jax.export. (The
    CPU backend is initialised first: it fails to, once the call is registered.)

    Example:

        jaxring.register()
        step = jax.export.deserialize(serialized).call

    The program is exported with `disabled_checks=[
    jax.export.DisabledSafetyCheck.custom_call("jaxring_collective")]`.
    """
    global _registered
    with _lock:
        if _registered:
            return
        jax.devices("cpu")
        for name, registration in _native.ffi_types().items():
            jax.ffi.register_ffi_type(name, registration, platform="cpu")
        for name, handler in _native.ffi_registrations().items():
            jax.ffi.register_ffi_target(name, handler, platform="cpu")
        _registered = True
    cuda.register()


def rejoin() -> None:
    """Makes the communicators of mesh axes that span processes anew, once an error has broken them.

    Every process of the job must call it, equally often, with none of its own launches under way.
    It does not wait: the next launches join, as the first ones did. Programs stay compiled. What
    `init` and `split` gave is not concerned: close that and call `init` again.

    Example: a rank came too late, all have raised TimeoutError and have gone back a step::

        jaxring.rejoin()
        state = step(state, batch)
    """
    mesh_connections.rejoin(_native)
    cuda.rejoin()


def stats(reset: bool = False) -> list[dict[str, Any]]:
    """What the engine has done in this process, one dict for each kind of operation.

    Args:
      reset: begin counting anew.

    Returns: Dicts with the keys collective, algorithm, transport, communicator, operations,
      bytes_sent, bytes_received (of all ranks in this process) and wait_s (seconds spent waiting
      for peers; None on GPUs, where nobody measures it).
    """
    return _native.stats(reset) + cuda.stats(reset)


AT_EXIT_S = 5.0  # for what is still under way then, as in Registry::close_all


def at_exit() -> None:
    comm = world.current()
    joining.close_all(_native, None if comm is None else comm.rank)
    # Ranks of a launch that only begin now meet on a new communicator; should one not come, JAX's
    # end, which waits for all launches, would take until the deadline.
    _native.set_setting("timeout_s", min(config.timeout_s, AT_EXIT_S))
    mesh_connections.stop()
    timeline_writer.follow(_native, "")  # writes what is left
    monitor.stop()


# Before JAX's own: a script may end right after it has launched its last step.
atexit.register(at_exit)
errors.add_details_source(lambda text: members.placed(text, cast(Any, _native.error_details(text))))
config.subscribe("timeout_s", lambda value: _native.set_setting("timeout_s", value))
config.subscribe("warn_s", lambda value: _native.set_setting("warn_s", value))
config.subscribe("timeline", lambda value: timeline_writer.follow(_native, value))
config.subscribe("log_level", lambda value: logging.getLogger("jaxring").setLevel(value.upper()))
