import logging
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

import jaxring
from jaxring import config
from jaxring._src.settings import MAX_BYTES, parse_selection
from jaxring.config import Config

SETTINGS = {s.name: s for s in Config.settings()}


@pytest.fixture(autouse=True)
def _as_before():
    before = {name: getattr(config, name) for name in SETTINGS}
    yield
    for name, value in before.items():
        config.update(name, value)


def test_defaults():
    defaults = {name: s.default for name, s in SETTINGS.items()}
    assert defaults == {
        "timeout_s": 300.0,
        "warn_s": 30.0,
        "log_level": "warning",
        "transport": "auto",
        "interface": "auto",
        "flight_dir": "",
        "timeline": "",
        "algorithm": "auto",
        "deterministic": False,
        "bucket_bytes": 32 << 20,
        "chunk_bytes": 0,
        "in_place": False,
        "fallback": "error",
    }


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("timeout_s", "5", 5.0),
        ("timeout_s", 0.5, 0.5),
        ("log_level", "debug", "debug"),
        ("algorithm", "direct:0-64k;ring:1m-max", "direct:0-64k;ring:1m-max"),
        ("deterministic", "on", True),
        ("deterministic", 0, False),
        ("bucket_bytes", "4MiB", 4 << 20),
        ("chunk_bytes", 1 << 18, 1 << 18),
        ("fallback", "lax", "lax"),
    ],
)
def test_update(name, given, value):
    config.update(name, given)
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)
    assert SETTINGS[name].source == "update"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", "inf"),
        ("timeout_s", True),
        ("timeout_s", None),
        ("log_level", "loud"),
        ("algorithm", "ring:1m"),
        ("algorithm", "ring:2m-1m"),
        ("algorithm", 3),
        ("deterministic", "maybe"),
        ("deterministic", 2),
        ("bucket_bytes", 0),
        ("bucket_bytes", "32 apples"),
        ("chunk_bytes", -1),
        ("chunk_bytes", 0.5),
        ("fallback", "psum"),
    ],
)
def test_meaningless_values_change_nothing(name, value):
    before = getattr(config, name)
    with pytest.raises(jaxring.UsageError, match=f"^{name}: expected .*, got "):
        config.update(name, value)
    with pytest.raises(jaxring.UsageError), config.override(warn_s=1, **{name: value}):
        pass
    assert getattr(config, name) == before
    assert config.warn_s == 30


def test_unknown_names():
    with pytest.raises(jaxring.UsageError, match="unknown setting 'timeout'; there are timeout_s,"):
        config.update("timeout", 3)
    with pytest.raises(jaxring.UsageError), config.override(timeout=3):
        pass
    with pytest.raises(jaxring.UsageError):
        config.timeout = 3
    assert not hasattr(config, "timeout")


def test_attribute_assignment_is_update():
    config.warn_s = 3
    assert config.warn_s == 3.0


def test_overrides_nest():
    with config.override(timeout_s=5, algorithm="ring"):
        with config.override(timeout_s=6):
            assert (config.timeout_s, config.algorithm) == (6, "ring")
        config.update("timeout_s", 7)  # counts again after the scope
        assert config.timeout_s == 5
        assert SETTINGS["timeout_s"].source == SETTINGS["algorithm"].source == "override"
    assert (config.timeout_s, config.algorithm) == (7, "auto")


def test_scopes_of_threads():
    """A trace-time override is the thread's own, a run-time one everybody's."""
    seen = {}

    def look():
        seen.update(algorithm=config.algorithm, timeout_s=config.timeout_s)

    with config.override(algorithm="ring", timeout_s=5):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == {"algorithm": "auto", "timeout_s": 5}


@pytest.mark.parametrize(
    ("name", "value"), [("algorithm", "ring"), ("deterministic", True), ("bucket_bytes", 1024)]
)
def test_trace_time_settings_are_in_the_cache_key(name, value):
    traced = []

    @jax.jit
    def f(x):
        traced.append(getattr(config, name))
        return x + 1

    x = jnp.ones(3)
    before = getattr(config, name)
    f(x)
    with config.override(**{name: value}):
        f(x)
        f(x)
    f(x)
    config.update(name, value)
    f(x)
    assert traced == [before, value]


def test_run_time_settings_do_not_retrace():
    traced = []
    f = jax.jit(lambda x: traced.append(0) or x)
    f(jnp.ones(3))
    with config.override(timeout_s=5):
        f(jnp.ones(3))
    assert len(traced) == 1


def test_subscribe():
    seen = []
    config.subscribe("warn_s", seen.append)
    with config.override(warn_s=2):
        config.warn_s = 3
    assert seen == [30, 2, 2, 3]
    with pytest.raises(jaxring.UsageError, match="trace time"):
        config.subscribe("algorithm", seen.append)


def test_log_level_reaches_the_logger():
    with config.override(log_level="debug"):
        assert logging.getLogger("jaxring").level == logging.DEBUG
    assert logging.getLogger("jaxring").level == logging.WARNING


def test_parse_selection():
    assert parse_selection("ring") == (("ring", 0, MAX_BYTES),)
    assert parse_selection("direct:0-64k; ring:1m-max") == (
        ("direct", 0, 65536),
        ("ring", 1 << 20, MAX_BYTES),
    )


def _import_with(**env):
    code = "from jaxring.config import Config as C; print(C.timeout_s.value, C.timeout_s.source)"
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True
    )


def test_environment():
    assert _import_with(JAXRING_TIMEOUT_S="12").stdout.split() == ["12.0", "environment"]
    refused = _import_with(JAXRING_TIMEOUT_S="soon")
    assert refused.returncode == 1
    assert "JAXRING_TIMEOUT_S: expected a number of seconds > 0, got 'soon'" in refused.stderr
