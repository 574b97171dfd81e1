"""The head of a GGUF file: metadata and tensor table, every length checked against the file before it is believed.

The gguf package's GGUFReader makes an array per string, which takes seconds for a vocabulary, and checks no bounds;
types and block sizes are the package's. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from etserve.errors import ModelError

MAX_ENTRIES = 100_000  # metadata keys, tensors
MAX_ELEMENTS = 1 << 24  # of one metadata array
MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]  # slowest axis first, as torch counts; a matrix is [out, in]
    kind: GGMLQuantizationType
    offset: int  # of its bytes, from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a GGUF file but the tensors' bytes. The file was found long enough for every tensor."""

    path: Path
    metadata: dict[str, Any]  # scalars, strings, lists of them
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check; reads no tensor. Raises ModelError naming the file, and the tensor where there is one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError:  # mmap of nothing
        raise ModelError(f"{path}: the file is empty") from None


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._position, self._size = path, data, 0, len(data)

    def header(self) -> GgufHeader:
        if self._size < 24 or self._take(4) != b"GGUF":
            raise self._error("not a GGUF file")
        version, num_tensors, num_keys = self._unpack("IQQ")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported (2 and 3 are)")
        if num_tensors > MAX_ENTRIES or num_keys > MAX_ENTRIES:
            raise self._error(f"{num_keys} metadata keys and {num_tensors} tensors are more than {MAX_ENTRIES}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._error(f"duplicate metadata key {key!r}")
            metadata[key] = self._value(self._value_type(self._unpack("I")[0]))
        rows = [self._tensor_row() for _ in range(num_tensors)]
        return GgufHeader(self._path, metadata, self._place(rows, metadata.get("general.alignment", 32)))

    def _place(self, rows: list[tuple[str, tuple[int, ...], int, int]], alignment: object) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment {alignment!r} is not a power of two")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind_id, offset in rows:
            if name in tensors:
                raise self._error(f"duplicate tensor {name}")
            kind, num_bytes = self._num_bytes(name, shape, kind_id)
            if start + offset + num_bytes > self._size:
                raise self._error(f"truncated: tensor {name} ends at byte {start + offset + num_bytes} of {self._size}")
            tensors[name] = GgufTensor(name, shape, kind, start + offset, num_bytes)
        self._check_overlap(list(tensors.values()))
        return tensors

    def _check_overlap(self, tensors: list[GgufTensor]) -> None:
        end = 0
        for tensor in sorted(tensors, key=lambda t: (t.offset, t.num_bytes)):
            if tensor.offset < end:
                raise self._error(f"tensor {tensor.name} overlaps another one")
            end = tensor.offset + tensor.num_bytes

    def _num_bytes(self, name: str, shape: tuple[int, ...], kind_id: int) -> tuple[GGMLQuantizationType, int]:
        try:
            kind = GGMLQuantizationType(kind_id)
        except ValueError:
            raise self._error(f"tensor {name} has unknown type {kind_id}") from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._error(f"tensor {name} has rows of {shape[-1]} elements, {kind.name} needs multiples of {block}")
        return kind, prod(shape) // block * block_bytes

    def _tensor_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._unpack(f"{num_dimensions}Q")))
        if not all(0 < size < 1 << 40 for size in shape):
            raise self._error(f"tensor {name} has shape {list(shape)}")
        kind_id, offset = self._unpack("IQ")
        return name, shape, kind_id, offset

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        element_id, count = self._unpack("IQ")
        element = self._value_type(element_id)
        if count > MAX_ELEMENTS:
            raise self._error(f"a metadata array of {count} elements is longer than {MAX_ELEMENTS}")
        if element == GGUFValueType.ARRAY:
            raise self._error("nested metadata arrays are not supported")
        if element == GGUFValueType.STRING:
            return [self._string() for _ in range(count)]
        return list(self._unpack(f"{count}{_SCALARS[element]}"))

    def _value_type(self, number: int) -> GGUFValueType:
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._error(f"unknown metadata type {number}") from None

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._error("a metadata string is not UTF-8") from None

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self._take(struct.calcsize("<" + layout)))

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > self._size:
            raise self._error(f"truncated: byte {end} of the header wanted, the file has {self._size}")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def _error(self, reason: str) -> ModelError:
        return ModelError(f"{self._path}: {reason}")
