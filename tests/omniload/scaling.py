"""Profiles of sources that are never read, and observations of jobs that never run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from omniload.scaling import Observation, SourceLoad, SourceProfile

MIB = 1 << 20


def profile(name: str = "a", tokens_per_s: float = 1000.0, **keys: Any) -> SourceProfile:
    """A source of samples of 10 tokens that keep one processor busy while they are read."""
    samples_per_s = tokens_per_s / 10
    defaults = {
        "samples_per_s": samples_per_s,
        "prepare_s_per_sample": 1 / samples_per_s,
        "bytes_per_sample": 20.0,
        "resident_bytes": 100 * MIB,
        "open_s": 0.1,
    }
    return SourceProfile(name=name, tokens_per_s=tokens_per_s, **{**defaults, **keys})


@st.composite
def profiles(draw: st.DrawFn, most: int = 12) -> list[SourceProfile]:
    """Of very different sources."""
    return [
        profile(
            f"s{number:02}",
            rate := draw(st.floats(1e2, 1e7)),
            prepare_s_per_sample=draw(st.floats(0, 2)) * 10 / rate,
            resident_bytes=draw(st.integers(1, 3 << 30)),
        )
        for number in range(draw(st.integers(1, most)))
    ]


def observed(
    tokens: Mapping[str, int],
    *,
    ahead: Mapping[str, float] | None = None,
    waited: Mapping[str, float] | None = None,
    seconds: float = 1.0,
    stalled_s: float = 0.0,
) -> Observation:
    """What was served; scheduled is what was served, if nothing else is said."""
    total = sum(tokens.values())
    return Observation(
        seconds=seconds,
        stalled_s=stalled_s,
        sources={
            name: SourceLoad(
                tokens=served,
                waited_s=(waited or {}).get(name, 0.0),
                ahead=served / total if ahead is None else ahead[name],
            )
            for name, served in tokens.items()
        },
    )
