"""Threads that end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref

from storage.background import BackgroundThread

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
