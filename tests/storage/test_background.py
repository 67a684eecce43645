"""Threads that end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

import pytest

from storage.background import BackgroundPool, BackgroundThread

LAST = """
import atexit, os, sys, threading, time
def left():
    print("left", [thread.name for thread in threading.enumerate()[1:]])
atexit.register(left)  # registered first, so it runs last
from storage.background import BackgroundThread
"""


def end(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", LAST + script], capture_output=True, text=True, timeout=60)


def test_a_thread_has_ended_when_exit_handlers_are_done() -> None:
    ended = end(
        """
stop = threading.Event()
BackgroundThread(stop.wait, name="asked", ask_to_end=stop.set).start()
BackgroundThread(lambda: time.sleep(0.3), name="soon").start()
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left []\n", "")


def test_a_thread_that_does_not_end_is_named_and_holds_the_process_up_no_longer() -> None:
    ended = end('BackgroundThread(threading.Event().wait, name="stuck", exit_wait_s=0.1).start()')
    assert ended.returncode == 0
    assert ended.stderr == "the process ends while these threads still run: stuck\n"


def test_executors_are_there_for_a_thread_that_is_asked_to_end() -> None:
    """What it does last may need them: they are ended after it."""
    ended = end(
        """
from concurrent.futures import ThreadPoolExecutor
stop, pool = threading.Event(), ThreadPoolExecutor(1)
def run():
    stop.wait()
    print(pool.submit(str, "written").result())
BackgroundThread(run, name="writes", ask_to_end=stop.set).start()
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "written\nleft []\n", "")


def test_a_forked_process_has_no_threads_to_end() -> None:
    ended = end(
        """
stop = threading.Event()
def ask():
    print("asked by", "parent" if os.getpid() == parent else "child")
    stop.set()
parent = os.getpid()
BackgroundThread(stop.wait, name="asked", ask_to_end=ask).start()
if (child := os.fork()) == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""
    )
    assert (ended.returncode, ended.stdout) == (0, "left []\nasked by parent\nleft []\n")


def test_a_thread_that_has_ended_holds_on_to_nothing() -> None:
    class Owner:
        def __init__(self) -> None:
            self.stop = threading.Event()
            self.thread = BackgroundThread(self.run, name="owned", ask_to_end=self.stop.set)

        def run(self) -> None:
            self.stop.wait()

    owner = Owner()
    gone, thread = weakref.ref(owner), owner.thread
    thread.start()
    owner.stop.set()
    thread.join()
    del owner
    assert gone() is None


def test_a_pool_does_calls_in_as_many_threads_as_it_may_have() -> None:
    pool = BackgroundPool(3, name="pool")
    together = threading.Barrier(3)
    waiting = [pool.submit(together.wait, timeout=30) for _ in range(3)]
    assert sorted(future.result(30) for future in waiting) == [0, 1, 2]
    assert [pool.submit(pow, i, 2).result(30) for i in range(20)] == [i * i for i in range(20)]
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(30)
    threads = [thread for thread in threading.enumerate() if thread.name == "pool"]
    assert len(threads) == 3
    pool.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(pow, 1, 1)


@pytest.mark.parametrize("cancels", [False, True])
def test_a_pool_that_is_shut_down_does_what_has_begun_and_the_rest_unless_that_is_cancelled(
    cancels: bool,
) -> None:
    pool = BackgroundPool(1, name="pool")
    begun, go_on = threading.Event(), threading.Event()

    def run() -> str:
        begun.set()
        go_on.wait(30)
        return "done"

    first, second = pool.submit(run), pool.submit(str, 5)
    assert begun.wait(30)
    pool.shutdown(wait=False, cancel_futures=cancels)
    go_on.set()
    assert first.result(30) == "done"
    if cancels:
        assert second.cancelled()
    else:
        assert second.result(30) == "5"


def test_a_pool_has_no_more_threads_than_calls_at_once_and_none_waits_behind_one_that_hangs() -> None:
    pool, go_on = BackgroundPool(3, name="pool"), threading.Event()
    for _ in range(100):
        pool.submit(pow, 1, 1).result(30)
    assert sum(thread.name == "pool" for thread in threading.enumerate()) == 1
    hanging = pool.submit(go_on.wait, 30)
    for _ in range(100):
        pool.submit(pow, 1, 1).result(30)
    assert sum(thread.name == "pool" for thread in threading.enumerate()) == 2
    go_on.set()
    assert hanging.result(30)
    pool.shutdown()


def test_a_pool_holds_on_to_no_call_that_is_done() -> None:
    class Thing:
        def do(self) -> None:
            raise ValueError

    pool, thing = BackgroundPool(1, name="pool"), Thing()
    seen = weakref.ref(thing)
    with pytest.raises(ValueError):
        pool.submit(thing.do).result(30)
    del thing
    pool.submit(str).result(30)
    pool.submit(str).result(30)
    assert seen() is None
    pool.shutdown()


def test_a_call_that_hangs_in_a_pool_does_not_hold_the_process_up_for_ever() -> None:
    ended = end(
        """
from storage.background import BackgroundPool
BackgroundPool(2, name="reads").submit(threading.Event().wait)
"""
    )
    assert ended.returncode == 0
    assert ended.stderr == "the process ends while these threads still run: reads\n"
