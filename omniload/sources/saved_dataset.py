"""Folders that ``save_to_disk`` of Hugging Face datasets wrote: which Arrow files in them are the dataset.

``state.json`` lists a dataset's files; what else lies there are caches of ``map`` and ``filter``. ``dataset_dict.json``
lists the splits, each a folder of such a dataset.
"""

from __future__ import annotations

import json
from typing import Any

from omniload.errors import CorruptSource, MixtureError, SourceNotFound
from storage import Store

_STATE = "state.json"
_DICT = "dataset_dict.json"
_INDICES = ("_indices_files", "_indices_data_files")


def left_out(folder: Store, paths: list[str], where: str) -> set[str]:
    """The files in the folders of datasets that are not listed as theirs.

    Args:
        folder: what holds a dataset, or folders of datasets.
        paths: all that lies below it.
        where: who asks, for the messages.

    Raises:
        MixtureError: a folder of several splits, or a dataset that is a selection of the rows in its files.
        SourceNotFound: a file that is listed is not there.
        CorruptSource: a list cannot be read.
    """
    there = set(paths)
    out: set[str] = set()
    for path in paths:
        parent, _, name = path.rpartition("/")
        if name == _DICT:
            raise MixtureError(f"{where}: {_splits(folder, path, paths)}")
        if name == _STATE:
            listed = {f"{parent}/{file}".lstrip("/") for file in _data_files(folder, path, where)}
            if missing := sorted(listed - there):
                raise SourceNotFound(
                    f"{where}: {folder.url}/{missing[0]} is not there, though {_STATE} lists it; copy the dataset again"
                )
            out |= {other for other in paths if other.rpartition("/")[0] == parent} - listed
    return out


def _splits(folder: Store, path: str, paths: list[str]) -> str:
    parent = path[: -len(_DICT)]
    splits = [
        one[len(parent) : -len(_STATE) - 1]
        for one in paths
        if one.startswith(parent) and one.endswith(f"/{_STATE}") and one.count("/") == parent.count("/") + 1
    ]
    at = f"{folder.url}/{parent}".rstrip("/")
    example = f", for example {at}/{splits[0]}" if splits else ""
    return f"{at} holds several splits ({', '.join(splits)}); set path: to the folder of one{example}"


def _data_files(folder: Store, path: str, where: str) -> list[str]:
    at = f"{folder.url}/{path}"
    try:
        state: Any = json.loads(folder.read(path))
        if any(state.get(key) for key in _INDICES):
            raise MixtureError(
                f"{where}: {at}: the dataset is a selection of the rows in its files; call flatten_indices() and save"
                " it again"
            )
        return [str(one["filename"]) for one in state["_data_files"]]
    except MixtureError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSource(
            f"{at}: does not list the files of a dataset ({error!r}); save it again, or set path: to the files"
        ) from error
