"""What is kept of the files used last."""

from __future__ import annotations

from omniload.sources.recent import Recent


def test_the_file_that_was_not_used_for_longest_goes_and_is_made_again() -> None:
    made: list[int] = []
    recent: Recent[list[int]] = Recent(2, lambda file: made.append(file) or [file])
    first = recent.get(0)
    recent.get(1)
    assert recent.get(0) is first
    recent.get(2)
    assert recent.get(0) is first
    assert made == [0, 1, 2]
    assert recent.get(1) == [1]
    assert made == [0, 1, 2, 1]
