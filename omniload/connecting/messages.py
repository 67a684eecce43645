"""What a source sends to its receivers, as bytes: a step, the end of the stream, or the error that stopped it.

::

    uint32 bytes of the header | header, JSON | the arrays, each from a multiple of 64 bytes on

The header names the kind of the message, and of each array the name, dtype and shape.
"""

from __future__ import annotations

import builtins
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import omniload.errors
import storage.errors
from omniload.connecting.circles import View
from omniload.connecting.packing import Arrays, LanePacker, unpack
from omniload.errors import OmniloadError, kind_and_message
from omniload.planner import StreamState
from omniload.planner.decisions import from_json, to_json
from omniload.planner.plan_bytes import plan_from_bytes
from omniload.recycler import Recycler
from omniload.runtime.steps import End, Step

_LENGTH = struct.Struct("<I")
_ALIGNED = 64


class StepWriter:
    """Writes the messages of one source.

    Args:
        names: of the sources of the mixture.
        lanes: the lanes of the steps, by number.
    """

    def __init__(self, names: list[str], lanes: Sequence[int]) -> None:
        self._names = names
        self._lanes = lanes
        self._recycler = Recycler()

    def write(self, item: Step | End | BaseException, views: Sequence[View], own: View) -> Written:
        """The messages for some views, and what the source itself makes of the item.

        Args:
            item: the whole step, or what there is in its place.
            views: one message each.
            own: of the source.
        """
        if isinstance(item, BaseException):
            header: dict[str, Any] = {"kind": "error", "error": error_to_json(item)}
            return Written(item=item, messages=[self._message(header, {})] * len(views))
        after = np.frombuffer(json.dumps(item.after.to_json(self._names)).encode(), np.uint8)
        if isinstance(item, End):
            message = self._message({"kind": "end"}, {"after": after})
            return Written(item=item, messages=[message] * len(views))
        packer = LanePacker(item.plan, self._lanes, item.lanes)
        due = [to_json(one) for one in item.before.decisions if one.step == item.plan.step]
        decided = [to_json(one) for one in item.decided]
        plan = np.frombuffer(item.plan.encoded, np.uint8)
        return Written(
            item=replace(item, lanes=packer.cut(own)),
            messages=[
                self._message(
                    {"kind": "step", "due": due, "decided": decided},
                    {"after": after, "plan": plan, **packer.pack(view)},
                )
                for view in views
            ],
        )

    def _message(self, header: dict[str, Any], arrays: Arrays) -> np.ndarray:
        described = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        text = json.dumps({**header, "arrays": described}).encode()
        sizes = [array.nbytes for array in arrays.values()]
        starts = _starts(len(text), sizes)
        message = self._recycler.empty(starts[-1], np.uint8)
        message[: _LENGTH.size] = np.frombuffer(_LENGTH.pack(len(text)), np.uint8)
        at = _LENGTH.size + len(text)
        message[_LENGTH.size : at] = np.frombuffer(text, np.uint8)
        for start, array in zip(starts, arrays.values(), strict=False):
            message[at:start] = 0  # what is between arrays would be what the memory had before
            at = start + array.nbytes
            place = message[start:at].view(array.dtype).reshape(array.shape)
            place[...] = array
        message[at:] = 0
        return message


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A step on its way."""

    item: Step | End | BaseException
    """As the source itself gets it."""
    messages: list[np.ndarray]
    """``uint8[size]``, one for each view."""


class StepReader:
    """Reads the messages of one receiver.

    Args:
        names: of the sources of the mixture.
        lanes: the lanes of the steps, by number.
        view: what the receiver gets of them.
        derived: which of `omniload.constructor.DERIVED` the lanes have.
    """

    def __init__(self, names: list[str], lanes: Sequence[int], view: View, derived: Sequence[str]) -> None:
        self._names = names
        self._lanes = lanes
        self._view = view
        self._derived = derived
        self._recycler = Recycler()

    def buffer(self, size: int) -> np.ndarray:
        """``uint8[size]``: room for a message."""
        return self._recycler.empty(size, np.uint8)

    def read(self, message: np.ndarray, before: StreamState) -> Step | End | BaseException:
        """The step, or what there is in its place.

        Args:
            message: ``uint8[n]``; large arrays of a step are views of it.
            before: the stream before it. Of its decisions a step keeps those that the source knew of about this step.
        """
        header, arrays = _parsed(message)
        if header["kind"] == "error":
            return error_from_json(header["error"])
        after = StreamState.from_json(json.loads(arrays.pop("after").tobytes()), self._names)
        if header["kind"] == "end":
            return End(after=after, quarantined=())
        plan = plan_from_bytes(arrays.pop("plan").tobytes())
        due = tuple(map(from_json, header["due"]))
        return Step(
            plan=plan,
            before=replace(before, decisions=due),
            after=after,
            lanes=unpack(arrays, plan, self._lanes, self._view, self._derived, self._recycler),
            quarantined=(),
            decided=tuple(map(from_json, header["decided"])),
        )


def error_to_json(error: BaseException) -> dict[str, Any]:
    """What an error is, for `error_from_json`."""
    text = str(error)
    # A KeyError, say, has other words in its text than those that it was made from.
    made_from = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else text
    return {
        "type": type(error).__name__,
        "made_from": made_from,
        "text": text,
        "said": kind_and_message(error),
    }


def error_from_json(values: Mapping[str, Any]) -> Exception:
    """An error with the type and text of another; of a type that is not ours or Python's, an `OmniloadError`."""
    for module in (omniload.errors, storage.errors, builtins):
        kind = getattr(module, values["type"], None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            error = _made(kind, values["made_from"])
            if str(error) == values["text"]:
                return error
    return OmniloadError(values["said"])


def _made(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # it is made from other things, as those of `storage` from a path and a reason
        error = kind.__new__(kind, text)
        Exception.__init__(error, text)
        return error


def _parsed(message: np.ndarray) -> tuple[dict[str, Any], Arrays]:
    [size] = _LENGTH.unpack(message[: _LENGTH.size].tobytes())
    header = json.loads(message[_LENGTH.size : _LENGTH.size + size].tobytes())
    described = [(name, np.dtype(dtype), tuple(shape)) for name, dtype, shape in header["arrays"]]
    sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in described]
    arrays = {
        name: message[start : start + length].view(dtype).reshape(shape)
        for (name, dtype, shape), start, length in zip(described, _starts(size, sizes), sizes, strict=False)
    }
    return header, arrays


def _starts(header_bytes: int, sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and where the last one ends."""
    starts = []
    at = _LENGTH.size + header_bytes
    for size in sizes:
        at = -(-at // _ALIGNED) * _ALIGNED
        starts.append(at)
        at += size
    return [*starts, at]
