"""Error and cost of the entropy estimators: exact, the middle of the bounds (mid), and the renormalised top k.

    python benchmarks/entropy_estimators.py
Rows are real logits of the demo model for its own vocabulary, and for larger ones the same rows with a tail drawn below
them, as a larger vocabulary has. Times are per row, the best of several, of what each estimator needs: all need the
log-sum-exp, and so one pass over the row. Errors are in nats against a float64 pass.
"""

import argparse
from collections.abc import Callable
from importlib import resources

import numpy as np
import torch

from etserve.attention.batch import StepBatch
from etserve.bench.ceilings import best_seconds
from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.control.entropy import entropy_bounds, topk_renorm_entropy
from etserve.kernels import native, rows
from etserve.models.files import resolve_model
from etserve.models.loader import load_model
from etserve.tokenizer.loading import load_tokenizer

PASSES = 7
_TAIL_NATS = 6.0  # below a row's own median lie the tokens that a larger vocabulary adds


def demo_logits(model: str, count: int) -> torch.Tensor:
    """f32 [count, vocab] of every fourth position of a text."""
    text = (resources.files("etserve.bench") / "data" / "emma_excerpt.txt").read_text(encoding="utf-8")
    files = resolve_model(model)
    decoder = load_model(EngineConfig(model=model), files).decoder
    tokens = load_tokenizer(files).encode(text[:20_000], add_special_tokens=False)[: 4 * count]
    width = -(-len(tokens) // BLOCK_SIZE)
    batch = StepBatch(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(len(tokens), dtype=np.int32),
        query_start=np.array([0, len(tokens)], np.int32),
        context_lens=np.array([len(tokens)], np.int32),
        block_tables=np.arange(1, width + 1, dtype=np.int32)[None],
        logit_rows=np.arange(3, len(tokens), 4, dtype=np.int32),
    )
    return decoder.logits(decoder.forward(batch, decoder.allocate_cache(width + 1))).clone()


def widened(logits: torch.Tensor, vocab: int) -> torch.Tensor:
    """The same rows with a tail up to `vocab` columns."""
    generator = torch.Generator().manual_seed(vocab)
    tail = torch.randn(len(logits), max(0, vocab - logits.shape[1]), generator=generator)
    return torch.cat([logits, tail + logits.median(-1, keepdim=True).values - _TAIL_NATS], -1)


def exact_entropies(logits: torch.Tensor) -> np.ndarray:
    """Float64 [rows]."""
    log_p = torch.log_softmax(logits.double(), -1)
    return -(log_p.exp() * log_p).sum(-1).numpy()


def estimates(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """mid, its bound on the error, and topk_renorm, of each row."""
    log_sum_exp = torch.logsumexp(logits.double(), -1).tolist()
    top = logits.double().topk(k, -1).values.tolist()
    bounds = [entropy_bounds(t, lse, logits.shape[1]) for t, lse in zip(top, log_sum_exp, strict=True)]
    return (
        np.array([each.mid for each in bounds]),
        np.array([(each.upper - each.lower) / 2 for each in bounds]),
        np.array([topk_renorm_entropy(t) for t in top]),
    )


def table_rows(logits: torch.Tensor, ranks: list[int]) -> list[str]:
    """Of one vocabulary."""
    vocab, exact = logits.shape[1], exact_entropies(logits)
    found = rows.row_pass(logits, 0).entropy.astype(np.float64)
    seconds = best_seconds(lambda: rows.row_pass(logits, 0), PASSES) / len(logits)
    lines = [_line(vocab, "exact, the fused pass", None, found - exact, None, seconds)]
    for k in ranks:
        mid, bound, renormalised = estimates(logits, k)
        if (np.abs(mid - exact) > bound + 1e-6).any():
            raise SystemExit(f"k {k}, vocabulary {vocab}: an error beyond its bound")
        seconds = best_seconds(_partial(logits, k), PASSES) / len(logits)
        lines.append(_line(vocab, "mid", k, mid - exact, bound, seconds))
        lines.append(_line(vocab, "topk_renorm", k, renormalised - exact, None, seconds))
    return lines


def _partial(logits: torch.Tensor, k: int) -> Callable[[], object]:
    """What finds the log-sum-exp and the likeliest k: the fused pass up to its limit, torch beyond it."""
    if k <= rows.MAX_TOP:
        return lambda: rows.row_pass(logits, k)
    return lambda: (torch.logsumexp(logits, -1), logits.topk(k, -1))


def _line(vocab: int, name: str, k: int | None, error: np.ndarray, bound: np.ndarray | None, seconds: float) -> str:
    cells = [f"{vocab:,}", name, "–" if k is None else str(k), f"{error.mean():+.4f}", f"{np.abs(error).max():.4f}"]
    cells += ["–" if bound is None else f"{bound.max():.3f}", f"{seconds * 1e6:.0f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--ranks", type=int, nargs="+", default=[20, 64, 256])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 128_256, 262_144])
    options = parser.parse_args()
    native.set_num_threads(1)
    torch.set_num_threads(1)
    logits = demo_logits(options.model, options.rows)
    print("| vocabulary | estimator | k | mean error, nats | largest | its bound | µs a row |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for vocab in options.vocabularies:
        print("\n".join(table_rows(widened(logits, vocab), options.ranks)), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
