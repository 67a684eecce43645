"""What is repeated, when, how often, and what it says in the end. Time is a fake that only sleeping moves."""

import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import (
    AlreadyExists,
    BadRequest,
    Corrupt,
    NoSpace,
    NotFound,
    PermissionDenied,
    RetryPolicy,
    Stalled,
    StorageError,
    Store,
    Throttled,
    Transient,
    drain,
)
from storage.backend import Backend
from storage.local import LocalBackend
from storage.retry import Attempt, Budget, Retrier, num_retries
from storage.retrying import RetryingBackend

PASSING = [Transient, Throttled, Stalled]
LASTING = [NotFound, AlreadyExists, PermissionDenied, NoSpace, Corrupt, StorageError]


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds


class Driver:
    """Fails as often as it is told, then succeeds. Its errors are its own: ``classify`` makes ours of them."""

    def __init__(self, kind: type[StorageError], failures: int, clock: Clock, takes_s: float = 0.0) -> None:
        self.kind = kind
        self.failures = failures
        self.attempts: list[Attempt] = []
        self.clock = clock
        self.takes_s = takes_s

    def __call__(self, attempt: Attempt) -> str:
        self.attempts.append(attempt)
        self.clock.now_s += min(self.takes_s, attempt.timeout_s)
        if self.takes_s > attempt.timeout_s:
            raise TimeoutError
        if len(self.attempts) <= self.failures:
            raise RuntimeError("driver")
        return "done"

    def classify(self, error: BaseException, path: str) -> StorageError | None:
        if isinstance(error, StorageError):
            return error
        if isinstance(error, RuntimeError):
            return self.kind(path, "why")
        return Transient(path, "time-out") if isinstance(error, TimeoutError) else None


def retrier(
    clock: Clock, policy: RetryPolicy, uniform: Callable[[float, float], float] = lambda low, high: high
) -> Retrier:
    return Retrier(policy, now=clock.now, sleep=clock.sleep, uniform=uniform)


@pytest.mark.parametrize("kind", PASSING)
def test_what_passes_is_repeated(kind: type[StorageError]) -> None:
    clock = Clock()
    driver = Driver(kind, 3, clock)
    assert retrier(clock, RetryPolicy()).call(driver, "x", driver.classify) == "done"
    assert [one.number for one in driver.attempts] == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", LASTING)
def test_what_lasts_is_not_repeated(kind: type[StorageError]) -> None:
    clock = Clock()
    driver = Driver(kind, 1, clock)
    with pytest.raises(kind, match=r"x: why$") as caught:
        retrier(clock, RetryPolicy()).call(driver, "x", driver.classify)
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (len(driver.attempts), clock.sleeps) == (1, [])


def test_bugs_and_verdicts_pass_as_they_are() -> None:
    clock = Clock()
    driver = Driver(Transient, 0, clock)
    verdict = Transient("part", "tried already")
    for raised in (KeyError("bug"), verdict):

        def attempt(_: Attempt, raised: Exception = raised) -> None:
            raise raised

        with pytest.raises(type(raised)) as caught:
            retrier(clock, RetryPolicy()).call(attempt, "x", driver.classify)
        assert caught.value is raised
    assert clock.sleeps == []


def test_waits_double_up_to_a_bound() -> None:
    clock = Clock()
    driver = Driver(Throttled, 6, clock)
    retrier(clock, RetryPolicy(first_delay_s=1, max_delay_s=5)).call(driver, "x", driver.classify)
    assert clock.sleeps == [1, 2, 4, 5, 5, 5]


@given(seed=st.integers(), failures=st.integers(1, 11))
def test_jitter_is_full(seed: int, failures: int) -> None:
    """Each wait is anything from nothing to its bound: what the random source says."""
    clock = Clock()
    dice = random.Random(seed)
    driver = Driver(Transient, failures, clock)
    asked: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        asked.append((low, high))
        return dice.uniform(low, high)

    policy = RetryPolicy()
    retrier(clock, policy, uniform).call(driver, "x", driver.classify)
    assert asked == [(0.0, policy.max_wait_s(number + 1)) for number in range(failures)]
    assert all(0 <= wait <= high for wait, (_, high) in zip(clock.sleeps, asked, strict=True))


