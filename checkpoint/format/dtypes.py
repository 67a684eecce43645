"""Element types by the name they are stored under, which is the name torch uses."""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint.errors import FormatError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: Name in ``tensors.parquet``.
        itemsize: Size of one element, bytes.
        safetensors: Code in a safetensors header; None if that format lacks it and stores the bytes as ``U8``.
    """

    name: str
    itemsize: int
    safetensors: str | None


# Types below one byte are missing on purpose: a box of them may not start on a byte.
DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("bool", 1, "BOOL"),
        DType("uint8", 1, "U8"),
        DType("int8", 1, "I8"),
        DType("float8_e4m3fn", 1, "F8_E4M3"),
        DType("float8_e5m2", 1, "F8_E5M2"),
        DType("float8_e4m3fnuz", 1, None),
        DType("float8_e5m2fnuz", 1, None),
        DType("float8_e8m0fnu", 1, None),
        DType("uint16", 2, "U16"),
        DType("int16", 2, "I16"),
        DType("float16", 2, "F16"),
        DType("bfloat16", 2, "BF16"),
        DType("uint32", 4, "U32"),
        DType("int32", 4, "I32"),
        DType("float32", 4, "F32"),
        DType("complex32", 4, None),
        DType("uint64", 8, "U64"),
        DType("int64", 8, "I64"),
        DType("float64", 8, "F64"),
        DType("complex64", 8, None),
        DType("complex128", 16, None),
    )
}


def dtype_of(name: str, where: str) -> DType:
    """Look up a stored dtype.

    Raises:
        FormatError: The name is unknown; ``where`` says which tensor of which file has it.
    """
    try:
        return DTYPES[name]
    except KeyError:
        raise FormatError(
            f"{where}: unknown dtype {name!r}; this release knows {', '.join(DTYPES)}"
        ) from None
