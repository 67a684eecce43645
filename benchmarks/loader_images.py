"""JPEGs to the patches of a vision tower, packed with their tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.definition import Benchmark, Contender, Kind, Measure, Settings
from benchmarks.loading import ours

_SEQ_LEN = 2048
_PACKS = 4
_STEP_IMAGES = 20
"""That fit in four packs of 2,048 tokens, at about 390 tokens each."""

_REFERENCE = "Pillow, a loop"


@contextmanager
def _contenders(settings: Settings) -> Iterator[Sequence[Contender]]:
    from benchmarks.loading import pictures
    from benchmarks.peers import images

    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="loader_images-") as name:
        directory = Path(name)
        jpegs = pictures.jpegs(settings.sized(400, 60))
        source = {
            "path": str(pictures.write(jpegs, directory / "images.parquet")),
            "weight": 1,
            "on_exhausted": "repeat",
            "transforms": [{"call": "image_patches", "args": {"placeholder": pictures.PLACEHOLDER}}],
        }
        mixture = {
            "seed": 1,
            "seq_len": _SEQ_LEN,
            "packs": _PACKS,
            "lanes": _PACKS,
            "steps": len(jpegs) // _STEP_IMAGES,
            "sources": {"images": source},
        }

        def loop(name: str, kind: Kind) -> Contender:
            return Contender(name=name, measure="images", kind=kind, run=lambda: pictures.num_decoded(jpegs))

        yield [
            loop(_REFERENCE, Kind.FLOOR),
            loop(f"{_REFERENCE} (A/A)", Kind.CONTROL),
            Contender(
                name="omniload.DataLoader",
                measure="images",
                kind=Kind.OURS,
                run=lambda: ours.packed_images(mixture),
                after=ours.drain,
            ),
            *images.contenders(jpegs, directory, "images"),
        ]


BENCHMARK = Benchmark(
    name="loader_images",
    measures_what="Images per second from JPEGs of 640 x 480 pixels to patches as Qwen2-VL takes them.",
    how_to_read=(
        "The loop decodes, resizes, normalises and cuts on one thread, in memory. Every peer reads its own format"
        " and calls the same function; ours packs the images with their tokens besides. Divide by the busy cores: with"
        " threads or workers an image is made sooner, not for less. Ours makes images ahead of the steps it serves;"
        " those are not counted, which costs it most in short runs."
    ),
    measures=(Measure(name="images", unit="images/s", scale=1, higher_is_better=True, reference=_REFERENCE),),
    contenders=_contenders,
)
