"""Say what quantised weights cost in accuracy: each kernel against f32, and the perplexity of a model in each format.

    python benchmarks/quant_error.py --model demo --tokens 2048
The perplexity is over windows of 512 tokens of the shipped excerpt of Austen's Emma, each from an empty context.
"""

import argparse
import math
from importlib import resources
from typing import Any, get_args

import numpy as np
import torch

from etserve.attention.batch import StepBatch
from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.engine.building import set_threads
from etserve.kernels import matrix, quant, reference_quant
from etserve.models.files import resolve_model
from etserve.models.loader import load_model
from etserve.models.types import Decoder
from etserve.tokenizer.loading import load_tokenizer

_WINDOW = 512  # tokens
_RUNS: list[tuple[str, dict[str, Any]]] = [
    ("own", {}),
    ("float32", {"dtype": "float32"}),
    ("bfloat16", {"dtype": "bfloat16"}),
    *((kind, {"quantize": kind}) for kind in get_args(quant.Rounded)),
]


def relative_rmse(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).double().square().mean().sqrt() / expected.double().square().mean().sqrt())


def report_kernels(num_rows: int = 64, num_outputs: int = 1024, num_inputs: int = 1536) -> None:
    """The kernel against f32 products of its own weights and, where we can round to the format, of the originals.

    Gaussian activations; weights Gaussian or, in super-blocks, of random bits.
    """
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=random)
    x = torch.randn(num_rows, num_inputs, generator=random)
    print("format    against its dequantised weights    against the f32 weights   (relative RMSE)")
    for kind in get_args(quant.Format):
        rounded = next((name for name in get_args(quant.Rounded) if name == kind), None)
        if rounded is None:
            blocks = reference_quant.random_blocks(num_outputs, num_inputs, kind, random)
        else:
            blocks = quant.quantise(weight, rounded)
        packed = quant.QuantMatrix(num_outputs, num_inputs, kind)
        packed.pack(blocks)
        got, stored = matrix.linear(x, packed), reference_quant.dequantise(blocks, kind)
        original = "-" if rounded is None else f"{relative_rmse(got, x @ weight.T):.5f}"
        print(f"{kind:9} {relative_rmse(got, x @ stored.T):.5f} {original:>33}")


def negative_log_likelihood(decoder: Decoder, token_ids: list[int]) -> float:
    """Sum in nats over all tokens but the first, from an empty context."""
    count = len(token_ids)
    num_blocks = -(-count // BLOCK_SIZE)
    batch = StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_start=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=np.arange(1, num_blocks + 1, dtype=np.int32)[None],
        logit_rows=np.arange(count, dtype=np.int32),
    )
    logits = decoder.logits(decoder.forward(batch, decoder.allocate_cache(num_blocks + 1)))[:-1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(token_ids[1:]), reduction="sum"))


def report_perplexity(model: str, num_tokens: int) -> None:
    files = resolve_model(model)
    text = (resources.files("etserve.bench") / "data" / "emma_excerpt.txt").read_text(encoding="utf-8")
    token_ids = load_tokenizer(files).encode(text)[:num_tokens]
    windows = [token_ids[start : start + _WINDOW] for start in range(0, len(token_ids), _WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    print(f"\nperplexity of {model} on {sum(map(len, windows))} tokens")
    for name, settings in _RUNS:
        loaded = load_model(EngineConfig(model=model, backend="native", kv_dtype="float32", **settings), files)
        total = sum(negative_log_likelihood(loaded.decoder, window) for window in windows)
        perplexity = math.exp(total / sum(len(window) - 1 for window in windows))
        print(f"{name:9} {loaded.dtype:12} {loaded.decoder.weight_bytes / 1e6:7.1f} MB   {perplexity:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    set_threads(0)
    report_kernels()
    report_perplexity(options.model, options.tokens)


if __name__ == "__main__":
    main()
