"""Measure what skipping blocks costs in quality: the findings table of the control laws, on real text, in this engine.

    python benchmarks/findings.py --output benchmarks/findings.md
Parts of a novel are read densely up to a prefix; the tokens behind it are fed one at a time (decode rows,
teacher-forced), once per arm, through the native decoder. Every arm is compared with dense attention of the same text.
"""

import argparse
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from etserve.attention.batch import StepBatch
from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.kernels import native
from etserve.kernels.selection import BlockSelection, SelectionRule
from etserve.models.files import resolve_model
from etserve.models.loader import load_model
from etserve.models.native import NativeDecoder
from etserve.models.types import KVCache
from etserve.tokenizer.loading import load_tokenizer

CHUNK = 512  # prompt tokens of a step
HEADER = "| context | arm | kept | KL nats/token | top-1 agreement | ΔNLL | estimated missing mass |"


@dataclass(frozen=True)
class Arm:
    """One way to choose blocks; dense has epsilon 0."""

    name: str
    epsilon: float
    rule: SelectionRule


@dataclass
class Score:
    """Sums over scored tokens."""

    tokens: int = 0
    divergence: float = 0.0
    agreements: int = 0
    excess_nll: float = 0.0
    read: int = 0
    total: int = 0
    missing: float = 0.0

    def add(self, dense: torch.Tensor, arm: torch.Tensor, target: int) -> None:
        """Log-probabilities [V] of the same position, and the token that follows."""
        self.tokens += 1
        self.divergence += float((dense.exp() * (dense - arm)).sum())
        self.agreements += int(dense.argmax() == arm.argmax())
        self.excess_nll += float(dense[target] - arm[target])

    def row(self, context: int, name: str) -> str:
        n = self.tokens
        cells = (f"{self.read / self.total:.1%}", f"{self.divergence / n:.4f}", f"{self.agreements / n:.1%}")
        missing = "" if np.isnan(self.missing) else f"{self.missing / n:.3f}"
        return f"| {context} | {name} | {' | '.join(cells)} | {self.excess_nll / n:+.4f} | {missing} |"


