"""The Trainer of transformers on omniload's loader: divided once, and resumed exactly.

>>> class MyTrainer(OmniloadTrainer, Trainer): ...  # doctest: +SKIP

The training set may be a dataset, or a mixture with ``labels: hf``. Every checkpoint of the Trainer gets a file more,
`STATE_FILE`; ``train(resume_from_checkpoint=…)`` goes on from it, on any number of processes that the state allows.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, has_length

from omniload.client import Lane, MixtureLoader
from omniload.errors import MixtureError, StateError
from omniload.integrations.accelerate import PreparedLoader
from omniload.mixture import Mixture
from omniload.torch_loader.entry import DataLoader

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

STATE_FILE = "omniload.json"
"""In a checkpoint's folder: the state of the loader, one for all processes."""


class OmniloadTrainer(_Trainer):
    """Put before `Trainer`: it loads the training set by omniload.

    A dataset is shuffled by ``data_seed`` (or ``seed``) and divided among the processes as by torch's
    DistributedSampler; an iterable one, every process reads and takes its part of. A mixture gives as many lanes per
    step to each process as gradients are accumulated over; of a lane, the model gets what its ``forward`` names.

    Raises:
        MixtureError: lanes per process and ``gradient_accumulation_steps`` differ.
        ValueError: a ``train_sampling_strategy`` other than ``random``.
        StateError: a checkpoint without a state, with one of other data, or inside an epoch that
            ``gradient_accumulation_steps`` does not divide.
    """

    _resumes_from: str | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As `Trainer.train`; batches that were trained on before a resume are not read again."""
        if resume_from_checkpoint is True:
            found = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
            resume_from_checkpoint = found or True  # of none, the Trainer says so
        self._resumes_from = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        skips, self.args.ignore_data_skip = self.args.ignore_data_skip, True
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            self.args.ignore_data_skip = skips

    def get_train_dataloader(self) -> Any:
        """The loader of this process, restored if the training is."""
        loader = self._loader_of(self.train_dataset)
        if self._resumes_from is not None:
            self._restore(loader, Path(self._resumes_from) / STATE_FILE)
        prepared = PreparedLoader(self.accelerator, loader)
        self.remove_callback(_SaveState)
        self.add_callback(_SaveState(prepared))
        return self.accelerator.prepare_data_loader(prepared)

    def _restore(self, loader: DataLoader[Any], path: Path) -> None:
        state = _read_state(path)
        accumulated = self.args.gradient_accumulation_steps
        batches = len(loader) if has_length(loader) else 0
        if state.get("inside") and batches % accumulated:
            # The Trainer knows the last, smaller accumulation of an epoch by counting batches from its beginning.
            raise StateError(
                f"{path}: lies inside an epoch of {batches} batches, whose last ones the Trainer would not train on"
                f" after a resume, as gradient_accumulation_steps={accumulated} does not divide {batches}: resume from"
                " a checkpoint at the end of an epoch, or begin with a number that divides it"
            )
        loader.load_state_dict(state)

    def _loader_of(self, data: Any) -> DataLoader[Any]:
        args, accelerator = self.args, self.accelerator
        place = {"dp_rank": accelerator.process_index, "dp_size": accelerator.num_processes}
        if accelerator.torch_device_mesh is not None:
            place = {"mesh": accelerator.torch_device_mesh}
        if isinstance(data, Mixture | Mapping | str | Path):
            return self._mixture_loader(data, place)
        if args.train_sampling_strategy != "random":
            raise ValueError(
                f"train_sampling_strategy: '{args.train_sampling_strategy}' is not supported, as its order cannot be"
                " resumed; use 'random', or a mixture, which packs samples by length"
            )
        iterable = isinstance(data, torch.utils.data.IterableDataset)
        seed = args.seed if args.data_seed is None else args.data_seed
        return DataLoader(
            data,
            batch_size=self._train_batch_size,
            shuffle=None if iterable else True,
            num_workers=args.dataloader_num_workers,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            pin_memory=args.dataloader_pin_memory,
            drop_last=args.dataloader_drop_last,
            generator=torch.Generator().manual_seed(seed),
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            in_order=args.dataloader_in_order,
            **place,
        )

    def _mixture_loader(self, data: Any, place: dict[str, Any]) -> DataLoader[Any]:
        model: Any = self.model
        loader = _NamedLanes(data, **place)
        loader.keep = frozenset(inspect.signature(model.forward).parameters)
        if loader.mixture.labels != "hf":
            raise MixtureError("labels: models of transformers shift the labels themselves; set labels: hf")
        lanes = loader.mixture.lanes // loader.place.dp_size
        if lanes != self.args.gradient_accumulation_steps:
            raise MixtureError(
                f"lanes: {loader.mixture.lanes} are {lanes} for each of {loader.place.dp_size} processes, and gradients"
                f" are accumulated over {self.args.gradient_accumulation_steps} batches: set"
                f" gradient_accumulation_steps={lanes}"
            )
        return loader


class _NamedLanes(MixtureLoader):
    """Gives of each lane what the model names."""

    keep: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Lane]:  # type: ignore[override]
        for lane in super().__iter__():
            yield {key: value for key, value in lane.items() if key in self.keep}


class _SaveState(TrainerCallback):
    """Writes the state of the loader into each checkpoint."""

    def __init__(self, loader: PreparedLoader | None = None) -> None:
        self._loader = loader

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """After the Trainer has written the rest."""
        if self._loader is None or not state.is_world_process_zero:
            return
        path = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / STATE_FILE
        try:
            text = json.dumps(self._loader.state_dict())
        except TypeError as error:
            raise StateError(
                f"{path}: the state of the dataset or sampler cannot be written as JSON ({error}); let its state_dict"
                " hold numbers, strings, lists and dicts"
            ) from None
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StateError(
            f"{path}: not there, so the place in the data is not known: resume from a checkpoint that was saved with"
            " this mixin"
        ) from None
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(state, dict):
        raise StateError(f"{path}: holds no state")
    return state