def test_the_last_error_says_how_often_it_was_tried() -> None:
    clock = Clock()
    driver = Driver(Throttled, 99, clock)
    with pytest.raises(Throttled, match=r"x: why \(tried 4 times in 7\.0 s\)") as caught:
        retrier(clock, RetryPolicy(max_attempts=4, first_delay_s=1)).call(driver, "x", driver.classify)
    assert isinstance(caught.value.__cause__, RuntimeError)


@given(
    takes_s=st.floats(0, 30),
    deadline_s=st.floats(0.1, 40),
    attempt_timeout_s=st.floats(0.05, 60),
    failures=st.integers(0, 30),
)
def test_nothing_outlasts_the_deadline(
    takes_s: float, deadline_s: float, attempt_timeout_s: float, failures: int
) -> None:
    clock = Clock()
    driver = Driver(Transient, failures, clock, takes_s)
    policy = RetryPolicy(deadline_s=deadline_s, attempt_timeout_s=attempt_timeout_s, max_attempts=99)
    try:
        retrier(clock, policy).call(driver, "x", driver.classify)
    except (Transient, Stalled):
        pass
    else:
        assert len(driver.attempts) > failures or not failures
    assert clock.now_s <= deadline_s + 1e-3 + 1e-6


def test_an_attempt_that_hangs_is_cut_off_and_a_slow_one_gets_through() -> None:
    clock = Clock()
    driver = Driver(Transient, 0, clock, takes_s=7)
    policy = RetryPolicy(attempt_timeout_s=2, first_delay_s=0.1)
    assert retrier(clock, policy).call(driver, "x", driver.classify) == "done"
    assert [one.timeout_s for one in driver.attempts] == [2, 4, 8]


def test_a_cut_off_last_attempt_is_stalled() -> None:
    clock = Clock()
    driver = Driver(Transient, 0, clock, takes_s=99)
    with pytest.raises(Stalled, match=r"x: not done within 4 s \(tried 2 times"):
        retrier(clock, RetryPolicy(attempt_timeout_s=2, max_attempts=2)).call(driver, "x", driver.classify)


def test_full_speed_at_once_when_throttling_ends() -> None:
    """However long the server throttled, later calls begin without a wait, and a failure costs the first wait."""
    clock = Clock()
    policy = RetryPolicy(max_attempts=4, first_delay_s=1)
    shared = retrier(clock, policy)
    for _ in range(50):
        driver = Driver(Throttled, 99, clock)
        with pytest.raises(Throttled):
            shared.call(driver, "x", driver.classify)
    clock.now_s += policy.burst / policy.retries_per_s
    clock.sleeps.clear()
    for failures, waits in ((0, []), (0, []), (1, [1])):
        driver = Driver(Throttled, failures, clock)
        assert shared.call(driver, "x", driver.classify) == "done"
        assert clock.sleeps == waits


def test_a_dead_server_is_not_hammered() -> None:
    """However many calls fail and however short their waits: no more retries than the budget allows."""
    clock = Clock()
    policy = RetryPolicy(burst=5, retries_per_s=2, max_attempts=99, deadline_s=3)
    shared = retrier(clock, policy, lambda low, high: low)
    num = 0
    for _ in range(40):
        driver = Driver(Transient, 999, clock)
        with pytest.raises(Transient):
            shared.call(driver, "x", driver.classify)
        num += len(driver.attempts) - 1
        assert num <= policy.burst + policy.retries_per_s * clock.now_s + 1
    assert num > policy.burst


