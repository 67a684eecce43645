"""Lanes as the loader documents them, from a seed: documents of random length, padding, ignored targets."""

from __future__ import annotations

from typing import Any

import torch


def fake_step(
    step: int, *, num_lanes: int = 4, packs: int = 2, seq_len: int = 32, vocab_size: int = 62
) -> list[dict[str, Any]]:
    """All lanes of one global step; a function of the arguments alone."""
    generator = torch.Generator().manual_seed(step)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    lanes = []
    for index in range(num_lanes):
        input_ids = torch.zeros(packs, seq_len, dtype=torch.int64)
        targets = torch.full((packs, seq_len), -100)
        position_ids = torch.zeros(packs, seq_len, dtype=torch.int64)
        segment_ids = torch.zeros(packs, seq_len, dtype=torch.int32)
        cu_seqlens = [0]
        for pack in range(packs):
            begin, segment, end_of_text = 0, 1, seq_len - draw(0, 4)
            while begin < end_of_text:
                end = min(end_of_text, begin + draw(1, seq_len // 2))
                document = torch.randint(1, vocab_size, (end - begin,), generator=generator)
                input_ids[pack, begin:end] = document
                targets[pack, begin : end - 1] = document[1:]
                position_ids[pack, begin:end] = torch.arange(end - begin)
                segment_ids[pack, begin:end] = segment
                cu_seqlens.append(pack * seq_len + end)
                begin, segment = end, segment + 1
            position_ids[pack, begin:] = torch.arange(seq_len - begin)
            if begin < seq_len:
                cu_seqlens.append((pack + 1) * seq_len)
        bounds = torch.tensor(cu_seqlens, dtype=torch.int32)
        lanes.append(
            {
                "input_ids": input_ids,
                "targets": targets,
                "position_ids": position_ids,
                "segment_ids": segment_ids,
                "cu_seqlens": bounds,
                "max_seqlen": int(bounds.diff().max()),
                "step": step,
                "lane": index,
                "is_last_in_step": index == num_lanes - 1,
            }
        )
    num_target_tokens = sum(int((lane["targets"] >= 0).sum()) for lane in lanes)
    return [{**lane, "num_target_tokens": num_target_tokens} for lane in lanes]
