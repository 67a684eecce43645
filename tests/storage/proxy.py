"""A proxy that stands before a real HTTP server and makes chosen requests fail the way networks and servers do.

It takes one request per connection and relays bytes as they are, so that signatures stay valid and bodies of any
encoding pass. It knows just enough HTTP to tell requests apart and to count the bytes of a body.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Fault", "FaultProxy", "fault_proxy"]

_CHUNK_BYTES: Final = 64 << 10
_START_TIMEOUT_S: Final = 10.0

Kind = Literal[
    "error",  # the server answers with ``status`` and does nothing
    "reset-request",  # the connection is reset within the request's body
    "reset-answer",  # the request is served, the connection is reset within the answer's body
    "lost-answer",  # the request is served, the connection is reset before the answer
    "truncate",  # the answer promises all of its body, and ends in the middle of it
    "stall-request",  # the request's body is not taken from some point on
    "stall-answer",  # the answer stops in the middle of its body
    "silence",  # the request is not passed on, and nothing is answered
]


@dataclass(kw_only=True, slots=True)
class Fault:
    """What goes wrong with the next requests.

    Attributes:
        kind: See ``Kind``.
        times: How many requests it still happens to; counts down.
        method: HTTP method of these; "" for any.
        query: Text that their URL contains.
        status: Of an "error".
        code: S3 error code of an "error".
        after_bytes: How much of a body passes before it happens.
    """

    kind: Kind
    times: int = 1
    method: str = ""
    query: str = ""
    status: int = 500
    code: str = "InternalError"
    after_bytes: int = 1000


class FaultProxy:
    """A running proxy; made by ``fault_proxy``. Methods may be called from any thread.

    Attributes:
        url: Where it listens.
        latency_s: Wait before a request is passed on.
        bytes_per_s: Bandwidth of each direction of each connection; None: as it is.
        num_requests: Requests seen.
        num_faults: Requests that a fault happened to.
    """

    def __init__(self, target_host: str, target_port: int) -> None:
        self.url = ""
        self.latency_s = 0.0
        self.bytes_per_s: float | None = None
        self.num_requests = 0
        self.num_faults = 0
        self._target = (target_host, target_port)
        self._faults: list[Fault] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def inject(self, fault: Fault) -> None:
        """Let this happen to the next requests that it is about, after those injected before."""
        self._faults.append(fault)

    def heal(self) -> None:
        """Undo everything: faults, latency, bandwidth, counts."""
        self._faults = []
        self.latency_s, self.bytes_per_s = 0.0, None
        self.num_requests = self.num_faults = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, and the one request that comes on it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                await self._exchange(_one_request(head), head, reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def stop(self) -> None:
        """End all connections, the stalled ones too."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pick(self, head: bytes) -> Fault | None:
        method, url, _ = head.decode("latin-1").split(" ", 2)
        self.num_requests += 1
        for fault in self._faults:
            if fault.times and fault.method in ("", method) and fault.query in url:
                fault.times -= 1
                self.num_faults += 1
                return fault
        return None

    async def _exchange(
        self, changed: bytes, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        fault = self._pick(head)
        await asyncio.sleep(self.latency_s)
        kind = fault.kind if fault else None
        if fault and kind == "error":
            await _drop_body(head, reader)
            writer.write(_answer(fault, with_body=not head.startswith(b"HEAD")))
            await writer.drain()
            return
        if kind == "silence":
            await asyncio.Event().wait()
        server_reader, server_writer = await asyncio.open_connection(*self._target)
        try:
            server_writer.write(changed)
            upward = asyncio.create_task(self._request_body(fault, reader, server_writer, writer))
            try:
                await self._answer_body(fault, server_reader, writer)
            finally:
                upward.cancel()
                with suppress(asyncio.CancelledError, ConnectionError):
                    await upward
        finally:
            server_writer.close()

    async def _request_body(
        self,
        fault: Fault | None,
        reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> None:
        passed = 0
        while chunk := await reader.read(_CHUNK_BYTES):
            passed += len(chunk)
            if fault and passed > fault.after_bytes:
                if fault.kind == "reset-request":
                    server.transport.abort()
                    _reset(client)
                    return
                if fault.kind == "stall-request":
                    client.transport.pause_reading()  # type: ignore[attr-defined]
                    await asyncio.Event().wait()
            await self._pass(chunk, server)

    async def _answer_body(
        self, fault: Fault | None, server: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        head = await server.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100"):
            client.write(head)
            head = await server.readuntil(b"\r\n\r\n")
        if fault and fault.kind == "lost-answer":
            _reset(client)
            return
        client.write(head)
        passed = 0
        while chunk := await server.read(_CHUNK_BYTES):
            if fault and fault.kind in ("reset-answer", "truncate", "stall-answer"):
                chunk = chunk[: max(0, fault.after_bytes - passed)]
                await self._pass(chunk, client)
                passed += len(chunk)
                if passed < fault.after_bytes:
                    continue
                if fault.kind == "stall-answer":
                    await asyncio.Event().wait()
                if fault.kind == "reset-answer":
                    await asyncio.sleep(0.02)  # a reset overtakes bytes that the client has not read yet
                    _reset(client)
                return
            await self._pass(chunk, client)

    async def _pass(self, chunk: bytes, to: asyncio.StreamWriter) -> None:
        if self.bytes_per_s:
            await asyncio.sleep(len(chunk) / self.bytes_per_s)
        to.write(chunk)
        await to.drain()


@contextmanager
def fault_proxy(target_host: str, target_port: int) -> Iterator[FaultProxy]:
    """Run a proxy on a thread of its own."""
    proxy = FaultProxy(target_host, target_port)
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    done = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await done.wait()
        server.close()
        await proxy.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name="proxy")
    thread.start()
    try:
        if not ready.wait(_START_TIMEOUT_S):
            raise TimeoutError(f"the proxy was not listening within {_START_TIMEOUT_S:g} s")
        yield proxy
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(_START_TIMEOUT_S)
        loop.close()


def _one_request(head: bytes) -> bytes:
    """The head of a request, asking the server to close the connection after it. Nobody signs that header."""
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([lines[0], b"Connection: close", *lines[1:]])


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n"):
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


async def _drop_body(head: bytes, reader: asyncio.StreamReader) -> None:
    if _header(head, b"expect"):  # the client waits to be asked for it
        return
    left = int(_header(head, b"content-length") or 0)
    while left:
        chunk = await reader.read(min(left, _CHUNK_BYTES))
        if not chunk:
            return
        left -= len(chunk)


def _answer(fault: Fault, *, with_body: bool) -> bytes:
    body = (
        f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>".encode() if with_body else b""
    )
    head = (
        f"HTTP/1.1 {fault.status} Injected\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
        "\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection by a reset, and not in order."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
