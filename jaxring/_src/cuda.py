"""The optional native module `jaxring._cuda`: whether it is there, what it can do, and registration
with XLA.

Nothing here imports it, asks a driver or loads a library before a program is lowered for GPUs that
this process has, or `jaxring info` asks."""

from __future__ import annotations

import atexit
import functools
import importlib
import threading
from types import ModuleType
from typing import Any

import jax

from jaxring import errors
from jaxring._src import _compat, cuda_connections, members, monitor
from jaxring.config import config

# The first jaxlib whose handlers can ask XLA for its communicators.
FIRST_WITH_CLIQUES = (0, 11, 2)
MAX_RANKS = 32

_lock = threading.Lock()
_registered = False


@functools.cache
def module() -> ModuleType | None:
    """`jaxring._cuda`, or None; `why_no_module` says why."""
    try:
        return importlib.import_module("jaxring._cuda")
    except ImportError:
        return None


def why_no_module() -> str:
    """Why `jaxring._cuda` cannot be imported; "" if it can."""
    try:
        importlib.import_module("jaxring._cuda")
    except ModuleNotFoundError:
        return (
            "this installation was built without CUDA; build it where nvcc and CUDA's headers are,"
            " with -C cmake.define.JAXRING_CUDA=ON to make their absence an error"
        )
    except ImportError as e:
        return f"the module jaxring._cuda cannot be loaded: {e}"
    return ""


def has_gpus() -> bool:
    """Whether JAX has CUDA devices in this process."""
    try:
        return bool(jax.devices("cuda"))
    except (RuntimeError, AssertionError):  # a bare assertion of JAX, with JAX_PLATFORMS=cuda
        return False


def is_target(ctx: Any) -> bool:
    """Whether a lowering rule's context is one for CUDA alone."""
    return tuple(ctx.platforms or ctx.module_context.platforms) == ("cuda",)


def will_run_here(ctx: Any) -> bool:
    """Whether what is lowered for CUDA is meant for this process's GPUs.

    jax.export, and lowering on a machine without GPUs, need no library and set nothing up."""
    return not ctx.module_context.lowering_parameters.for_export and has_gpus()


def gives_cliques() -> bool:
    """Whether XLA's communicators can be had by handlers (of mesh axes, that is)."""
    return _compat.jaxlib_version() >= FIRST_WITH_CLIQUES


def register() -> None:
    """Registers the custom call with XLA for CUDA, if this process has GPUs and the module.

    The GPU backend is initialised first, as the CPU's is in `engine.register`.
    """
    global _registered
    if _registered or not has_gpus():
        return
    native = module()
    if native is None:
        return
    with _lock:
        if _registered:
            return
        for name, registration in native.ffi_types().items():
            jax.ffi.register_ffi_type(name, registration, platform="CUDA")
        for name, handler in native.ffi_registrations().items():
            jax.ffi.register_ffi_target(name, handler, platform="CUDA")
        native.set_setting("process", float(jax.process_index()))
        config.subscribe("timeout_s", lambda value: native.set_setting("timeout_s", value))
        errors.add_details_source(lambda text: members.placed(text, native.error_details(text)))
        config.subscribe("warn_s", lambda value: native.set_setting("warn_s", value))
        monitor.listen_to(native)
        atexit.register(native.stop)  # the watchdog; engine's, which stops monitors, is later
        _registered = True


_use_cliques = True


def use_cliques(on: bool) -> None:
    """False: set communicators up as if XLA offered none, for checks of that road."""
    global _use_cliques
    _use_cliques = on
    if (native := module()) is not None:
        native.set_setting("use_cliques", float(on))


def sets_up_here() -> bool:
    """Whether the communicators of mesh axes are made while lowering, not by XLA's cliques."""
    return not (_use_cliques and gives_cliques())


# -- Communicators -------------------------------------------------------------------------------


def fail(key: str, kind: str, message: str) -> None:
    """Makes calls on the communicator `key` raise, and kernels that wait stop; where it has no GPU
    side, nothing happens."""
    if _registered and (native := module()) is not None:
        native.fail(key, kind, message)


def rejoin() -> None:
    """Makes the GPU side of all communicators of mesh axes anew, those of XLA's cliques at their
    next run."""
    if _registered and (native := module()) is not None:
        cuda_connections.rejoin(native)
        native.rejoin()


def stats(reset: bool) -> list[dict[str, Any]]:
    """Rows of `jaxring.stats` for communicators of GPUs."""
    native = module() if _registered else None
    return [] if native is None else native.stats(reset)


def close(key: str) -> None:
    """Releases the GPU side of the communicator `key`, if there is one."""
    if _registered and (native := module()) is not None:
        native.close(key)
