"""Many calls at once: errors, bounds and time-outs."""

import threading

import pytest

from storage.errors import Stalled
from storage.parallel import Group, run_all


def test_all_calls_run() -> None:
    done: list[int] = []
    run_all([lambda i=i: done.append(i) for i in range(500)], "x")
    assert sorted(done) == list(range(500))


def test_after_an_error_nothing_is_running_any_more() -> None:
    running = threading.Event()
    finish = threading.Event()
    finished: list[str] = []

    def slow() -> None:
        running.set()
        assert finish.wait(30)
        finished.append("slow")

    def fail() -> None:
        assert running.wait(30)
        threading.Timer(0.05, finish.set).start()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_all([slow, fail], "x")
    assert finished == ["slow"]


def test_a_stall_names_what_it_waited_for() -> None:
    release = threading.Event()
    group = Group("s3://b/k", timeout_s=0.05)
    group.start(lambda: release.wait(30) and None)
    try:
        with pytest.raises(Stalled, match=r"s3://b/k: none of 1 parts finished within 0\.05 s"):
            group.finish()
    finally:
        release.set()


def test_no_more_than_the_bound_are_pending() -> None:
    lock = threading.Lock()
    now = most = 0

    def call() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        threading.Event().wait(0.001)
        with lock:
            now -= 1

    group = Group("x", max_pending=3)
    for _ in range(60):
        group.start(call)
    group.finish()
    assert 1 < most <= 3
