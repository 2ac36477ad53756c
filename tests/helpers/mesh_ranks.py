"""Devices of a mesh, of one process or of several, that run lists of collectives over rows whose
numbers are distinct by rank, call and execution: a wrong pairing of calls is a wrong value."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxring

# JAXRING_TEST_EXECUTIONS=200 is what the engine was accepted with; the default is quicker.
AT_LEAST = int(os.environ.get("JAXRING_TEST_EXECUTIONS", "0"))
AXES = ("x", "y", ("x", "y"), ("y", "x"))


def numbers(ranks, calls, execution, size=3):
    """(ranks, calls, size) integers below 2**18 that look random; float32 sums of 16 are exact."""
    r, c, s = np.ogrid[:ranks, :calls, :size]
    mixed = (r * 7919 + c * 104729 + s * 15485863 + execution * 1299709 + 1) * 2654435761
    return ((mixed % 2**32) >> 14).astype(np.float32)


def total(xs):
    return np.broadcast_to(xs.sum(0), xs.shape)


class Ranks:
    """The devices of a mesh, running `f`: a list of rows to a list of rows, on each device."""

    def __init__(self, axes, devices=None):
        devices = devices or jax.devices()[: int(np.prod(list(axes.values())))]
        grid = np.array(devices).reshape(tuple(axes.values()))
        self.mesh = jax.sharding.Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        self.size = grid.size
        self.spec = P(self.mesh.axis_names)

    def jit(self, f, calls):
        def rows(x):
            return jnp.stack(f([x[0, c] for c in range(calls)]))[None]

        spec = self.spec
        return jax.jit(
            jax.shard_map(rows, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    def put(self, xs):
        sharding = NamedSharding(self.mesh, self.spec)
        return jax.make_array_from_callback(xs.shape, sharding, lambda index: xs[index])

    def check(self, f, calls, executions, reference=total, size=3, in_flight=1, before=None):
        """Compares `executions` runs of `f` with `reference`, `in_flight` of them at a time."""
        executions = max(executions, AT_LEAST)
        jitted = self.jit(f, calls)
        for first in range(0, executions, in_flight):
            batch = range(first, min(first + in_flight, executions))
            inputs = [numbers(self.size, calls, e, size) for e in batch]
            outputs = []
            for e, xs in zip(batch, inputs, strict=True):
                if before is not None:
                    before(e)
                outputs.append(jitted(self.put(xs)))
            for e, xs, ys in zip(batch, inputs, outputs, strict=True):
                expected = reference(xs)
                for shard in ys.addressable_shards:
                    np.testing.assert_array_equal(
                        shard.data, expected[shard.index], err_msg=f"execution {e}"
                    )


def over_axes(xs):
    """Rows, columns and both orders of all devices of a mesh with the axes x and y."""
    return [jaxring.allreduce(x, AXES[c % 4]) for c, x in enumerate(xs)]


def over_axes_reference(shape):
    def reference(xs):
        grid = xs.reshape(*shape, *xs.shape[1:])
        out = np.empty_like(grid)
        for c in range(xs.shape[1]):
            axis = {"x": 0, "y": 1, ("x", "y"): (0, 1), ("y", "x"): (0, 1)}[AXES[c % 4]]
            out[:, :, c] = grid[:, :, c].sum(axis, keepdims=True)
        return out.reshape(xs.shape)

    return reference
