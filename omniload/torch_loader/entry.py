"""`omniload.DataLoader`: one name for the loader of a dataset and the loader of a mixture."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import torch
from torch.utils.data import Dataset, Sampler

from omniload.mixture import Mixture
from omniload.torch_loader.loader import DatasetLoader, T_co

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from omniload.client import MixtureLoader
    from omniload.runtime.chaos import Chaos
    from omniload.runtime.options import Execution, RayOptions
    from omniload.sources.split import Split


class DataLoader(DatasetLoader[T_co]):
    """Batches of a dataset, as `torch.utils.data.DataLoader` gives them, or the microbatches of a mixture.

    ``DataLoader(dataset, batch_size=…, …)`` takes torch's arguments and is described at `DatasetLoader`;
    ``DataLoader(mixture, …)``, the mixture being a YAML file, a mapping or a `Mixture`, is a `MixtureLoader` and
    described there. Both are torch's class, have ``state_dict`` and ``load_state_dict``, and resume exactly.

    Raises:
        TypeError: an argument of the one kind with the other; names it.
    """

    _takes_mixtures = False

    @overload
    def __new__(
        cls,
        mixture: Mixture | Mapping[str, Any] | str | Path,
        *,
        seq_len: int | None = None,
        packs: int | None = None,
        lanes: int | None = None,
        steps: int | None = None,
        quarantine: str | Path | None = None,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        split: Split = "train",
        prefetch_steps: int = 2,
        buffer_bytes: int = ...,
        timeout_s: float = 300.0,
        derived: Collection[str] = ...,
        execution: Execution | None = None,
        ray: RayOptions | Mapping[str, Any] | None = None,
        chaos: Chaos | None = None,
    ) -> MixtureLoader: ...

    @overload
    def __new__(
        cls,
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
    ) -> Self: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """The loader for what is to be loaded: only `DataLoader` itself chooses, a subclass of it is for datasets."""
        if cls is DataLoader:
            return super().__new__(_class_for(args, kwargs))
        if not cls._takes_mixtures and isinstance(_data(args, kwargs), Mixture | str | Path):
            raise TypeError(
                f"{cls.__name__}: is for datasets, and this is a mixture; derive it from omniload.MixtureLoader"
            )
        return super().__new__(cls)


def _data(args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    return args[0] if args else keywords.get("mixture", keywords.get("dataset"))


def _is_mixture(data: Any) -> bool:
    """Whether this declares a mixture. Datasets may be mappings too: a dict with indices for keys, or a TensorDict."""
    if not isinstance(data, Mapping) or isinstance(data, Dataset):
        return isinstance(data, Mixture | str | Path)
    if isinstance(data, dict):
        return all(isinstance(key, str) for key in data)
    return any(isinstance(key, str) and key == "sources" for key in data.keys())  # noqa: SIM118  see TensorDict


def _class_for(args: Sequence[Any], keywords: Mapping[str, Any]) -> type[Any]:
    data = _data(args, keywords)
    of_dataset = inspect.signature(DatasetLoader.__init__).parameters
    is_mixture = _is_mixture(data)
    if not is_mixture and keywords.keys() <= of_dataset.keys():
        return DataLoader
    from omniload.client import MixtureLoader  # not needed for datasets

    of_mixture = inspect.signature(MixtureLoader.__init__).parameters
    if not is_mixture:
        wrong = next((key for key in keywords if key in of_mixture and key not in of_dataset), None)
        if wrong is not None:
            raise TypeError(
                f"{wrong}: is for mixtures (a YAML file or a mapping), and this is a {type(data).__name__}; a dataset"
                " takes the arguments of torch's DataLoader"
            )
        return DataLoader
    if "dataset" in keywords:
        raise TypeError("dataset: is a mixture; pass it first, or as mixture=")
    given = [*list(of_dataset)[2 : len(args) + 1], *keywords]
    wrong = next((key for key in given if key in of_dataset and key not in of_mixture), None)
    if wrong is not None:
        raise TypeError(
            f"{wrong}: is for datasets, and a mixture makes its own batches; set seq_len, packs and lanes"
        )
    return MixtureLoader
