"""`jaxring.stats()` for Prometheus; needs prometheus-client: `pip install 'jaxring[metrics]'`.

    port = jaxring.metrics.serve(9400 + comm.local_rank)

or, in a program that has a registry of its own, `registry.register(jaxring.metrics.Collector())`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxring._src.engine import stats
from jaxring.errors import UsageError

__all__ = ["Collector", "serve"]

_LABELS = ("collective", "algorithm", "transport", "communicator")
# Key of stats() -> (name, what it counts). Prometheus' client adds "_total" to a counter's name.
_COUNTERS = {
    "operations": ("jaxring_operations", "Operations that have ended."),
    "bytes_sent": ("jaxring_sent_bytes", "Bytes sent by the ranks of this process."),
    "bytes_received": ("jaxring_received_bytes", "Bytes received by the ranks of this process."),
    "wait_s": ("jaxring_wait_seconds", "Seconds from a rank's arrival to the last rank's."),
}


class Collector:
    """Gives what `jaxring.stats()` says at the moment when it is asked, as counters with the labels
    collective, algorithm, transport and communicator."""

    def describe(self) -> Iterator[Any]:
        """The counters without values, so that registering it counts nothing."""
        yield from _families([])

    def collect(self) -> Iterator[Any]:
        """The counters as they are now."""
        yield from _families(stats())


def serve(port: int, address: str = "127.0.0.1") -> int:
    """Serves the counters at http://address:port/metrics, from a thread that ends with the process.

    Args:
      port: 0 takes a free one. Each rank of a host needs one of its own.
      address: where to listen. There is no password, so others than this host only on purpose.

    Returns: the port.

    Raises: UsageError: prometheus-client is not installed, or the port cannot be had.
    """
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(Collector())
    try:
        server, _ = client.start_http_server(port, addr=address, registry=registry)
    except (OSError, OverflowError, TypeError) as e:
        raise UsageError(
            f"metrics: cannot listen on {address}:{port} ({getattr(e, 'strerror', e)}); choose a "
            "free port, one for each rank of a host"
        ) from None
    return server.server_port


def _client() -> Any:
    try:
        import prometheus_client
        import prometheus_client.core
    except ImportError:
        raise UsageError(
            "metrics: this needs prometheus-client; install it with: pip install 'jaxring[metrics]'"
        ) from None
    return prometheus_client


def _families(rows: list[dict[str, Any]]) -> Iterator[Any]:
    family = _client().core.CounterMetricFamily
    for key, (name, what) in _COUNTERS.items():
        counter = family(name, what, labels=_LABELS)
        sums: dict[tuple[str, ...], float] = {}
        for row in rows:  # closed communicators of one name have rows of their own
            labels = tuple(row[label] for label in _LABELS)
            # None: on GPUs nobody measures waiting.
            sums[labels] = sums.get(labels, 0) + (row[key] or 0)
        for labels, value in sums.items():
            counter.add_metric(labels, value)
        yield counter
