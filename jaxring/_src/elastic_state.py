"""What an elastic training keeps: values by name, and copies of them as of the last commit."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxring import errors

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copies of all values, as of commit number `commit` (0: the initial values)."""

    commit: int
    values: Values


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a process has, as the others must know it to agree on where to go on.

    Attributes:
      lineage: the epoch in which it has last taken over a state; 0: never.
      latest: the last commit that it has prepared, or that it has been told of.
    """

    lineage: int = 0
    latest: int = 0


class State:
    """What an elastic training must not lose: pytrees by name, which are attributes.

    Args:
      pytrees: arrays of JAX or numpy, keys of random numbers, other values that can be pickled,
        in any containers; with the same structure on every rank. What differs between ranks (error
        feedback, say) is that of one of them after a re-forming.

    Attributes: the names given, to be read and set; commits.

    Example::

        state = jaxring.elastic.State(params=params, opt_state=opt_state, step=0)
        state.step += 1
        state.commit()
    """

    def __init__(self, **pytrees: Any):
        if wrong := [name for name in pytrees if name in dir(type(self)) or name.startswith("_")]:
            raise errors.UsageError(
                f"elastic.State: {wrong} are names of its own; choose others for these values"
            )
        if not pytrees:
            raise errors.UsageError(
                "elastic.State: expected at least one pytree by name, such as params=params"
            )
        for path, leaf in jax.tree.leaves_with_path(pytrees):
            _require_picklable(path, leaf)
        self.__dict__.update(
            _values=dict(pytrees),
            _committed=Snapshot(0, copied(pytrees)),
            _prepared=None,
            _lineage=0,
            _agree=None,
        )

    _values: Values
    _committed: Snapshot
    _prepared: Snapshot | None
    _lineage: int
    _agree: Callable[[int], None] | None

    @property
    def commits(self) -> int:
        """How many times this training has been committed, on whichever ranks."""
        return self._committed.commit

    def commit(self) -> None:
        """Makes the present values those to which all ranks go back after a failure.

        Every rank must call it after the same steps; it waits for their results, and for all ranks.
        In two phases: each rank first keeps copies of its values beside those of the last commit;
        then all tell each other that they have, in one small allreduce, and only then drop the
        old ones. So when a rank dies

        - before all have kept copies, nobody's commit returns, and all go back to the last one;
        - between the phases, the commit may have returned on some ranks and raise on others. It
          can return only where all ranks had kept copies. When the survivors meet again each
          says what it has, and they go on from the latest that all of them have: the new one, if
          all survivors have kept copies of it, else the last one. A commit that has returned on any
          rank, also on one that died since, is never taken back while a rank of that epoch lives.

        It copies all arrays (a later step may donate the originals): commit every few steps where
        a step is short and the state is large.

        When other processes wait to take part, it ends by having `train` called again, with a
        larger communicator (by an exception that is no `Exception`; let it pass).

        Raises: the error of a collective that a lost rank has broken. Let it pass: `elastic.run`
          forms the world anew and calls `train` again.
        """
        jax.block_until_ready(self._values)  # errors of the step come up here
        self.__dict__["_prepared"] = Snapshot(self.commits + 1, copied(self._values))
        if self._agree is None:  # outside of elastic.run there is nobody to agree with
            self._keep(self.commits + 1)
        else:
            self._agree(self.commits + 1)

    def restore(self) -> None:
        """Sets all values to those of the last commit."""
        self._values.update(copied(self._committed.values))

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(_unknown(name, self.__dict__.get("_values", {}))) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise AttributeError(_unknown(name, self._values))
        self._values[name] = value

    def __repr__(self) -> str:
        return f"<elastic.State of {', '.join(self._values)}: {self.commits} commits>"

    # -- For elastic.run -------------------------------------------------------------------------

    def _attach(self, agree: Callable[[int], None] | None) -> None:
        """`agree(n)` returns, having called `_keep`, when commit n is to count."""
        self.__dict__["_agree"] = agree

    def _standing(self) -> Standing:
        return Standing(self._lineage, self._latest().commit)

    def _latest(self) -> Snapshot:
        return self._prepared or self._committed

    def _keep(self, commit: int) -> None:
        """Commit number `commit` counts, of which this process has the values."""
        kept = self._committed if self._committed.commit == commit else self._prepared
        assert kept is not None
        assert kept.commit == commit
        self.__dict__.update(_committed=kept, _prepared=None)

    def _adopt(self, commit: int, values: Values, epoch: int) -> None:
        """Takes over what all ranks of an epoch go on with."""
        self.__dict__.update(_committed=Snapshot(commit, values), _prepared=None, _lineage=epoch)
        self.restore()


def copied(values: Any) -> Any:
    """A copy that shares nothing with `values`, complete when this returns."""
    return jax.block_until_ready(jax.tree.map_with_path(_copy, values))


def _copy(path: Any, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        try:
            return copy.deepcopy(leaf)
        except Exception as e:  # whatever the object's own code raises
            raise _unfit(path, leaf, "copied", e) from e
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jnp.copy(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return jnp.copy(leaf)


def _require_picklable(path: Any, leaf: Any) -> None:
    """Said where the state is made: when ranks take it over, only one of them would find out."""
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return
    try:
        pickle.dumps(leaf)
    except Exception as e:  # whatever the object's own code raises
        raise _unfit(path, leaf, "pickled", e) from e


def _unfit(path: Any, leaf: Any, what: str, e: Exception) -> errors.UsageError:
    return errors.UsageError(
        f"elastic.State: {jax.tree_util.keystr(path)}, a {type(leaf).__name__}, cannot be {what} "
        f"({e}); keep what is no data (functions, open files, locks, generators) out of the state"
    )


def _unknown(name: str, values: Values) -> str:
    known = ", ".join(values)
    return f"elastic.State has no value {name!r}; it was made with {known}"
