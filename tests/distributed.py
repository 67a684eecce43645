"""Run one function in several processes joined by a gloo process group."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _entry(
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    results: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=timeout_s))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        results.put((rank, True, fn(rank, world_size, *args)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        dist.destroy_process_group()


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in ``world_size`` spawned processes.

    Args:
        fn: a module-level function; its return value must be picklable.
        world_size: number of processes.
        args: passed on to ``fn``.
        timeout_s: limit for the whole call and for every collective in it.

    Returns:
        The return values by rank.

    Raises:
        ExceptionGroup: one or more ranks raised; each member names its rank and holds its traceback.
        TimeoutError: some ranks did not answer; names them.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=_entry, args=(rank, world_size, port, timeout_s, results, fn, args), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    values: dict[int, Any] = {}
    failures: list[RuntimeError] = []
    deadline = time.monotonic() + timeout_s
    try:
        while len(values) + len(failures) < world_size:
            try:
                rank, ok, value = results.get(timeout=0.2)
            except queue.Empty:
                answered = set(values) | {failure.args[1] for failure in failures}
                waiting = [rank for rank in range(world_size) if rank not in answered]
                dead = {rank: processes[rank].exitcode for rank in waiting if processes[rank].exitcode}
                if dead:
                    raise RuntimeError(f"ranks died without an answer (rank: exit code): {dead}") from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"ranks {waiting} did not answer within {timeout_s} s") from None
                continue
            if ok:
                values[rank] = value
            else:
                failures.append(RuntimeError(f"rank {rank}:\n{value}", rank))
                # The others now wait for a dead peer: give them a moment to fail by themselves, no more.
                deadline = min(deadline, time.monotonic() + 10)
        if failures:
            raise ExceptionGroup(f"{len(failures)} of {world_size} ranks failed", failures)
        return [values[rank] for rank in range(world_size)]
    except TimeoutError:
        if failures:
            raise ExceptionGroup(f"{len(failures)} of {world_size} ranks failed", failures) from None
        raise
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
