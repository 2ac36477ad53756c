"""What there is of CUDA in this process, and what is missing and why: for `jaxring info`."""

from __future__ import annotations

from typing import Any

from jaxring._src import _compat, cuda

_ON, _OFF = "on", "off"


def parts() -> list[dict[str, str]]:
    """One row for each thing that a collective on GPUs needs: part, state ("on: …" or "off: …")."""
    native = cuda.module()
    facts = native.facts() if native is not None else None
    rows = {
        "module": (_ON, "jaxring._cuda, with its kernels")
        if native is not None
        else (_OFF, cuda.why_no_module()),
        "driver": _driver(facts),
        "JAX's devices": _devices(),
        "peer access": _peers(facts),
        "multimem": _multimem(facts),
        "XLA's communicators": _cliques(),
        "NCCL": _nccl(facts),
    }
    return [{"part": part, "state": f"{state}: {why}"} for part, (state, why) in rows.items()]


def backend() -> str:
    """The state of the backend as a whole: "on", or the first thing that is missing."""
    rows = {row["part"]: row["state"] for row in parts()}
    for needed in ("module", "driver", "JAX's devices"):
        if rows[needed].startswith(_OFF):
            why = rows[needed].removeprefix(f"{_OFF}: ")
            return f"{_OFF}: {why}; calls on GPUs raise, or go by jax.lax with fallback='lax'"
    return _ON


def _driver(facts: dict[str, Any] | None) -> tuple[str, str]:
    if facts is None:
        return _OFF, "not asked for, without the module"
    if facts["driver"] == 0:
        return _OFF, "no NVIDIA driver (libcuda.so.1) was found; install one on a machine with GPUs"
    version = f"{facts['driver'] // 1000}.{facts['driver'] % 1000 // 10}"
    if facts["devices"] == 0:
        return _OFF, f"the driver (CUDA {version}) shows no GPU: {facts['error']}"
    return _ON, f"CUDA {version}, {facts['devices']} GPUs"


def _peers(facts: dict[str, Any] | None) -> tuple[str, str]:
    if not facts or facts["devices"] == 0:
        return _OFF, "there is no GPU"
    if facts["peers"]:
        way = "NCCL" if cuda.gives_cliques() else "jax.lax, or an error"
        return _OFF, f"{facts['peers']}, so that groups with both go by {way}"
    return _ON, "all GPUs of this process read each other's memory"


def _multimem(facts: dict[str, Any] | None) -> tuple[str, str]:
    if not facts or facts["devices"] == 0:
        return _OFF, "there is no GPU"
    if facts["multicast"]:
        return _OFF, facts["multicast"]
    return _ON, "sums by NVLink's switches, for 3 or more GPUs of one process, in no fixed order"


def _devices() -> tuple[str, str]:
    if cuda.has_gpus():
        return _ON, "JAX has CUDA devices"
    return _OFF, "JAX has no CUDA devices; install jax-cuda13-plugin, and look at JAX_PLATFORMS"


def _cliques() -> tuple[str, str]:
    version = ".".join(map(str, _compat.jaxlib_version()))
    if cuda.gives_cliques():
        return _ON, f"jaxlib {version} has the collectives extension"
    why = (
        f"jaxlib {version} has no collectives extension (0.11.2 is the first); GPUs of one host are"
        " joined by CUDA IPC, those of several are not"
    )
    return _OFF, why


def _nccl(facts: dict[str, Any] | None) -> tuple[str, str]:
    if facts is None:
        return _OFF, "not looked for, without the module"
    if facts["nccl"] == 0:
        return _OFF, facts["nccl_reason"]
    code = facts["nccl"]
    return _ON, f"{code // 10000}.{code // 100 % 100}.{code % 100}, as XLA has loaded it"
