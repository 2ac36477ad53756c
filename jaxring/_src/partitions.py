"""From the axes of a call to partition ids and devices, while lowering."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxring._src.axes import Where


def partition_groups(mesh: Any, where: Where) -> list[list[int]]:
    """The groups of partition ids (positions in the mesh, row-major) that reduce among themselves.

    Args:
      mesh: a Mesh or AbstractMesh.
      where: its axes are axes of the mesh.

    Example: a (2, 3) mesh over ("x", "y") gives [[0, 3], [1, 4], [2, 5]] over "x".
    """
    ids = np.arange(mesh.size).reshape(mesh.axis_sizes)
    positions = [mesh.axis_names.index(axis) for axis in where.axes]
    rows = np.moveaxis(ids, positions, range(-len(positions), 0))
    rows = rows.reshape(-1, np.prod([mesh.axis_sizes[i] for i in positions], dtype=int)).tolist()
    if where.groups is None:
        return rows
    return [[row[i] for i in group] for row in rows for group in where.groups]


def devices_of(mesh: Any) -> tuple[list[int], list[int]]:
    """(global device id, process index) by partition id; both empty for an abstract mesh."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return [], []
    devices = list(mesh.devices.flat)
    return [d.id for d in devices], [d.process_index for d in devices]
