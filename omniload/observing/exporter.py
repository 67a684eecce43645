"""Serves the metrics of a job to Prometheus over HTTP."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Final, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from omniload.errors import ObservingError
from omniload.observing.metrics import JobCollector
from omniload.observing.stats import JobStats

logger = logging.getLogger(__name__)

_READ_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.1


class _Handler(WSGIRequestHandler):
    timeout = _READ_TIMEOUT_S  # who connects and says nothing must not hold up `MetricsServer.close`

    def log_message(self, *args: object) -> None:
        pass  # there is a request every few seconds


class _Server(ThreadingMixIn, WSGIServer):
    # The server of `prometheus_client` leaves the threads of its requests running when it closes.
    daemon_threads = False

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a request for metrics from %s failed", client_address, exc_info=True)


class MetricsServer:
    """An HTTP server of the metrics of one job, in threads of this process, until it is closed.

    Args:
        stats: called for each scrape, maybe by several threads; None as long as there are no numbers.
        port: 0 for one that is free.
        address: where it listens; the metrics are open to all who can reach it.
        registry: serve what is registered here too, like `storage.metrics.SpanMetrics`.

    Raises:
        ObservingError: it cannot listen there.
        ValueError: the registry has metrics of these names already.
    """

    def __init__(
        self,
        stats: Callable[[], JobStats | None],
        *,
        port: int = 0,
        address: str = "127.0.0.1",
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._registry = CollectorRegistry() if registry is None else registry
        self._collector = JobCollector(stats)
        self._registry.register(self._collector)
        try:
            app = make_wsgi_app(self._registry)
            self._server = make_server(address, port, app, server_class=_Server, handler_class=_Handler)
        except (OSError, OverflowError) as error:
            self._registry.unregister(self._collector)
            raise ObservingError(
                f"metrics: cannot listen on {address}:{port} ({error}); take another port, or 0 for a free one"
            ) from None
        self._closed = False
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="omniload-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where Prometheus finds the metrics."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def close(self) -> None:
        """Stop serving; on return none of its threads is left. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._registry.unregister(self._collector)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
