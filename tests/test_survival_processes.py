"""What outlives a process or needs a fresh one: exported programs, the compilation cache, many
devices."""

import os
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxring

X = np.arange(32, dtype=np.float32).reshape(4, 8) ** 2 % 61


def run_python(code, *arguments, devices=4, env=None):
    """What a fresh process prints."""
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        env={
            **os.environ,
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
            "JAXRING_TIMEOUT_S": "60",
            **(env or {}),
        },
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def family(x):
    """Each collective once, in terms that keep the shape of a rank's (8,) row."""
    y = jaxring.barrier("x", jaxring.ppermute(x, "x", [(0, 1), (1, 3), (3, 0)]))
    y += jaxring.all_to_all(x, "x", 0, 0, tiled=True)
    y += jaxring.all_gather(jaxring.reduce_scatter(x, "x", tiled=True), "x", tiled=True)
    y += jaxring.reduce(x, "x", root=2)
    return y + jaxring.allreduce(x, "x", "max") + jaxring.broadcast(x, "x", root=1)


def expected_of_family(x):
    y = np.zeros_like(x)
    y[[1, 3, 0]] = x[[0, 1, 3]]
    y += x.reshape(4, 4, 2).swapaxes(0, 1).reshape(4, 8)
    y += x.sum(0)
    y[2] += x.sum(0)
    return y + x.max(0) + x[1]


def mapped():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    return jax.jit(
        jax.shard_map(
            lambda x: family(x[0])[None],
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )
    )


CALL_EXPORTED = """
    import sys
    import jax, numpy as np
    import jaxring

    jaxring.register()
    exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    x = jax.device_put(np.load(sys.argv[2]), jax.NamedSharding(mesh, jax.P("x")))
    for _ in range(3):
        y = exported.call(x)
    np.save(sys.argv[3], y)
"""


def test_export_runs_in_a_fresh_process(tmp_path):
    """Where nothing is lowered before the program is called."""
    pytest.importorskip("flatbuffers", reason="jax.export cannot serialize without it")
    check = jax.export.DisabledSafetyCheck.custom_call("jaxring_collective")
    exported = jax.export.export(mapped(), disabled_checks=[check])(
        jax.ShapeDtypeStruct(X.shape, X.dtype)
    )
    (tmp_path / "program").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", X)
    run_python(CALL_EXPORTED, *(tmp_path / name for name in ("program", "x.npy", "y.npy")))
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected_of_family(X))


def test_family():
    np.testing.assert_array_equal(mapped()(X), expected_of_family(X))


COMPILE = """
    import sys
    import jax, numpy as np
    import jaxring

    hits = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
    )
    sys.path.insert(0, sys.argv[1])
    from test_survival_processes import X, expected_of_family, mapped

    f = mapped()
    for e in range(3):
        np.testing.assert_array_equal(f(X + e), expected_of_family(X + e))
    print("hits:", len(hits))
"""


def test_persistent_compilation_cache(tmp_path):
    """The second process takes the executable of the first one."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    folder = os.path.dirname(os.path.abspath(__file__))
    first, second = (run_python(COMPILE, folder, env=settings) for _ in range(2))
    assert "hits: 0" in first
    assert int(second.split("hits:")[1]) > 0


MANY_DEVICES = """
    import jax, jax.numpy as jnp, numpy as np
    import jaxring

    n = 128
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows = (np.arange(n * n * 3).reshape(n, n, 3) * 7919 % 251).astype(np.float32)

    def f(x):
        x = x[0]
        pairs = [(r, (r + 5) % n) for r in range(n)]
        return {
            **{a: jaxring.allreduce(x, "x", algorithm=a) for a in ("auto", "ring", "tree")},
            "reduce_scatter": jaxring.reduce_scatter(x, "x"),
            "all_gather": jaxring.all_gather(x[0], "x"),
            "all_to_all": jaxring.all_to_all(x, "x", 0, 0),
            "ppermute": jaxring.ppermute(x, "x", pairs),
            "broadcast": jaxring.broadcast(x, "x", 77),
            "reduce": jaxring.reduce(x, "x", root=100),
        }

    g = lambda x: jax.tree.map(lambda y: y[None], f(x))
    g = jax.shard_map(g, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)
    got = jax.tree.map(np.asarray, jax.jit(g)(rows))
    total = rows.sum(0)
    for name in ("auto", "ring", "tree"):
        np.testing.assert_array_equal(got[name], np.broadcast_to(total, rows.shape))
    np.testing.assert_array_equal(got["reduce_scatter"], total)
    np.testing.assert_array_equal(got["all_gather"], np.broadcast_to(rows[:, 0], rows.shape))
    np.testing.assert_array_equal(got["all_to_all"], rows.swapaxes(0, 1))
    np.testing.assert_array_equal(got["ppermute"], np.roll(rows, 5, 0))
    np.testing.assert_array_equal(got["broadcast"], np.broadcast_to(rows[77], rows.shape))
    np.testing.assert_array_equal(got["reduce"][100], total)
    assert not got["reduce"][:100].any()
    print(sum(row["operations"] for row in jaxring.stats()))
"""


def test_128_devices():
    assert int(run_python(MANY_DEVICES, devices=128)) == 9 * 128
