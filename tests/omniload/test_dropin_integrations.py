"""Accelerate and the Trainer on two processes: each sample once, batches as planned, and a resume that is exact."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omniload import DataLoader
from omniload.errors import MixtureError, PlaceError, StateError
from tests.distributed import run_distributed
from tests.omniload.dropin import Numbers, StatefulStream, flat, ids
from tests.omniload.mixtures import token_rows, write_parquet

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore::UserWarning:accelerate.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers.*"),
]
SAMPLES = 40


def mixture_of(folder: Path) -> dict[str, Any]:
    write_parquet(folder / "data.parquet", token_rows(0, 200, 30))
    source = {"path": str(folder / "data.parquet"), "weight": 1, "on_exhausted": "repeat"}
    return {"seq_len": 32, "packs": 4, "lanes": 4, "steps": 6, "labels": "hf", "sources": {"a": source}}


def as_launched(rank: int, ranks: int, folder: Path) -> None:
    """What a launcher tells each process; so mixtures are loaded on Ray, in a cluster of these processes' own."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {key: str(value) for key, value in place.items()}
    os.environ |= {"ACCELERATE_USE_CPU": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ["OMNILOAD_RUNTIME_DIR"] = str(folder / "runtime")


def of_lanes(lanes: list[Any]) -> list[Any]:
    return [lane["input_ids"].tolist() for lane in lanes]


def _prepared(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Batches of prepared loaders: whole epochs, the rest of one after `load_state`, and of others."""
    as_launched(rank, ranks, folder)
    from accelerate import Accelerator

    from omniload.integrations.accelerate import PreparedLoader, prepare

    accelerator = Accelerator()
    place = {"dp_rank": accelerator.process_index, "dp_size": accelerator.num_processes}

    def make() -> DataLoader[int]:
        return DataLoader(Numbers(SAMPLES), 4, shuffle=True, **place)

    model = torch.nn.Linear(1, 1)
    raw = make()
    model, loader = prepare(accelerator, model, raw)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (loader.batch_size, len(loader), loader.dataset) == (4, 5, raw.dataset)
    assert accelerator.prepare(loader) is loader, "not divided a second time"
    for divided in (make(), DataLoader(mixture_of(folder / f"{rank}"), **place)):
        assert accelerator.prepare(divided) is divided, "nor without our prepare"
    first, ends = [], []
    for batch in loader:
        first.append(batch.tolist())
        ends.append(accelerator.gradient_state.end_of_dataloader)
        if len(first) == 2:
            accelerator.save_state(str(folder / "saved"))
    accelerator.wait_for_everyone()
    second = ids(loader)
    accelerator.load_state(str(folder / "saved"))
    rest = [ids(loader), ids(loader)]

    stream = prepare(accelerator, DataLoader(StatefulStream(SAMPLES), 4, **place))
    lanes = prepare(accelerator, DataLoader(mixture_of(folder / f"{rank}"), **place))
    half = []
    for lane in lanes:
        half.append(lane)
        if len(half) == 5:
            break
    assert isinstance(lanes, PreparedLoader)
    assert "omniload.runtime.ray.host" in sys.modules, "they are loaded on Ray"
    with pytest.raises(
        PlaceError, match=rf"rank 0 of 1, and this process is {rank} of {ranks}: pass dp_rank"
    ):
        prepare(accelerator, DataLoader(Numbers(), 4))
    return {
        "epochs": [first, second],
        "ends": ends,
        "rest": rest,
        "stream": ids(stream),
        "lanes": of_lanes([*half, *lanes]),
        "plain": ids(make()),
    }


def test_accelerate_gives_two_processes_the_batches_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    results = run_distributed(_prepared, 2, tmp_path, timeout_s=300)
    whole = DataLoader(Numbers(SAMPLES), 8, shuffle=True, dp_rank=0, dp_size=1)
    for epoch, planned in enumerate([ids(whole), ids(whole)]):
        steps = zip(*(result["epochs"][epoch] for result in results), strict=True)
        assert [sorted(flat(list(step))) for step in steps] == [sorted(batch) for batch in planned]
    for result in results:
        assert result["epochs"][0] == result["plain"], "batch by batch, as without accelerate"
        assert result["ends"] == [False, False, False, False, True]
        assert result["rest"] == [result["epochs"][0][2:], result["epochs"][1]]
    streamed = [sample for result in results for sample in flat(result["stream"])]
    assert sorted(streamed) == list(range(SAMPLES))
    with DataLoader(mixture_of(tmp_path / "whole")) as loader:
        lanes = of_lanes(list(loader))
    assert [result["lanes"] for result in results] == [lanes[0::2], lanes[1::2]]


class Tiny(torch.nn.Module):
    """A model that notes what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[Any] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        self.seen.append(input_ids.tolist())
        return {"loss": (self.weight * input_ids.float().mean()).sum()}


class Rows(Numbers):
    """Rows as the Trainer collates them."""

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": [index], "not for the model": index}


def trainer_of(folder: Path, data: Any, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from omniload.integrations.transformers import OmniloadTrainer

    class OurTrainer(OmniloadTrainer, Trainer):
        pass

    keywords = {"per_device_train_batch_size": 4, "num_train_epochs": 2, **arguments}
    return OurTrainer(
        model=Tiny(),
        args=TrainingArguments(
            output_dir=str(folder),
            save_steps=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
            seed=11,
            **keywords,
        ),
        train_dataset=data,
    )


def _trained(rank: int, ranks: int, folder: Path) -> list[dict[str, Any]]:
    as_launched(rank, ranks, folder)
    results = []
    for name, data, arguments in (
        ("dataset", Rows(SAMPLES), {}),
        (
            "mixture",
            mixture_of(folder / f"{rank}"),
            {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "max_steps": 6},
        ),
    ):
        trainer = trainer_of(folder / name, data, **arguments)
        trainer.train()
        torch.distributed.barrier()
        checkpoints = sorted(path.name for path in (folder / name).iterdir())
        resumed = trainer_of(folder / name, data, **arguments)
        resumed.train(resume_from_checkpoint=str(folder / name / "checkpoint-3"))
        torch.distributed.barrier()
        results.append(
            {
                "seen": trainer.model.seen,
                "rest": resumed.model.seen,
                "steps": [trainer.state.global_step, resumed.state.global_step],
                "checkpoints": checkpoints,
            }
        )
    return results


@pytest.mark.slow
def test_the_trainer_gives_two_processes_the_batches_of_the_plan_and_resumes_exactly(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    results = run_distributed(_trained, 2, tmp_path, timeout_s=300)
    datasets, mixtures = zip(*results, strict=True)
    whole = DataLoader(
        Numbers(SAMPLES), 8, shuffle=True, dp_rank=0, dp_size=1, generator=torch.Generator().manual_seed(11)
    )
    planned = [sorted(batch) for batch in (*ids(whole), *ids(whole))]
    steps = zip(*(result["seen"] for result in datasets), strict=True)
    assert [sorted(row[0] for batch in step for row in batch) for step in steps] == planned
    with DataLoader(mixture_of(tmp_path / "whole")) as loader:
        lanes = of_lanes(list(loader))
    assert [result["seen"] for result in mixtures] == [lanes[0::2], lanes[1::2]]
    for result, batches_per_step, last in [(one, 1, 10) for one in datasets] + [
        (one, 2, 6) for one in mixtures
    ]:
        assert result["steps"] == [last, last]
        assert result["rest"] == result["seen"][3 * batches_per_step :]
        assert "checkpoint-3" in result["checkpoints"]


def test_a_trainer_that_cannot_go_on_or_share_the_lanes_says_why(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "out", Rows(SAMPLES), max_steps=3)
    trainer.train()
    state = tmp_path / "out/checkpoint-3/omniload.json"
    assert json.loads(state.read_text())["drawn"] == 12
    with pytest.raises(StateError, match=r"inside an epoch of 10 batches.*gradient_accumulation_steps=4"):
        trainer_of(tmp_path / "out", Rows(SAMPLES), gradient_accumulation_steps=4).train(
            resume_from_checkpoint=True
        )
    state.write_text("{")
    with pytest.raises(StateError, match=r"omniload\.json: cannot be read as JSON"):
        trainer_of(tmp_path / "out", Rows(SAMPLES)).train(resume_from_checkpoint=True)
    state.unlink()
    with pytest.raises(StateError, match=r"omniload\.json: not there"):
        trainer_of(tmp_path / "out", Rows(SAMPLES)).train(resume_from_checkpoint=True)
    with pytest.raises(MixtureError, match="set gradient_accumulation_steps=4"):
        trainer_of(tmp_path, mixture_of(tmp_path)).get_train_dataloader()
    with pytest.raises(MixtureError, match="labels: hf"):
        trainer_of(tmp_path, {**mixture_of(tmp_path), "labels": "shifted"}).get_train_dataloader()
