"""The dataset that a mixture names, or holds, as a source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from typing import Any

from omniload.errors import MixtureError, kind_and_message
from omniload.given import Given
from omniload.importing import import_named
from omniload.sources.protocol import Source
from omniload.sources.shared import reader_of
from omniload.sources.torch_dataset import DatasetSource


def open_dataset(name: str, dataset: str | Given, args: Mapping[str, Any]) -> Source:
    """The dataset that a mixture names or holds, as a source. Of a name, every call makes a dataset.

    Args:
        name: name of the source.
        dataset: ``package.module:function``, or a class; or the dataset itself.
        args: keyword arguments of the function.

    Raises:
        MixtureError: it cannot be imported or called, or is no dataset.
    """
    if isinstance(dataset, Given):
        made, identity = dataset.dataset, _own_fingerprint(dataset.dataset)
        where = f"{type(made).__module__}.{type(made).__qualname__}"
    else:
        made, identity = _made(name, dataset, args), ""
        where = (
            dataset if not args else f"{dataset} with {json.dumps(dict(args), sort_keys=True, default=repr)}"
        )
    from torch.utils.data import IterableDataset  # as what follows, not needed by sources of files

    kind = f"source '{name}': {where}: a {type(made).__name__}"
    if isinstance(made, type):
        raise MixtureError(f"{kind}, {made.__qualname__}, is no dataset; give an object of it")
    if isinstance(made, Iterator) and not isinstance(made, IterableDataset):
        raise MixtureError(
            f"{kind} can be gone through only once; give an object whose __iter__ begins anew every time"
        )
    by_index = hasattr(made, "__getitem__") and hasattr(made, "__len__")
    in_sequence = isinstance(made, IterableDataset) or not by_index
    if in_sequence and hasattr(made, "__iter__") and not isinstance(made, Set):  # which has no order
        from omniload.sources.torch_iterable import IterableSource
        from omniload.sources.torch_stream import Stream

        return IterableSource(name, reader_of(made, Stream), where, identity)
    if in_sequence:
        raise MixtureError(f"{kind} is no dataset; give it __getitem__ and __len__, or __iter__")
    return DatasetSource(name, made, where, identity)


def _made(name: str, factory: str, args: Mapping[str, Any]) -> Any:
    make = import_named(factory, f"source '{name}': dataset {factory}")
    try:
        return make(**args)
    except Exception as error:
        raise MixtureError(
            f"source '{name}': dataset {factory} cannot be made: {kind_and_message(error)}"
        ) from error


def _own_fingerprint(dataset: Any) -> str:
    """What an object says about its rows: ``fingerprint``, or ``_fingerprint`` as datasets of Hugging Face have it."""
    found = (getattr(dataset, name, None) for name in ("fingerprint", "_fingerprint"))
    return next((one for one in found if isinstance(one, str)), "")