def test_an_empty_budget_never_delays_a_first_attempt() -> None:
    clock = Clock()
    shared = retrier(clock, RetryPolicy(burst=1, retries_per_s=0.001, max_attempts=9))
    driver = Driver(Transient, 99, clock)
    with pytest.raises(Transient):
        shared.call(driver, "x", driver.classify)
    before = clock.now_s
    assert shared.call(Driver(Transient, 0, clock), "x", driver.classify) == "done"
    assert clock.now_s == before


@given(st.lists(st.floats(0, 5), max_size=60), st.integers(1, 8), st.floats(0.5, 10))
def test_a_budget_gives_what_it_says(pauses: list[float], burst: int, per_s: float) -> None:
    """In any time, at most ``burst`` tokens plus what came in; a refused one is not taken."""
    clock = Clock()
    budget = Budget(burst, per_s, clock.now)
    due: list[float] = []
    for pause in pauses:
        clock.now_s += pause
        wait = budget.reserve(1.0)
        if wait is not None:
            assert wait <= 1.0
            due.append(clock.now_s + wait)
    for number, when in enumerate(due, start=1):
        assert number <= burst + per_s * when + 1e-6


@pytest.mark.usefixtures("recording")
def test_retries_are_counted_and_seen_as_spans() -> None:
    clock = Clock()
    driver = Driver(Throttled, 2, clock)
    before = num_retries()
    retrier(clock, RetryPolicy()).call(driver, "x", driver.classify)
    spans = drain()
    assert num_retries() - before == 2
    assert [(one.name, one.attributes["attempt"], one.attributes["cause"]) for one in spans] == [
        ("storage.backoff", 1, "Throttled"),
        ("storage.backoff", 2, "Throttled"),
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"max_attempts": 0},
        {"burst": 0},
        {"deadline_s": 0},
        {"deadline_s": 301},
        {"first_delay_s": -1},
        {"attempt_timeout_s": float("nan")},
    ],
)
def test_impossible_policies_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match=f"RetryPolicy: {next(iter(values))} is"):
        RetryPolicy(**values)  # type: ignore[arg-type]


class LostAnswers(LocalBackend):
    """A local directory whose every first create succeeds and says that it did not."""

    def __init__(self, root: Path, before: Callable[[], None] = lambda: None) -> None:
        super().__init__(root)
        self.before = before
        self.num_creates = 0

    def create(self, path: str, views: list[memoryview]) -> None:  # type: ignore[override]
        self.num_creates += 1
        if self.num_creates == 1:
            self.before()
            super().create(path, views)
            raise ConnectionResetError("answer lost")
        super().create(path, views)


def _retrying(backend: Backend, root: Path) -> RetryingBackend:
    return RetryingBackend(backend, str(root), Retrier(RetryPolicy(first_delay_s=0.001)))


def test_a_lost_success_of_ours_is_no_loss(tmp_path: Path) -> None:
    backend = LostAnswers(tmp_path)
    _retrying(backend, tmp_path).create("x", [memoryview(b"ou"), memoryview(b"rs")])
    assert backend.num_creates == 2
    assert (tmp_path / "x").read_bytes() == b"ours"


@pytest.mark.parametrize("other", [b"them", b"longer than ours"])
def test_a_repeated_create_still_loses_to_another(tmp_path: Path, other: bytes) -> None:
    def somebody_else() -> None:
        (tmp_path / "x").write_bytes(other)
        raise ConnectionResetError

    with pytest.raises(AlreadyExists, match="tried 2 times"):
        _retrying(LostAnswers(tmp_path, somebody_else), tmp_path).create("x", [memoryview(b"ours")])
    assert (tmp_path / "x").read_bytes() == other


def test_equal_content_is_no_success_at_the_first_attempt(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.create("x", b"same")
    with pytest.raises(AlreadyExists):
        store.create("x", b"same")


def test_a_store_crosses_a_process_boundary(tmp_path: Path) -> None:
    store = pickle.loads(pickle.dumps(Store(tmp_path, retry=RetryPolicy(max_attempts=2))))
    store.write("x", b"1")
    assert store.read("x") == b"1"
