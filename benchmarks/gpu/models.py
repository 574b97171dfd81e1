"""Randomly initialised checkpoints of known shapes: speed needs no trained weights. Written tensor by tensor."""

import json
import shutil
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from etserve.models.config_file import read_config
from etserve.models.registry import read_spec
from etserve.models.tensors import expected_shapes, hf_name

TOKENIZER = Path(__file__).parents[2] / "tests" / "data" / "unit_model"  # bytes: any text has tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's, as its config.json has it."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 32, 320),
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128_256),
    "8b": Shape(4096, 14_336, 32, 32, 8, 128, 128_256),
}


def write_model(folder: Path, shape: Shape, *, device: str = "cpu", seed: int = 0) -> int:
    """Write config, tokenizer and bfloat16 weights (normal, 0.02; norms 1) to `folder`; return the bytes of weights.

    `device`: where the numbers are drawn; the same device and seed give the same file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((TOKENIZER / "config.json").read_text())
    config |= {name: getattr(shape, name) for name in Shape.__slots__} | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    for path in TOKENIZER.glob("*token*"):
        shutil.copy(path, folder / path.name)
    shutil.copy(TOKENIZER / "generation_config.json", folder)
    spec = read_spec(read_config(folder / "config.json"), folder / "config.json")
    shapes = {hf_name(name): size for name, size in expected_shapes(spec).items()}
    return _write_tensors(folder / "model.safetensors", shapes, torch.Generator(device).manual_seed(seed))


def _write_tensors(path: Path, shapes: dict[str, tuple[int, ...]], random: torch.Generator) -> int:
    header, at = {}, 0
    for name, size in shapes.items():
        end = at + 2 * prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for size in shapes.values():
            file.write(_values(size, random).view(torch.uint8).numpy())
    return at


def _values(size: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    values = torch.empty(size, dtype=torch.bfloat16, device=random.device).normal_(0.0, 0.02, generator=random)
    return values.cpu()
