"""jaxring.stats() for Prometheus."""

import builtins
import urllib.request

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxring

prometheus_client = pytest.importorskip("prometheus_client")


def page(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    samples = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in samples}


def test_the_endpoint_shows_what_stats_says_now():
    mesh = jax.make_mesh((2,), ("m",), devices=jax.devices()[:2])
    f = jax.jit(
        jax.shard_map(
            lambda x: jaxring.allreduce(x, "m"),
            mesh=mesh,
            in_specs=P("m"),
            out_specs=P(),
            check_vma=False,
        )
    )
    x = jax.device_put(jnp.ones(64), jax.NamedSharding(mesh, P("m")))
    f(x).block_until_ready()
    jaxring.stats(reset=True)
    port = jaxring.metrics.serve(0)
    f(x).block_until_ready()
    (row,) = [r for r in jaxring.stats() if r["operations"]]
    labels = ",".join(
        f'{key}="{row[key]}"' for key in ("algorithm", "collective", "communicator", "transport")
    )
    found = page(port)
    assert found[f"jaxring_operations_total{{{labels}}}"] == row["operations"] == 2
    assert found[f"jaxring_sent_bytes_total{{{labels}}}"] == row["bytes_sent"] > 0
    assert found[f"jaxring_received_bytes_total{{{labels}}}"] == row["bytes_received"]
    assert found[f"jaxring_wait_seconds_total{{{labels}}}"] == row["wait_s"]
    f(x).block_until_ready()
    assert page(port)[f"jaxring_operations_total{{{labels}}}"] == 4
    with pytest.raises(jaxring.UsageError, match=":99999"):
        jaxring.metrics.serve(99999)
    with pytest.raises(jaxring.UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
        jaxring.metrics.serve(port)


def test_a_registry_of_the_users():
    registry = prometheus_client.CollectorRegistry()
    registry.register(jaxring.metrics.Collector())
    assert b"jaxring_operations_total" in prometheus_client.generate_latest(registry)
    with pytest.raises(ValueError, match="Duplicated"):  # else all would be counted twice
        registry.register(jaxring.metrics.Collector())


def test_without_the_package_one_sentence_says_so(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(jaxring.UsageError, match=r"pip install 'jaxring\[metrics\]'"):
        jaxring.metrics.serve(0)
