"""Lengths of documents: a published-like heavy tail, those of the demo's data, and samples with images."""

from __future__ import annotations

import math
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

MEDIAN_TOKENS, SIGMA = 600, 1.2
"""Of the log-normal body: most documents are short, as in web text (mean 1,230 tokens)."""
TAIL_SHARE, TAIL_FROM, TAIL_INDEX = 0.03, 4096, 1.0
"""Documents of the Pareto tail, the length it begins at, and its index: few, but they hold many of the tokens."""


def heavy_tailed(generator: np.random.Generator, count: int, context: int) -> np.ndarray:
    """Document lengths of a long-context corpus, as the papers on balancing describe theirs.

    Log-normal with a Pareto tail; documents longer than the context are cut to it, as their corpora are. The parameters
    are ours; WLB-LLM (arXiv 2503.17924) and FlexSP (arXiv 2412.01523) show such lengths as figures, without numbers.

    Args:
        generator: of the random numbers.
        count: how many.
        context: longest document, in tokens.

    Returns:
        ``int64[count]``, at least 16 each.
    """
    body = np.exp(generator.normal(math.log(MEDIAN_TOKENS), SIGMA, count))
    tail = TAIL_FROM * (1 + generator.pareto(TAIL_INDEX, count))
    lengths = np.where(generator.random(count) < TAIL_SHARE, tail, body)
    return np.clip(lengths, 16, context).astype(np.int64)


@cache
def demo_lengths() -> np.ndarray:
    """``int64[n]``: tokens of every document of the demo's data, which is built and tokenised for it."""
    from omniload.forecasting.dry_run import DryRun
    from omniload.mixture import Mixture
    from training.demo.data import MixtureSize, build

    longest = 1 << 20
    size = MixtureSize(steps=10**6, seq_len=longest, packs=1, lanes=1, switch_step=1)
    with tempfile.TemporaryDirectory(prefix="omniload-demo-lengths-") as directory:
        facts = build(Path(directory), size)
        mixture = Mixture.load(
            facts.mixture,
            overrides={
                "packing": "none",
                "held_out": 0.0,
                "schedule": None,
                **{f"sources.{source.name}.on_exhausted": "drop_source" for source in facts.sources},
            },
        )
        with DryRun(mixture) as run:
            return np.concatenate([plan.pieces["length"] for plan in run.plans()]).astype(np.int64)


def cut(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """``int64[m]``: documents as ``overflow: split`` cuts them, at multiples of ``seq_len``."""
    pieces = -(-lengths // seq_len)
    whole = np.full(int(pieces.sum()), seq_len)
    whole[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * seq_len
    return whole


def resampled(generator: np.random.Generator, lengths: np.ndarray, count: int) -> np.ndarray:
    """``int64[count]``: of these lengths, drawn with replacement."""
    return lengths[generator.integers(0, len(lengths), count)]


def with_images(generator: np.random.Generator, count: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of interleaved text and images, as vision-language models are trained on.

    Half of the samples have images: 1 to 8, log-normal in resolution, of 256 to 16,384 patches of 14 × 14 pixels
    each; four patches make one token of the backbone, as Qwen2-VL merges them. The text is log-normal around 300
    tokens.

    Args:
        generator: of the random numbers.
        count: how many samples.
        context: longest sample, in tokens; images that do not fit are left out.

    Returns:
        ``int64[count]`` tokens, image tokens among them, and ``int64[count]`` patches.
    """
    text = np.exp(generator.normal(math.log(300), 1.0, count)).clip(16, context // 2).astype(np.int64)
    images = np.where(generator.random(count) < 0.5, generator.geometric(0.4, count).clip(1, 8), 0)
    sample = np.repeat(np.arange(count), images)
    patches = (
        np.exp(generator.normal(math.log(1600), 0.9, len(sample))).clip(256, 16_384).astype(np.int64) // 4 * 4
    )
    ends = np.concatenate([[0], np.cumsum(patches)])
    up_to_here = ends[1:] - ends[np.cumsum(images) - images][sample]
    fits = up_to_here <= 4 * (context - text[sample])
    total = np.bincount(sample[fits], patches[fits], count).astype(np.int64)
    return text + total // 4, total


def with_clips(generator: np.random.Generator, count: int, context: int) -> tuple[np.ndarray, np.ndarray]:
    """As `with_images`, but half of the samples have one picture or clip, of any size.

    Its patches follow a Pareto law of index 0.8 from 1,024 on, up to what the context has room for beside the text.
    """
    text = np.exp(generator.normal(math.log(300), 1.0, count)).clip(16, context // 2).astype(np.int64)
    size = np.minimum(1024 * (1 + generator.pareto(0.8, count)), 4 * (context - text)).astype(np.int64)
    patches = np.where(generator.random(count) < 0.5, size // 4 * 4, 0)
    return text + patches // 4, patches
