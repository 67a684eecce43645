"""Torch's DataLoader with a state."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data as torch_data
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler
from torch.utils.data.datapipes.datapipe import IterDataPipe, MapDataPipe
from typing_extensions import TypeVar

from omniload.errors import PlaceError, StateError
from omniload.place import Place
from omniload.sources.order import key64
from omniload.torch_loader.indices import IndexSource, epoch_seed
from omniload.torch_loader.iterable import begin_iterable, check_iterable, end_of_iterable
from omniload.torch_loader.map_style import MapPass, begin_map, check_map, end_of_map, length_of
from omniload.torch_loader.passes import Epoch, Pass, Relay
from omniload.torch_loader.reading import IterableWork, Reading
from omniload.torch_loader.state import num_ranks, number, state_of
from omniload.torch_loader.work import MapWork, StartWorker, as_it_is

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T_co = TypeVar("T_co", covariant=True, default=Any)

STATE_VERSION = 1
_HEADER = {"inside": bool, "uses_set_epoch": bool, "seed": int | None, "places": list}


class DatasetLoader(torch_data.DataLoader[T_co]):
    """`torch.utils.data.DataLoader` with a state that resumes exactly.

    Everything else is torch's: arguments, batches, workers, order. `state_dict` says where the training
    loop stands, and `load_state_dict` lets the next ``iter(loader)`` go on from there, by the rules of torchdata's
    StatefulDataLoader: a state refers to the iterator that was asked for last; one that was taken after the last batch
    gives an epoch that is over at once; one taken at the end of an epoch gives the next epoch, whole.

    **Map-style datasets** resume exactly on any number of workers, without reading a sample twice. Samplers with
    ``state_dict`` keep their own place; others are iterated again up to it, and refused if they give other indices.
    A dataset with ``state_dict`` keeps a place in each worker, and wants the same number of them.

    **Iterable datasets** resume on the same number of workers: from the state of the dataset, or of its iterator, where
    they have one, and as exactly as that state says where they are; else by iterating again up to the place.

    **Order of** ``shuffle=True``: the first epoch's is the one that torch gives under the same
    ``torch.manual_seed`` or generator. With a generator, so is every other; without, later epochs have seeds made
    from the first one's, so that a resumed run has them too.

    **Ranks**: a `DistributedSampler`, or ``dp_rank`` and ``dp_size``, with which a map-style dataset gets one (seeded
    by ``generator``, or 0; its epoch is counted here), and of an iterable dataset every rank reads all and takes one of
    every ``dp_size`` samples of each worker. A state is then one of the whole job, the same on every rank, and loads on
    any number of ranks that divides the samples taken; else it is refused.

    **Random draws in workers** are seeded by torch, per worker; after a resume by other seeds, so that none comes
    twice.

    Args:
        dataset: a map-style or an iterable one.
        batch_size: samples per batch, on each rank; None to convert samples one by one.
        shuffle: whether to draw a new order for every epoch.
        sampler: gives the indices instead.
        batch_sampler: gives lists of indices instead.
        num_workers: processes that fetch; 0 to fetch in this one.
        collate_fn: makes a batch of a list of samples.
        pin_memory: whether to copy batches to pinned memory.
        drop_last: whether to leave out a last batch that is not full; with ``dp_size``, also samples that cannot be
            shared evenly, of which otherwise some are given twice.
        timeout: seconds to wait for a batch from the workers; 0 for ever, but not for a worker that has died.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: how workers are started.
        generator: draws the order and the workers' seeds.
        prefetch_factor: batches that each worker fetches ahead.
        persistent_workers: whether workers live on from epoch to epoch.
        pin_memory_device: deprecated by torch.
        in_order: False to take batches as they come; such an epoch has no state.
        snapshot_every_n_steps: batches of a worker from one state of an iterable dataset to the next; those between
            are fetched again after a resume.
        dp_rank: rank on the data-parallel axes.
        dp_size: number of data-parallel ranks.
        mesh: instead of both, a DeviceMesh whose data-parallel axes are named ``dp…``.

    Raises:
        ValueError: as torch's loader raises it; ``dp_size`` together with a sampler.
        PlaceError: a rank that is not in the job.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int = 1,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if snapshot_every_n_steps < 1:
            raise ValueError(f"snapshot_every_n_steps: {snapshot_every_n_steps} is below 1")
        iterable = isinstance(dataset, IterableDataset)
        place = Place.of(dp_rank=dp_rank, dp_size=dp_size, mesh=mesh)
        if not 0 <= place.dp_rank < place.dp_size:
            raise PlaceError(
                f"dp_rank: {place.dp_rank} is not in 0..{place.dp_size - 1} (dp_size: {place.dp_size})"
            )
        self._divides = dp_size is not None or mesh is not None
        self._divided: DistributedSampler[T_co] | None = None
        if self._divides and not iterable:
            if sampler is not None or batch_sampler is not None:
                raise ValueError(
                    "dp_size: given together with a sampler, which decides what each rank gets; pass one or the other"
                )
            sampler = self._divided = DistributedSampler(
                dataset,
                num_replicas=place.dp_size,
                rank=place.dp_rank,
                shuffle=bool(shuffle),
                seed=0 if generator is None else generator.initial_seed(),
                drop_last=drop_last,
            )
            shuffle = None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self._snapshot_every = snapshot_every_n_steps
        self._dp = place
        self._is_pipe = isinstance(dataset, IterDataPipe | MapDataPipe)
        self._source = None if iterable else IndexSource(self.sampler, self.batch_sampler)
        self._reading = Reading(dataset)
        self._num_places = max(1, num_workers)
        self._keeps = persistent_workers or not num_workers  # whether datasets live on from epoch to epoch
        self._seed: int | None = None
        self._epoch = 0
        self._next_epoch = 0
        self._uses_set_epoch = False
        self._pass: Pass | None = None
        self._inside = False
        self._loaded: tuple[dict[str, Any], dict[str, Any]] | None = None  # a state, and the place it is here
        self._engine: torch_data.DataLoader[Any] | None = None
        # Read by Accelerate, which else would divide the batches of each rank among the ranks once more.
        self._is_accelerate_prepared = self.place.dp_size > 1

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a class of its own
        """The next epoch, or what is left of the one that a state was loaded for."""
        if self._is_pipe:
            return super().__iter__()
        place = None if self._loaded is None else self._loaded[1]
        epoch = self._next_epoch if place is None else place["epoch"]
        if self._uses_set_epoch and place is not None and place["inside"]:
            self._forward_epoch(epoch)
        # Numbers are drawn from the user's generator as torch draws them: the workers' seed, then the sampler's.
        generator = self._worker_generator(epoch, place) if self._engine is None else None
        work: MapWork | IterableWork
        progress: Pass
        if self._source is None:
            work, progress = begin_iterable(
                self, self._reading, self._dp, self._snapshot_every, place, self._kept()
            )
        else:
            if self._divided is not None:
                self._divided.set_epoch(epoch)
            seed = epoch_seed(self._draw_seed(), epoch) if self._source.needs_seed else None
            work, progress = begin_map(self, self._source, seed, place, self._kept())
        engine = self._new_engine(work, generator) if self._engine is None else self._engine
        if self.persistent_workers:
            self._engine = engine
        if isinstance(progress, MapPass):
            assert isinstance(engine.sampler, Relay), "as _new_engine made it"
            engine.sampler.tasks = progress.tasks
        # Torch draws the workers' seed from a tensor on the default device, which may not be the generator's.
        with nullcontext() if generator is None else generator.device:
            items = iter(engine)
        self._epoch, self._next_epoch = epoch, epoch + 1
        self._pass, self._inside, self._loaded = progress, True, None
        return Epoch(items, progress, functools.partial(self._end, progress), self.__len__)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no workers and no iterator, and goes on from where this loader stands."""
        copied = {**self.__dict__, "_engine": None, "_pass": None, "_inside": False}
        if self._pass is not None and not (self._inside and self._gives_no_order):
            state = self.state_dict()
            copied["_loaded"] = state, self._check(state)
        return copied

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank.

        Raises:
            TypeError: the dataset or sampler has no length; or several workers share an iterable dataset, and what
                each of them makes of its part is not known.
        """
        if self._source is not None or self._is_pipe:
            return super().__len__()
        if self.num_workers > 1:
            raise TypeError(
                "the number of batches of an iterable dataset that several workers share is not known before they"
                " have read it"
            )
        samples = len(self.dataset) // self._dp.dp_size  # type: ignore[arg-type]  # the TypeError is the user's answer
        if self.batch_size is None:
            return samples
        return samples // self.batch_size if self.drop_last else math.ceil(samples / self.batch_size)

    @property
    def place(self) -> Place:
        """The rank, and the number of ranks, that the data is divided among here; 0 of 1 if it is not."""
        if self._source is not None and self._source.distributed:
            return Place(dp_rank=self._source.sampler.rank, dp_size=self._source.num_replicas)
        return self._dp

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch, for the order of ``shuffle`` and for samplers and datasets with ``set_epoch``.

        While a state from the middle of an epoch waits to be gone on from, its own epoch stands.
        """
        self._uses_set_epoch = True
        if self._loaded is None or not self._loaded[1]["inside"]:
            self._next_epoch = epoch
            self._forward_epoch(epoch)
            for saved in self._loaded or ():
                saved |= {"epoch": epoch, "uses_set_epoch": True}

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop stands; JSON-serialisable if the states of dataset and sampler are.

        Raises:
            StateError: batches come in no order (``in_order=False``), or from a DataPipe.
        """
        if self._is_pipe:
            raise StateError("a DataPipe has no place to save; load a Dataset or an IterableDataset instead")
        if self._loaded is not None:
            return copy.deepcopy(self._loaded[0])
        if self._inside and self._gives_no_order:
            raise StateError("with in_order=False an epoch has no place to save; save between epochs")
        if self._source is not None and self._source.needs_seed and self._seed is None:
            self._seed = self._seed_to_come()
        return {
            "version": STATE_VERSION,
            "style": "iterable" if self._source is None else "map",
            "epoch": self._epoch if self._inside else self._next_epoch,
            "inside": self._inside,
            "uses_set_epoch": self._uses_set_epoch,
            "seed": self._seed,
            "ranks": self._num_ranks(),
            **self._standing(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a saved state. Nothing changes if it is refused.

        Raises:
            StateError: the state is of another dataset, sampler, number of workers or ranks, or damaged.
        """
        raw = copy.deepcopy(dict(state))
        place = self._check(raw)
        self._reading.settle(None)
        if not raw["inside"]:
            self._restore_between_epochs(place)
        self._loaded = raw, place
        self._seed = raw["seed"]
        self._uses_set_epoch = raw["uses_set_epoch"]
        self._pass, self._inside, self._engine = None, False, None

    def _restore_between_epochs(self, place: Mapping[str, Any]) -> None:
        """Put what lives in this process where it stood: what users set from now on holds for the next epoch."""
        if self._source is not None:
            self._source.restore(place["order"], place["sampler"])
        if not self.num_workers:
            self._restore_dataset(place["places"][0])
        if place["uses_set_epoch"]:
            self._forward_epoch(place["epoch"])

    def _restore_dataset(self, place: Any) -> None:
        if self._source is None:
            self._reading.settle(place)
        elif place is not None:
            self.dataset.load_state_dict(place)  # type: ignore[attr-defined]  # it had one when the state was saved

    def _check(self, state: dict[str, Any]) -> dict[str, Any]:
        """The place that a state is for this loader."""
        style = "iterable" if self._source is None else "map"
        if state.get("version") != STATE_VERSION or state.get("style") != style:
            raise StateError(
                f"the state has version {state.get('version')!r} and style {state.get('style')!r}, and this loader"
                f" reads {STATE_VERSION} and '{style}'; load a state that a loader of the same kind of dataset saved"
            )
        for key, kinds in _HEADER.items():
            if key not in state or not isinstance(state[key], kinds):
                raise StateError(f"the loader state is damaged: '{key}' is {state.get(key)!r}")
        _, _, ranks = (number(state, key) for key in ("epoch", "batches", "ranks"))
        fits_any = self._divides if self._source is None else self._source.fits_any_ranks
        if ranks != self._num_ranks() and not fits_any:
            raise StateError(
                f"the state was saved by one of {ranks} ranks, each with a part of the data that the loader knows"
                f" nothing of, and this job has {self._num_ranks()}: resume with {ranks} ranks, or let the loader"
                " divide the data (dp_rank and dp_size)"
            )
        if self._source is None:
            return check_iterable(state, num_places=self._num_places)
        return check_map(state, self._source, length=length_of(self.dataset), num_places=self._num_places)

    def _standing(self) -> dict[str, Any]:
        """Where the epoch stands, or the one before ended."""
        if self._pass is not None:
            return self._pass.to_json() if self._inside else self._pass.end_to_json(keeps=self._keeps)
        if self._source is None:
            return end_of_iterable(self._kept())
        return end_of_map(self._source, self.dataset, self._kept(), sampler=state_of(self._source.sampler))

    def _kept(self) -> list[Any]:
        """By worker, the place where a dataset that lives on was left by the last epoch."""
        if self._pass is None or self._inside:
            return [None] * self._num_places
        places: list[Any] = self._pass.end_to_json(keeps=self._keeps)["places"]
        return places

    def _end(self, ended: Pass) -> None:
        if ended is self._pass:  # not if another iterator has been asked for since
            self._inside = False

    @property
    def _gives_no_order(self) -> bool:
        return not self.in_order and self.num_workers > 1

    def _num_ranks(self) -> int:
        return self._dp.dp_size if self._divides else num_ranks()

    def _draw_seed(self) -> int:
        if self._seed is None:
            self._seed = _draw(None)
        return self._seed

    def _seed_to_come(self) -> int:
        """The seed that would be drawn if the first epoch began now, so that a state changes no order."""
        generator = _copy_of(torch.default_generator)
        if self.generator is None:
            _draw(generator)  # the workers' comes first
        return _draw(generator)

    def _worker_generator(self, epoch: int, place: Mapping[str, Any] | None) -> torch.Generator:
        """What torch is to draw the workers' seed from: the number it would draw from the user's generator."""
        generator = _copy_of(torch.default_generator if self.generator is None else self.generator)
        drawn = _draw(self.generator)
        if place is not None and place["inside"]:
            # Another one in the middle of an epoch, where the same numbers would come a second time.
            generator.manual_seed(key64(drawn, "resumed", epoch, place["batches"]) >> 1)
        return generator

    def _new_engine(
        self, work: MapWork | IterableWork, generator: torch.Generator | None
    ) -> torch_data.DataLoader[Any]:
        """A loader of torch's whose items are our batches and the notes that come with them."""
        return torch_data.DataLoader(
            work,
            batch_size=None,
            sampler=None if isinstance(work, IterableWork) else Relay(),
            num_workers=self.num_workers,
            collate_fn=as_it_is,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=StartWorker(self.worker_init_fn) if self.num_workers else None,
            multiprocessing_context=self.multiprocessing_context,
            generator=generator,
            prefetch_factor=self.prefetch_factor if self.num_workers else None,
            persistent_workers=self.persistent_workers,
            pin_memory_device=self.pin_memory_device,
            in_order=self.in_order,
        )

    def _forward_epoch(self, epoch: int) -> None:
        batch_sampler: Any = self.batch_sampler
        things: list[Any] = [
            batch_sampler,
            self.sampler,
            getattr(batch_sampler, "sampler", None),
            self.dataset,
        ]
        for thing in {id(one): one for one in things}.values():
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)


def _copy_of(generator: torch.Generator) -> torch.Generator:
    copied = torch.Generator(generator.device)
    copied.set_state(generator.get_state())
    return copied


def _draw(generator: torch.Generator | None) -> int:
    """A number as torch's loader draws it."""
    device = "cpu" if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator).item())
