"""Error of each KV cache dtype against a float32 cache, on text that the model reads token after token of a prefix.

    python benchmarks/kv_error.py --tokens 1024
Weights are the model's own in bfloat16. Differences are per token: KL of the next-token distributions in nats, and the
loss on the text's own next token.
"""

import argparse
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch

from etserve.attention.batch import StepBatch
from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.kernels import native
from etserve.models.files import resolve_model
from etserve.models.loader import load_model
from etserve.tokenizer.loading import load_tokenizer

CHUNK = 128
DTYPES = ("bfloat16", "float16", "int8")


@dataclass(frozen=True)
class Text:
    """Token ids of a text, one more than are read."""

    ids: list[int]

    def chunks(self, num_blocks: int) -> list[StepBatch]:
        table = np.arange(1, num_blocks + 1, dtype=np.int32)[None]
        return [self._chunk(begin, table) for begin in range(0, len(self.ids) - 1, CHUNK)]

    def _chunk(self, begin: int, table: np.ndarray) -> StepBatch:
        end = min(begin + CHUNK, len(self.ids) - 1)
        rows = np.arange(end - begin, dtype=np.int32)
        return StepBatch(
            token_ids=np.array(self.ids[begin:end], np.int32),
            positions=rows + np.int32(begin),
            query_start=np.array([0, end - begin], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=table,
            logit_rows=rows,
        )


def log_probabilities(model: str, kv_dtype: str, text: Text) -> tuple[torch.Tensor, int]:
    """[T, V], and bytes of KV cache per token."""
    decoder = load_model(EngineConfig(model=model, backend="native", kv_dtype=kv_dtype), resolve_model(model)).decoder
    num_blocks = -(-len(text.ids) // BLOCK_SIZE)
    cache = decoder.allocate_cache(num_blocks + 1)
    rows = [decoder.logits(decoder.forward(batch, cache)).log_softmax(-1) for batch in text.chunks(num_blocks)]
    return torch.cat(rows), decoder.kv_bytes_per_block() // BLOCK_SIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    native.set_num_threads(options.threads)
    excerpt = (files("etserve.bench") / "data" / "emma_excerpt.txt").read_text(encoding="utf-8")
    text = Text(load_tokenizer(resolve_model(options.model)).encode(excerpt)[: options.tokens + 1])
    targets = torch.tensor(text.ids[1:])[:, None]
    exact, size = log_probabilities(options.model, "float32", text)
    loss = -exact.gather(1, targets).mean().item()
    print(f"{native.backend_name()}, {options.tokens} tokens; float32: {size:,} bytes a token, loss {loss:.4f} nats")
    for kv_dtype in DTYPES:
        found, size = log_probabilities(options.model, kv_dtype, text)
        divergence = (exact.exp() * (exact - found)).sum(-1)
        moved = -found.gather(1, targets).mean().item() - loss
        agreed = (found.argmax(-1) == exact.argmax(-1)).float().mean().item()
        print(
            f"{kv_dtype:9s} {size:,} bytes a token, KL {divergence.mean().item():.6f},"
            f" worst {divergence.max().item():.4f}, loss {moved:+.5f} nats ({moved / loss:+.3%}),"
            f" top-1 agreement {agreed:.2%}"
        )


if __name__ == "__main__":
    main()
