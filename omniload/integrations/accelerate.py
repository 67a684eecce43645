"""Accelerate: omniload's loaders go through ``prepare`` without being divided a second time.

``Accelerator.prepare`` makes a new loader of any that it is given, each process taking some of its batches. A loader of
omniload has divided its data already, in an order that any number of processes can go on with:

>>> loader = DataLoader(
...     dataset, 8, shuffle=True, dp_rank=accelerator.process_index, dp_size=accelerator.num_processes
... )  # doctest: +SKIP
>>> model, optimizer, loader = prepare(accelerator, model, optimizer, loader)  # doctest: +SKIP

``accelerator.save_state`` and ``load_state`` then save and restore the loader with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.data_loader import DataLoaderStateMixin  # type: ignore[import-untyped]
from accelerate.state import GradientState  # type: ignore[import-untyped]
from accelerate.utils import send_to_device  # type: ignore[import-untyped]

from omniload.client import MixtureLoader
from omniload.errors import PlaceError
from omniload.place import Place
from omniload.torch_loader.entry import DataLoader

_END = object()


def prepare(accelerator: Accelerator, *objects: Any) -> Any:
    """`Accelerator.prepare` for any objects, omniload's loaders among them.

    Args:
        accelerator: the accelerator.
        objects: models, optimizers, loaders …; loaders of omniload become `PreparedLoader`, all else is prepared by
            the accelerator.

    Returns:
        The prepared objects in the same order; the object itself if there is one.

    Raises:
        PlaceError: a loader is not divided among the processes of the accelerator.
    """
    loaders = {i: PreparedLoader(accelerator, one) for i, one in enumerate(objects) if is_ours(one)}
    for loader in loaders.values():
        accelerator.prepare_data_loader(loader)  # which notes it down, and leaves it as it is
        accelerator.register_for_checkpointing(loader)
    others = [one for i, one in enumerate(objects) if i not in loaders]
    prepared = accelerator.prepare(*others) if others else ()
    rest = iter(prepared if len(others) > 1 else [prepared])
    result = tuple(loaders[i] if i in loaders else next(rest) for i in range(len(objects)))
    return result[0] if len(result) == 1 else result


def is_ours(thing: object) -> bool:
    """Whether this is a loader of omniload that is not prepared yet."""
    return isinstance(thing, DataLoader) and not isinstance(thing, PreparedLoader)


class PreparedLoader(DataLoader[Any], DataLoaderStateMixin):  # type: ignore[misc]  # accelerate is not typed
    """A loader as Accelerate wants it: batches on the device, one fetched ahead, so that the last is known to be it.

    Its state is that of the batches given, not of the one fetched ahead; at the last batch it is the end of the epoch.
    What is not defined here is the loader's.

    Args:
        accelerator: the accelerator.
        loader: the loader.

    Raises:
        PlaceError: the loader is not divided among the processes of the accelerator.
    """

    _is_accelerate_prepared = True

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any]) -> None:
        _check_place(accelerator, loader)
        self.loader = loader
        self.device = accelerator.device if accelerator.device_placement else None
        self.gradient_state = GradientState()
        self._non_blocking = bool(accelerator.non_blocking)
        self._given: dict[str, Any] | None = None  # the state, while the loader is one batch ahead of it

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, or while being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a class of its own
        """The batches of the loader."""
        if self._given is not None and isinstance(self.loader, MixtureLoader):
            self.loader.load_state_dict(self._given)  # it goes on where it was left, not with a new epoch
        self.begin()
        self.remainder = 0 if self._is_even() else -1
        try:
            iterator = iter(self.loader)
            batch = next(iterator, _END)
            while batch is not _END:
                self._given = self.loader.state_dict()
                following = next(iterator, _END)
                if following is _END:
                    self.end_of_dataloader = True
                    self._given = None
                yield (
                    batch
                    if self.device is None
                    else send_to_device(batch, self.device, non_blocking=self._non_blocking)
                )
                batch = following
        finally:
            self.end()

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches given."""
        return self.loader.state_dict() if self._given is None else self._given

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.loader.load_state_dict(state)
        self._given = None

    def set_epoch(self, epoch: int) -> None:
        """Number the next epoch."""
        self.loader.set_epoch(epoch)

    def _is_even(self) -> bool:
        """Whether no sample is given twice to make the processes even, so that gathered results need no cutting."""
        sampler = self.loader.sampler
        return getattr(sampler, "total_size", 0) <= len(getattr(sampler, "dataset", ()))


def _check_place(accelerator: Accelerator, loader: DataLoader[Any]) -> None:
    mesh = accelerator.torch_device_mesh
    if mesh is None:
        job = Place(dp_rank=accelerator.process_index, dp_size=accelerator.num_processes)
        remedy = "pass dp_rank=accelerator.process_index, dp_size=accelerator.num_processes"
    else:
        job = Place.from_mesh(mesh)
        remedy = "pass mesh=accelerator.torch_device_mesh"
    if loader.place != job:
        raise PlaceError(
            f"the loader is for rank {loader.place.dp_rank} of {loader.place.dp_size}, and this process is"
            f" {job.dp_rank} of {job.dp_size}: {remedy}"
        )
