"""Every collective between processes, in communicator mode: values and gradients of all ranks
together, against one process that has all ranks' operands as rows."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxring
from jaxring.testing import spawn

# Ours of a rank's operand (p, 2p, 3); and the same of all ranks' operands stacked.
FAMILY = {
    "allreduce": (
        lambda x, c: jaxring.allreduce(x, c, "mean"),
        lambda xs: jnp.broadcast_to(xs.mean(0), xs.shape),
    ),
    "max": (
        lambda x, c: jaxring.pmax(x, c),
        lambda xs: jnp.broadcast_to(xs.max(0), xs.shape),
    ),
    "reduce_scatter": (lambda x, c: jaxring.reduce_scatter(x, c), lambda xs: xs.sum(0)),
    "reduce_scatter_mean_tiled": (
        lambda x, c: jaxring.reduce_scatter(x, c, "mean", scatter_dimension=1, tiled=True),
        lambda xs: jnp.stack(jnp.split(xs.mean(0), len(xs), 1)),
    ),
    "reduce_scatter_prod": (
        lambda x, c: jaxring.reduce_scatter(x, c, "prod"),
        lambda xs: xs.prod(0),
    ),
    "all_gather": (
        lambda x, c: jaxring.all_gather(x, c, axis=1),
        lambda xs: jnp.broadcast_to(
            jnp.moveaxis(xs, 0, 1), (len(xs), *jnp.moveaxis(xs, 0, 1).shape)
        ),
    ),
    "all_to_all": (
        lambda x, c: jaxring.all_to_all(x, c, 0, 0),
        lambda xs: jnp.swapaxes(xs, 0, 1),
    ),
    "broadcast": (
        lambda x, c: jaxring.broadcast(x, c, 1),
        lambda xs: jnp.broadcast_to(xs[1], xs.shape),
    ),
    "reduce": (
        lambda x, c: jaxring.reduce(x, c, root=1),
        lambda xs: jnp.zeros_like(xs).at[1].set(xs.sum(0)),
    ),
    "reduce_mean": (
        lambda x, c: jaxring.reduce(x, c, "mean", root=c.world_size - 1),
        lambda xs: jnp.zeros_like(xs).at[-1].set(xs.mean(0)),
    ),
    "reduce_min": (
        lambda x, c: jaxring.reduce(x, c, "min"),
        lambda xs: jnp.zeros_like(xs).at[0].set(xs.min(0)),
    ),
    "ppermute": (
        lambda x, c: jaxring.ppermute(x, c, [(0, 1), (1, 0)]),
        lambda xs: jnp.zeros_like(xs).at[:2].set(xs[1::-1]),
    ),
    "barrier": (lambda x, c: jaxring.barrier(c, x), lambda xs: xs),
}


def loss(y):
    return jnp.sum(y**3 * jnp.linspace(1, 2, y.size).reshape(y.shape))


def on_a_rank(comm):
    p = comm.world_size
    xs = np.random.default_rng(0).normal(size=(p, p, 2 * p, 3)).astype(np.float32)

    def values_and_gradients(x):
        return {
            name: (f(x, comm), jax.grad(lambda x, f=f: loss(f(x, comm)))(x))
            for name, (f, _) in FAMILY.items()
        }

    got = jax.jit(values_and_gradients)(xs[comm.rank])
    for name, (_, stacked) in FAMILY.items():
        # A rank's operand has a part in every rank's loss.
        total = jax.jit(jax.grad(lambda xs, g=stacked: sum(loss(y) for y in g(xs))))(xs)
        expected = stacked(xs)[comm.rank], total[comm.rank]
        for a, b in zip(got[name], expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)
    jaxring.barrier(comm)
    return True


def test_values_and_gradients():
    assert all(spawn(on_a_rank, 3))
