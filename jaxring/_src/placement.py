"""Where this process stands in its job: its rank, the world's size and how to reach the others."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from jaxring import errors
from jaxring._src.interfaces import refuse_loopback


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
    given = rank, world_size
    if rank is None and world_size is None and coordinator is None:
        return None
    if rank is None or world_size is None:
        raise errors.UsageError(
            f"init: rank and world_size go together, got rank={rank} and world_size={world_size}"
        )
    try:
        rank, world_size = operator.index(rank), operator.index(world_size)
    except TypeError:
        rank = None
    if rank is None or not isinstance(coordinator, str | None):
        raise errors.UsageError(
            'init: expected rank and world_size as integers and coordinator as "host:port", got '
            f"{given[0]!r}, {given[1]!r} and {coordinator!r}"
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
    several = int(env.get("SLURM_STEP_NUM_NODES", "1")) > 1
    coordinator = None
    if several and "SLURM_STEP_NODELIST" in env:
        port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 10000
        coordinator = f"{first_node(env['SLURM_STEP_NODELIST'])}:{port}"
    return _from_manager("Slurm", rank, world_size, job, several, env, coordinator)


def first_node(nodes: str) -> str:
    """The first of a list as Slurm writes it: "gpu[007-012,20],login1" begins with gpu007."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    if match is None:
        raise errors.UsageError(f"SLURM_STEP_NODELIST: expected a list of nodes, got {nodes!r}")
    return match[1] + (match[2] or "")


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


def _from_kubernetes(env: Mapping[str, str]) -> Placement | None:
    """The variables that training operators set in each pod (one process in each), or an indexed
    Job's number of a pod, beside JAXRING_WORLD_SIZE."""
    if "KUBERNETES_SERVICE_HOST" not in env:
        return None
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
        rank, world_size = _numbers(env, "RANK", "WORLD_SIZE")
        coordinator = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    elif {"JOB_COMPLETION_INDEX", "JAXRING_WORLD_SIZE"} <= env.keys():
        rank, world_size = _numbers(env, "JOB_COMPLETION_INDEX", "JAXRING_WORLD_SIZE")
        coordinator = None
    else:
        return None
    return _from_manager(
        "Kubernetes", rank, world_size, "kubernetes", world_size > 1, env, coordinator
    )


_FINDERS: tuple[Callable[[Mapping[str, str]], Placement | None], ...] = (
    _from_jaxring_run,
    _from_jax_distributed,
    _from_slurm,
    _from_open_mpi,
    _from_pmi,
    _from_kubernetes,
)


def _from_manager(
    source: str,
    rank: int,
    world_size: int,
    job: str,
    several_hosts: bool,
    env: Mapping[str, str],
    coordinator: str | None = None,
) -> Placement:
    coordinator = env.get("JAXRING_COORDINATOR", coordinator)
    secret = env.get("JAXRING_SECRET")
    if several_hosts and (coordinator is None or secret is None):
        missing = "JAXRING_SECRET" if coordinator else "JAXRING_COORDINATOR"
        raise errors.UsageError(
            f"{source}: {world_size} ranks on several hosts need in the environment of each the "
            "same JAXRING_COORDINATOR=host:port of rank 0's host and, so that no stranger can "
            "join, the same random JAXRING_SECRET (openssl rand -hex 16); "
            f"{missing} is not set"
        )
    if several_hosts and coordinator is not None:
        refuse_loopback(coordinator, source)
    return Placement(rank, world_size, source, coordinator, secret, job=job)


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
