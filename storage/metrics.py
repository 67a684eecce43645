"""Counters and histograms of all work that has a span, exported by ``prometheus_client``.

::

    metrics = SpanMetrics()  # in the default registry, counting from now on
    prometheus_client.start_http_server(9100)  # or write_to_textfile, push_to_gateway, …
    ...
    metrics.close()

Work inside other work counts under both names (``checkpoint.write`` holds ``storage.commit``), so compare operations
and never add them up.

============================================  =========================================================================
``omniload_operation_seconds`` (histogram)    How long operations took, failed ones included. ``_count`` growing while
                                              the quantiles stay: more load. Quantiles growing: the device, the network
                                              or the server is the limit.
``omniload_operation_bytes_total``            Bytes of those that succeeded. Its rate over the rate of
                                              ``omniload_operation_seconds_sum`` is the throughput of one call.
``omniload_operation_retries_total``          Parts that were repeated. Far below the number of operations: noise.
                                              Near it: the server throttles or fails; look at its own metrics.
                                              Work that uploads in parts does not know its retries; the count of the
                                              operation ``storage.backoff`` holds those of all work.
``omniload_operation_errors_total``           Operations that raised, by class of the error. ``NotFound`` may be a
                                              question that was answered; anything else deserves a look.
============================================  =========================================================================

Each has the labels ``operation`` (name of the span) and ``rank`` (empty if not known).
"""

from numbers import Real
from types import TracebackType
from typing import Final, Self

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from storage.spans import Span, add_listener, remove_listener

__all__ = ["SpanMetrics"]

_SECONDS: Final = (
    1e-5,
    3e-5,
    1e-4,
    3e-4,
    0.001,
    0.003,
    0.01,
    0.03,
    0.1,
    0.3,
    1.0,
    3.0,
    10.0,
    30.0,
    100.0,
    300.0,
)
"""Upper bounds of the histogram's buckets: two a decade, from 10 µs (a local stat) to 300 s (a stall)."""

_LABELS: Final = ("operation", "rank")


class SpanMetrics:
    """Feeds every span that ends into metrics until it is closed. Safe to use from many threads.

    Args:
        registry: Where the metrics are registered; one ``SpanMetrics`` each.

    Raises:
        ValueError: The registry has metrics of these names already.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._seconds = Histogram(
            "omniload_operation_seconds",
            "Duration of operations.",
            _LABELS,
            registry=registry,
            buckets=_SECONDS,
        )
        self._bytes = Counter(
            "omniload_operation_bytes", "Bytes of operations that succeeded.", _LABELS, registry=registry
        )
        self._retries = Counter(
            "omniload_operation_retries",
            "Parts of operations that were repeated.",
            _LABELS,
            registry=registry,
        )
        self._errors = Counter(
            "omniload_operation_errors", "Operations that raised.", (*_LABELS, "error"), registry=registry
        )
        self._registered: tuple[Histogram | Counter, ...] = (
            self._seconds,
            self._bytes,
            self._retries,
            self._errors,
        )
        add_listener(self._count)

    def close(self) -> None:
        """Stop counting and take the metrics out of the registry. A second call does nothing."""
        remove_listener(self._count)
        registered, self._registered = self._registered, ()
        for metric in registered:
            self._registry.unregister(metric)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self, finished: Span) -> None:
        attributes = finished.attributes
        labels = (finished.name, str(attributes.get("rank", "")))
        self._seconds.labels(*labels).observe(finished.duration_ns / 1e9)
        # Also by 0, so that a series is there, and its rate known, before its first increase.
        self._retries.labels(*labels).inc(_amount(attributes.get("num_retries")))
        if "error" in attributes:
            self._errors.labels(*labels, attributes["error"]).inc()
        else:
            self._bytes.labels(*labels).inc(_amount(attributes.get("num_bytes")))


def _amount(value: object) -> float:
    # A listener must not raise into the work it watches, whatever somebody called ``num_bytes``.
    return max(0.0, float(value)) if isinstance(value, Real) else 0.0
