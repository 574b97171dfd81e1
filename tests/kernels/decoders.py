"""Small random decoders, native and torch, on the same weights."""

import numpy as np
import torch

from etserve.attention.batch import StepBatch
from etserve.models.rope import rope_tables
from etserve.models.tensors import expected_shapes
from etserve.models.types import Decoder, DecoderSpec, RopeSpec

BASE = DecoderSpec(
    architecture="LlamaForCausalLM",
    num_layers=2,
    hidden_size=48,
    intermediate_size=100,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=101,
    max_position=128,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10_000.0),
)


class RandomWeights:
    """A WeightSource of fixed random tensors, of the size that keeps activations near one."""

    quantization = None

    def __init__(self, spec: DecoderSpec, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self._tensors = {
            name: torch.randn(shape, generator=random) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
            + (1.0 if "norm" in name else 0.0)
            for name, shape in expected_shapes(spec).items()
        }
        self.dtype = torch.float32
        self.num_parameters = sum(tensor.numel() for tensor in self._tensors.values())

    def has(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._tensors[name].to(dtype)


def tables(spec: DecoderSpec) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_tables(spec, spec.max_position)


Part = tuple[list[int], int, list[int]]  # token ids, position of the first, block table


def make_batch(parts: list[Part], logit_rows: list[int] | None = None) -> StepBatch:
    """All rows' logits unless said otherwise."""
    token_ids = [token for tokens, _, _ in parts for token in tokens]
    positions = [start + i for tokens, start, _ in parts for i in range(len(tokens))]
    query_start = np.cumsum([0] + [len(tokens) for tokens, _, _ in parts])
    tables = np.zeros((len(parts), max(len(table) for _, _, table in parts)), np.int32)
    for row, (_, _, table) in zip(tables, parts, strict=True):
        row[: len(table)] = table
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        query_start=query_start.astype(np.int32),
        context_lens=np.array([start + len(tokens) for tokens, start, _ in parts], np.int32),
        block_tables=tables,
        logit_rows=np.array(range(len(token_ids)) if logit_rows is None else logit_rows, np.int32),
    )


def prompt(length: int, seed: int = 0, vocab: int = BASE.vocab_size) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def chunked_among_others(decoder: Decoder, tokens: list[int], other: list[int]) -> torch.Tensor:
    """Logits of 50 tokens computed in five chunks, each in a step with the beginning of `other`."""
    cache = decoder.allocate_cache(12)
    chunks = []
    for start, end in ((0, 7), (7, 8), (8, 33), (33, 49), (49, 50)):
        mate = (other[: end - start], 0, [10, 11])
        batch = make_batch([mate, (tokens[start:end], start, [9, 2, 5, 7])])
        chunks.append(decoder.logits(decoder.forward(batch, cache))[len(mate[0]) :].clone())
    return torch.cat(chunks)
