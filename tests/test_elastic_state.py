"""State and run in a world of one, in this process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxring
from jaxring.elastic import State, run


def equal(got, expected):
    assert type(got) is type(expected)
    np.testing.assert_array_equal(got, expected)


def test_restore_goes_back_to_the_last_commit_even_of_donated_arrays():
    state = State(params={"w": jnp.arange(3.0)}, step=0, rows=np.zeros(2, np.int64))
    double = jax.jit(lambda w: w * 2, donate_argnums=0)
    state.params = {"w": double(state.params["w"])}
    state.step, state.rows[1] = 1, 7
    state.commit()
    for _ in range(2):  # what is restored may be donated again
        state.params = {"w": double(state.params["w"])}
        state.step, state.rows[1] = 2, 9
        state.restore()
        assert (state.step, state.commits) == (1, 1)
        equal(state.rows, np.array([0, 7], np.int64))
        np.testing.assert_array_equal(state.params["w"], [0.0, 2.0, 4.0])


def test_names_are_those_that_it_was_made_with():
    state = State(params=1)
    with pytest.raises(AttributeError, match="no value 'parms'; it was made with params"):
        state.parms = 2
    with pytest.raises(AttributeError, match="no value 'parms'"):
        _ = state.parms
    with pytest.raises(jaxring.UsageError, match="at least one pytree"):
        State()
    for name in ("commit", "restore", "commits", "_values"):
        with pytest.raises(jaxring.UsageError, match=name):
            State(**{name: 1})


def test_the_error_of_a_step_comes_up_at_its_commit():
    def fail(x):
        raise ValueError("in the step")

    state = State(x=jnp.zeros(2))
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)

    def step():
        state.x = jax.jit(lambda x: jax.pure_callback(fail, shape, x))(state.x)
        state.commit()

    with pytest.raises(Exception, match="in the step"):
        step()
    state.restore()
    assert state.commits == 0
    np.testing.assert_array_equal(state.x, [0, 0])


def test_every_kind_of_value_keeps_its_type():
    values = {
        "f": jnp.array([1.5], jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(3),
        "double": np.array([np.pi]),
        "big": np.int64(1 << 60),
        "text": "adam",
        "nested": ({"none": None, "count": 3},),
    }
    state = State(**values)

    @run()
    def train(state, comm):
        return comm.world_size, {name: getattr(state, name) for name in values}

    size, got = train(state)
    assert size == 1
    key = got.pop("key")
    assert key.dtype == values["key"].dtype
    equal(jax.random.key_data(key), jax.random.key_data(values.pop("key")))
    assert got["f"].dtype == jnp.bfloat16
    assert got["empty"].shape == (0, 3)
    assert (got["double"].dtype, got["double"][0]) == (np.float64, np.pi)
    assert got["big"] == 1 << 60
    assert (got["text"], got["nested"]) == ("adam", ({"none": None, "count": 3},))


def test_train_takes_arguments_and_runs_again():
    @run(min_ranks=1)
    def train(state, comm, steps, *, by):
        while state.step < steps:
            state.x += jaxring.allreduce(jnp.float32(by), comm)
            state.step += 1
            state.commit()
        return comm

    state = State(x=jnp.float32(0), step=0)
    first = train(state, 2, by=3)
    second = train(state, 4, by=3)
    assert first is second
    assert (float(state.x), state.commits) == (12.0, 4)
    assert train.__name__ == "train"


def test_what_train_raises_is_raised_and_the_communicator_closed():
    @run()
    def train(state, comm):
        assert jaxring.init() is comm
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(State(x=1))

    @run()
    def nested(state, comm):
        return train(state)

    with pytest.raises(jaxring.UsageError, match="one elastic training at a time"):
        nested(State(x=1))
    with jaxring.init(0, 1) as comm:
        assert comm.key != "elastic"


def test_what_can_not_work_is_refused(monkeypatch):
    with pytest.raises(jaxring.UsageError, match="min_ranks >= 1, got 0"):
        run(min_ranks=0)
    with pytest.raises(jaxring.UsageError, match="jaxring run -n 2"):
        run(min_ranks=2)(lambda state, comm: None)(State(x=1))
    with pytest.raises(jaxring.UsageError, match="cannot be pickled"):
        run()(lambda state, comm: None)(State(f=lambda: 0))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(jaxring.UsageError, match=r"under jax\.distributed"):
        run()(lambda state, comm: None)(State(x=1))
