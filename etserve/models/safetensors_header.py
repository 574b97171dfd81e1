"""What a .safetensors file says of itself, checked before the library is let near it. Reads no tensor, needs no torch.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, JSON header, data).
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from etserve.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_TENSORS = 100_000
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of one file."""

    path: Path
    dtype: str  # F32, F16 or BF16
    shape: tuple[int, ...]
    num_bytes: int


def read_safetensors_header(path: Path) -> dict[str, TensorHeader]:
    """Raises ModelError naming the file, and the tensor where there is one."""
    header, data_bytes = _header(path)
    if len(header) > MAX_TENSORS:
        raise ModelError(f"{path}: {len(header)} tensors are more than {MAX_TENSORS}")
    tensors: dict[str, TensorHeader] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensors[name], begin = _tensor(path, name, entry)
        spans.append((begin, begin + tensors[name].num_bytes, name))
    end = 0
    for begin, stop, name in sorted(spans):
        if begin != end:
            raise ModelError(f"{path}: tensor {name} begins at byte {begin}, the one before it ends at {end}")
        end = stop
    if end != data_bytes:
        kind = "truncated" if end > data_bytes else "too long"
        raise ModelError(f"{path}: {kind}: its tensors take {end} bytes, the file has {data_bytes} ({_last(spans)})")
    return tensors


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header, and how many bytes of data follow it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise ModelError(f"{path}: truncated: {size} bytes are no safetensors file")
            (length,) = struct.unpack("<Q", start)
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise ModelError(f"{path}: truncated or broken: a header of {length} bytes in a file of {size}")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the header is not JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: the header is not a JSON object")
    return header, size - 8 - length


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers may pick different ones of two equal keys."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate key {next(name for name in names if names.count(name) > 1)}")
    return value


def _tensor(path: Path, name: str, entry: object) -> tuple[TensorHeader, int]:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise ModelError(f"{where} has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{where} has dtype {dtype!r} ({', '.join(ITEM_BYTES)} are supported)")
    if not isinstance(shape, list) or not _are_counts(shape):
        raise ModelError(f"{where} has shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_counts(offsets):
        raise ModelError(f"{where} has data_offsets {str(offsets)[:80]}")
    num_bytes = prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        raise ModelError(f"{where} spans {offsets[1] - offsets[0]} bytes, {dtype} {shape} takes {num_bytes}")
    return TensorHeader(path, dtype, tuple(shape), num_bytes), offsets[0]


def _are_counts(values: list[Any]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 48 for value in values)


def _last(spans: list[tuple[int, int, str]]) -> str:
    return f"tensor {max(spans, key=lambda span: span[1])[2]} is last" if spans else "no tensors"