class Bed:
    """Documents with dense prefixes in one cache; each (arm, document) goes on in blocks of its own."""

    def __init__(self, decoder: NativeDecoder, documents: Sequence[list[int]], prefix: int, num_branches: int) -> None:
        self.decoder, self.documents, self.prefix = decoder, documents, prefix
        self.prefix_blocks = prefix // BLOCK_SIZE
        self.branch_blocks = -(-(len(documents[0]) - prefix) // BLOCK_SIZE)
        branches = num_branches * len(documents) * self.branch_blocks
        self.cache: KVCache = decoder.allocate_cache(1 + len(documents) * self.prefix_blocks + branches)
        for index, tokens in enumerate(documents):
            for begin in range(0, prefix, CHUNK):
                self._run([(tokens[begin : begin + CHUNK], begin, self._table(index, 0))], None)

    def decode(self, branches: Sequence[int], selection: BlockSelection) -> Iterator[torch.Tensor]:
        """Feed the tokens behind the prefixes; log-probabilities [branches x documents, V] of each step."""
        for position in range(self.prefix, len(self.documents[0]) - 1):
            parts = [
                ([tokens[position]], position, self._table(index, branch))
                for branch in branches
                for index, tokens in enumerate(self.documents)
            ]
            hidden = self._run(parts, selection)
            yield self.decoder.logits(hidden).log_softmax(-1)

    def _table(self, document: int, branch: int) -> list[int]:
        first = 1 + document * self.prefix_blocks
        own = 1 + len(self.documents) * self.prefix_blocks
        own += (branch * len(self.documents) + document) * self.branch_blocks
        return [*range(first, first + self.prefix_blocks), *range(own, own + self.branch_blocks)]

    def _run(self, parts: list[tuple[list[int], int, list[int]]], selection: BlockSelection | None) -> torch.Tensor:
        starts = np.cumsum([0, *(len(tokens) for tokens, _, _ in parts)]).astype(np.int32)
        return self.decoder.forward(
            StepBatch(
                token_ids=np.array([t for tokens, _, _ in parts for t in tokens], np.int32),
                positions=np.array([at + i for tokens, at, _ in parts for i in range(len(tokens))], np.int32),
                query_start=starts,
                context_lens=np.array([at + len(tokens) for tokens, at, _ in parts], np.int32),
                block_tables=np.array([table for _, _, table in parts], np.int32),
                logit_rows=(starts[1:] - 1) if selection is not None else np.zeros(0, np.int32),
                selection=selection,
            ),
            self.cache,
        )


def measure(bed: Bed, arms: Sequence[Arm], first_branch: int, dense: list[torch.Tensor]) -> list[Score]:
    """Score arms of one rule in one batch. `dense`: log-probabilities by step; the first arm fills it if empty."""
    count, scores = len(bed.documents), [Score() for _ in arms]
    epsilon = np.repeat(np.array([arm.epsilon for arm in arms], np.float32), count)
    branches = range(first_branch, first_branch + len(arms))
    fills = not dense
    for step, rows in enumerate(bed.decode(branches, BlockSelection(epsilon, rule=arms[0].rule))):
        if fills:
            dense.append(rows[:count].clone())
        counts = bed.decoder.attention_counts
        assert counts is not None
        for row in range(len(rows)):
            score, target = scores[row // count], bed.documents[row % count][bed.prefix + step + 1]
            score.add(dense[step][row % count], rows[row], target)
            score.read += int(counts.read_blocks[row])
            score.total += int(counts.total_blocks[row])
            score.missing += float(counts.missing_mass[row])
    return scores


def placebo_share(score: Score, num_layers: int, dense_layers: int) -> float:
    """The share of blocks in layers that skip, such that a placebo reads as much in all as the scored arm."""
    return max(0.0, (score.read / score.total * num_layers - dense_layers) / (num_layers - dense_layers))


def table_of(decoders: dict[int, NativeDecoder], documents: list[list[int]], prefix: int) -> list[str]:
    """Rows of one context length."""
    rule, rows, dense = SelectionRule(), [], list[torch.Tensor]()
    bed = Bed(decoders[2], documents, prefix, 6)
    sketched = [Arm("dense", 0.0, rule), *(Arm(f"2-bit sketch, ε = {e}", e, rule) for e in (0.1, 0.2, 0.3))]
    scores = measure(bed, sketched, 0, dense)
    rows += [score.row(prefix, arm.name) for arm, score in zip(sketched, scores, strict=True)]
    share = placebo_share(scores[1], decoders[2].spec.num_layers, rule.dense_layers)
    for branch, selector in ((4, "recency"), (5, "random")):
        placebo = Arm(
            f"{selector}, the same share as ε = 0.1",
            0.1,
            SelectionRule(selector="recency" if selector == "recency" else "random", share=share),
        )
        rows.append(measure(bed, [placebo], branch, dense)[0].row(prefix, placebo.name))
        print(rows[-1], flush=True)
    one_bit = Arm("1-bit sketch, ε = 0.1", 0.1, rule)
    rows.append(measure(Bed(decoders[1], documents, prefix, 1), [one_bit], 0, dense)[0].row(prefix, one_bit.name))
    return rows


def load_decoder(model: str, bits: int) -> NativeDecoder:
    config = EngineConfig(model=model, backend="native", pruning_sketch_bits=bits)
    decoder = load_model(config, resolve_model(model)).decoder
    if not isinstance(decoder, NativeDecoder):
        raise SystemExit("this benchmark runs the native decoder")
    return decoder


def cut_documents(model: str, count: int, length: int) -> list[list[int]]:
    """Parts of a novel, of `length` tokens each, evenly spread."""
    text = (resources.files("etserve.bench") / "data" / "emma_excerpt.txt").read_text(encoding="utf-8")
    tokens = load_tokenizer(resolve_model(model)).encode(text, add_special_tokens=False)
    if len(tokens) < count * length:
        raise SystemExit(f"the text has {len(tokens)} tokens, not {count} parts of {length}")
    stride = len(tokens) // count
    return [tokens[i * stride : i * stride + length] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1536, 4096], help="prefixes, multiples of 16")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="scored per document")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("findings.md"))
    options = parser.parse_args()
    if any(context % BLOCK_SIZE for context in options.contexts):
        parser.error("contexts must be multiples of 16")
    native.set_num_threads(options.threads)
    decoders = {bits: load_decoder(options.model, bits) for bits in (2, 1)}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    lines = [
        f"{options.model}, {options.documents} parts of *Emma* x {options.tokens} tokens a context, "
        f"{native.backend_name()}, {platform.machine()}, commit {commit.strip() or 'unknown'}.",
        "",
        HEADER,
        "|---" * (HEADER.count("|") - 1) + "|",
    ]
    for context in options.contexts:
        documents = cut_documents(options.model, options.documents, context + options.tokens + 1)
        lines += table_of(decoders, documents, context)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
