"""Weights from a Hugging Face folder of .safetensors files. Everything is checked against the headers before a read."""

import json
import re
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from etserve.errors import ModelError
from etserve.models.files import weight_files
from etserve.models.safetensors_header import TensorHeader, read_safetensors_header
from etserve.models.tensors import check_tensors, expected_shapes, hf_name
from etserve.models.types import DecoderSpec

INDEX_NAME = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DERIVED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # buffers that old checkpoints carry


class SafetensorsSource:
    """A WeightSource. Opening it takes milliseconds: only headers are read."""

    quantization: str | None = None

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        """Raises ModelError naming file and tensor for whatever does not fit `spec`."""
        self._shapes = expected_shapes(spec)
        self._headers = _read_headers(folder)
        ignored = {name for name in self._headers if _DERIVED.search(name)}
        if spec.tied_head:
            ignored.add(hf_name("head.weight"))  # a copy of the embedding
        paths = {header.path for header in self._headers.values()}
        check_tensors(
            paths.pop() if len(paths) == 1 else folder / INDEX_NAME,
            {hf_name(name): shape for name, shape in self._shapes.items()},
            {name: (header.path, header.shape) for name, header in self._headers.items()},
            frozenset(ignored),
        )
        kinds = Counter(self._headers[hf_name(name)].dtype for name, shape in self._shapes.items() if len(shape) == 2)
        self.dtype = _DTYPES[kinds.most_common(1)[0][0]]
        self.num_parameters = sum(prod(shape) for shape in self._shapes.values())
        self._open: dict[Path, Any] = {}

    def has(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See WeightSource."""
        path = self._headers[hf_name(name)].path
        try:
            if path not in self._open:
                # Of a mapping every page that was read would stay resident beside its packed copy.
                self._open[path] = safe_open(str(path), framework="pt", device="cpu", backend="pread")
            found: torch.Tensor = self._open[path].get_tensor(hf_name(name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: tensor {hf_name(name)}: {error}") from None
        return found.to(dtype).contiguous()


def _read_headers(folder: Path) -> dict[str, TensorHeader]:
    index = folder / INDEX_NAME
    if index.is_symlink() or index.exists():
        return _sharded(folder, index)
    return read_safetensors_header(_single(folder))


def _single(folder: Path) -> Path:
    path = folder / "model.safetensors"
    if path.is_symlink() or path.exists():
        return path
    files = weight_files(folder)
    if len(files) != 1:
        raise ModelError(f"{folder}: {len(files)} .safetensors files and no {INDEX_NAME}")
    return files[0]


def _sharded(folder: Path, index: Path) -> dict[str, TensorHeader]:
    weight_map, total_size = _read_index(index)
    shards = {name: read_safetensors_header(folder / name) for name in sorted(set(weight_map.values()))}
    headers: dict[str, TensorHeader] = {}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise ModelError(f"{folder / shard}: tensor {tensor} is missing, the index says it is here")
        headers[tensor] = shards[shard][tensor]
    for shard, found in shards.items():
        for tensor in found:
            if weight_map.get(tensor) != shard:
                raise ModelError(f"{folder / shard}: tensor {tensor} is not in the index for this file")
    num_bytes = sum(header.num_bytes for header in headers.values())
    if total_size is not None and total_size != num_bytes:
        raise ModelError(f"{index}: total_size is {total_size}, the shards hold {num_bytes} bytes")
    return headers


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{index}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{index}: not JSON: {str(error)[:200]}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: tensor {tensor} is in {str(shard)[:80]!r}, no .safetensors file of this folder")
    metadata = content.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(total_size) if isinstance(total_size, int | float) else None
