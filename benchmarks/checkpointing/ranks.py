"""Rank processes that stay alive between runs, so that a benchmark times the work and not their start."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

TIMEOUT_S = 300.0
"""Limit of every wait for the ranks."""


class RankPool:
    """Spawned processes joined by gloo, each with an object of its own that functions are called with.

    Use as a context manager; the processes end with the block.

    Args:
        num_ranks: number of processes.
        build: module-level function that makes the object in each rank, inside the process group.
        args: of ``build``.
    """

    def __init__(self, num_ranks: int, build: Callable[..., object], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        # As under torchrun: a store in a process of its own; the ranks are clients.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            place = (rank, num_ranks, self._store.port)
            process = context.Process(target=_serve, args=(there, *place, build, args), daemon=True)
            process.start()
            there.close()  # the end of the process then closes the pipe
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        """Wait until every rank has built its object.

        Raises:
            RuntimeError: as of `call`.
            TimeoutError: as of `call`.
        """
        try:
            self._answers("build")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def call(self, function: Callable[..., Any], *args: object) -> list[Any]:
        """Call a module-level function with every rank's object and ``args``, on all ranks at once.

        Returns:
            The values by rank.

        Raises:
            RuntimeError: a rank failed or died; names it and holds its traceback.
            TimeoutError: ranks did not answer; names them.
        """
        for connection in self._connections:
            connection.send((function, args))
        return self._answers(function.__name__)

    def cpu_seconds(self) -> float:
        """Processor time of all ranks so far."""
        return float(sum(self.call(_process_time)))

    def _answers(self, what: str) -> list[Any]:
        deadline = time.monotonic() + TIMEOUT_S
        values: dict[int, Any] = {}
        ranks = {connection: rank for rank, connection in enumerate(self._connections)}
        while ranks:
            # Whoever answers first is heard first: a rank that fails leaves the others waiting for it.
            ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(
                    f"ranks {sorted(ranks.values())} did not answer '{what}' within {TIMEOUT_S:g} s"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks.pop(connection)
                try:
                    values[rank], failure = connection.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} died in '{what}'") from None
                if failure is not None:
                    raise RuntimeError(f"rank {rank} failed in '{what}':\n{failure}")
        return [values[rank] for rank in sorted(values)]

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _process_time(_: object) -> float:
    return time.process_time()


def _serve(
    connection: Connection,
    rank: int,
    num_ranks: int,
    port: int,
    build: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}  # as under torchrun
    dist.init_process_group(
        "gloo",
        store=TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        served = build(*args)
        connection.send((None, None))
        while True:
            function, arguments = connection.recv()
            connection.send((function(served, *arguments), None))
    except EOFError:  # the pool is closed
        pass
    except Exception:
        connection.send((None, traceback.format_exc()))
    finally:
        dist.destroy_process_group()
