"""Where this process stands in its job: its rank, the world's size and how to reach the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from jaxring import errors

MULTI_HOST = (
    "jaxring {version} reduces between processes of one host only; start all {size} ranks on one "
    "host, or use one process with several devices"
)


@dataclass(frozen=True)
class Placement:
    """Where this process stands in its job.

    Attributes:
      source: what said so, for `jaxring info` and errors.
      coordinator: "host:port" of the store, or None.
      secret: the job's secret, or None when it has to be found (see jaxring/_src/rendezvous.py).
      served: True if something else than rank 0, namely `jaxring run`, serves the store.
      job: text that is the same on all ranks of this job and of no other one, where there is no
        coordinator.
    """

    rank: int
    world_size: int
    source: str
    coordinator: str | None = None
    secret: str | None = None
    served: bool = False
    job: str | None = None


def discover(
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> Placement:
    """Finds rank and world size: arguments, `jaxring run`, jax.distributed, Slurm, Open MPI, PMI;
    else a world of one.

    Raises:
      UsageError: what was found is incomplete or has no meaning.
    """
    for find in (lambda e: _from_arguments(rank, world_size, coordinator, e), *_FINDERS):
        placement = find(env)
        if placement is not None:
            if not 0 <= placement.rank < placement.world_size:
                raise errors.UsageError(
                    f"{placement.source}: expected 0 <= rank < world_size, got rank "
                    f"{placement.rank} and world_size {placement.world_size}"
                )
            return placement
    return Placement(0, 1, "none found: a world of one")


def _from_arguments(
    rank: int | None, world_size: int | None, coordinator: str | None, env: Mapping[str, str]
) -> Placement | None:
    if rank is None and world_size is None and coordinator is None:
        return None
    if rank is None or world_size is None:
        raise errors.UsageError(
            f"init: rank and world_size go together, got rank={rank} and world_size={world_size}"
        )
    coordinator = coordinator or env.get("JAXRING_COORDINATOR")
    if coordinator is None and world_size > 1:
        raise errors.UsageError(
            'init: world_size > 1 needs coordinator="host:port", a free port of the host of rank 0'
        )
    return Placement(rank, world_size, "arguments", coordinator, env.get("JAXRING_SECRET"))


def _from_jaxring_run(env: Mapping[str, str]) -> Placement | None:
    if "JAXRING_RANK" not in env:
        return None
    rank, world_size = _numbers(env, "JAXRING_RANK", "JAXRING_WORLD_SIZE")
    coordinator = env.get("JAXRING_COORDINATOR")
    if coordinator is None and world_size > 1:
        raise errors.UsageError(
            "JAXRING_RANK is set but JAXRING_COORDINATOR is not: set it to host:port, or start "
            "with `jaxring run`"
        )
    served = env.get("JAXRING_SERVED") == "1"
    return Placement(
        rank,
        world_size,
        "jaxring run" if served else "JAXRING_RANK",
        coordinator,
        env.get("JAXRING_SECRET"),
        served,
    )


def _from_jax_distributed(env: Mapping[str, str]) -> Placement | None:
    if not jax.distributed.is_initialized():
        return None
    return Placement(jax.process_index(), jax.process_count(), "jax.distributed")


def _from_slurm(env: Mapping[str, str]) -> Placement | None:
    # SLURM_STEP_NUM_TASKS exists inside srun only; SLURM_NTASKS also in the batch script itself,
    # which is no rank.
    if "SLURM_PROCID" not in env or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    rank, world_size = _numbers(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    job = "slurm " + " ".join(env.get(name, "-") for name in names)
    hosts = int(env.get("SLURM_STEP_NUM_NODES", "1"))
    return _from_manager("Slurm", rank, world_size, job, hosts > 1, env)


def _from_open_mpi(env: Mapping[str, str]) -> Placement | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    rank, world_size = _numbers(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", world_size))
    job = env.get("PMIX_NAMESPACE") or _manager("OMPI_COMM_WORLD_RANK")
    return _from_manager("Open MPI", rank, world_size, job, local < world_size, env)


def _from_pmi(env: Mapping[str, str]) -> Placement | None:
    if "PMI_RANK" in env and "PMI_SIZE" in env:  # MPICH's and Intel's mpiexec
        rank, world_size = _numbers(env, "PMI_RANK", "PMI_SIZE")
        local = int(env.get("MPI_LOCALNRANKS", world_size))
        return _from_manager("PMI", rank, world_size, _manager("PMI_RANK"), local < world_size, env)
    if "PMIX_RANK" in env and env["PMIX_RANK"] != "0":
        raise errors.UsageError(
            "PMIX_RANK is set but nothing says how many ranks there are: call "
            'jaxring.init(rank=, world_size=, coordinator="host:port")'
        )
    return None


_FINDERS: tuple[Callable[[Mapping[str, str]], Placement | None], ...] = (
    _from_jaxring_run,
    _from_jax_distributed,
    _from_slurm,
    _from_open_mpi,
    _from_pmi,
)


def _from_manager(
    source: str, rank: int, world_size: int, job: str, several_hosts: bool, env: Mapping[str, str]
) -> Placement:
    coordinator = env.get("JAXRING_COORDINATOR")
    if several_hosts and coordinator is None:
        raise errors.UsageError(f"{source}: {multi_host(world_size)}")
    return Placement(rank, world_size, source, coordinator, env.get("JAXRING_SECRET"), job=job)


def _numbers(env: Mapping[str, str], *names: str) -> tuple[int, ...]:
    for name in names:
        if not env.get(name, "").isdigit():
            raise errors.UsageError(f"{name}: expected a number >= 0, got {env.get(name)!r}")
    return tuple(int(env[name]) for name in names)


def _manager(variable: str) -> str:
    """The process manager of this host, which all its ranks descend from: pid and start time.

    That is the nearest ancestor without `variable`; shells between it and us have it, as we do.
    """
    pid = os.getppid()
    while True:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()  # from the third one on; see proc(5)
        parent, start_time = int(fields[1]), fields[19]
        if parent == 0 or not _has_variable(pid, variable):
            return f"process {pid} {start_time}"
        pid = parent


def _has_variable(pid: int, name: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            return any(entry.startswith(f"{name}=".encode()) for entry in f.read().split(b"\0"))
    except PermissionError:  # a manager that runs as another user
        return False


def multi_host(size: int) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = version("jaxring")
    except PackageNotFoundError:
        number = ""
    return MULTI_HOST.format(version=number, size=size).replace("  ", " ")
