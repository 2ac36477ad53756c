"""Training that goes on when processes die, freeze or come back; in communicator mode.

    state = jaxring.elastic.State(params=params, opt_state=opt_state, step=0)

    @jaxring.elastic.run(min_ranks=2)
    def train(state, comm):
        while state.step < 1000:
            batch = next_batch(state.step, comm.rank, comm.world_size)
            state.params, state.opt_state = step(comm, state.params, state.opt_state, batch)
            state.step += 1
            if state.step % 10 == 0:
                state.commit()
        return state.params

    params = train(state)

started by ``jaxring run -n 4 --restarts 3 train.py``, which starts dead processes again. `step` is
jitted once, outside of `train`, with the communicator as a static argument: then nothing is
compiled again when the world has lost or won ranks. docs/elastic.md says what is promised.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxring import errors
from jaxring._src import elastic_run
from jaxring._src.elastic_join import join, mean_of_live
from jaxring._src.elastic_state import State
from jaxring.config import Config

__all__ = ["State", "join", "mean_of_live", "run"]


def run(
    train: Callable[..., Any] | None = None,
    /,
    *,
    min_ranks: int = 1,
    timeout_s: float | None = None,
) -> Callable[..., Any]:
    """Makes ``train(state, comm, …)`` a function ``train(state, …)`` that every process calls.

    It calls `train` with a communicator of all processes that take part, each time after `state`
    has been set to the same values on all ranks: those of the last commit, or at first those of
    rank 0. `train` is called again, from there, when

    - a rank has died or left: the others' collectives raise, and they form a smaller world;
    - a rank has not come to a collective within the setting `timeout_s`: likewise. When it wakes,
      its own calls raise, and it comes back as a new rank;
    - new processes wait at a commit: those that `jaxring run --restarts` has started in place of
      dead ones, and ranks that had been left out.

    So `train` must go on from what `state` holds, and let errors of collectives pass. What is no
    part of `state` (a place in the data, say) it works out from it anew. Ranks that stay keep their
    order; new ones come after them. `comm` is the same object each time; communicators split from
    it have to be split again.

    Args:
      train: the function, where the decorator is written without parentheses.
      min_ranks: with fewer processes the world waits for others.
      timeout_s: how long it waits for them, in seconds, and a new process for the others' next
        commit; by default the setting `timeout_s`.

    Returns: A decorator, or with `train` what it makes: a function that returns what `train` has
      returned on this rank, when it has on all.

    Raises (the function):
      TimeoutError: fewer than `min_ranks` have come, or no commit while this process waited.
      AbortedError: the others have finished the training without this process.
      PeerError: the store that ranks meet in has gone; it is the launcher's on host 0.
      UsageError: under jax.distributed, or ranks whose states or commits differ.
      Whatever else `train` raises; the others go on without this rank.
    """
    if isinstance(min_ranks, bool) or not isinstance(min_ranks, int) or min_ranks < 1:
        raise errors.UsageError(
            f"elastic.run: expected an integer min_ranks >= 1, got {min_ranks!r}"
        )
    if timeout_s is not None:
        timeout_s = Config.timeout_s.validate(timeout_s, "elastic.run: timeout_s")
    if train is None:
        return functools.partial(_elastic, min_ranks=min_ranks, timeout_s=timeout_s)
    return _elastic(train, min_ranks, timeout_s)


def _elastic(
    train: Callable[..., Any], min_ranks: int, timeout_s: float | None
) -> Callable[..., Any]:
    if not callable(train):
        raise errors.UsageError(
            f"elastic.run: expected a function train(state, comm), got {train!r}; write "
            "@jaxring.elastic.run(min_ranks=2) above it"
        )

    @functools.wraps(train)
    def run_train(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise errors.UsageError(
                f"elastic.run: expected the training's first argument as a jaxring.elastic.State, "
                f"got {type(state).__name__}; make one: State(params=params, step=0)"
            )

        def of_comm(state: State, comm: Any) -> Any:
            return train(state, comm, *args, **kwargs)

        return elastic_run.run(of_comm, state, min_ranks, timeout_s)

    return run_train
