"""Measure what skipping blocks costs in quality: the findings table of the control laws, on real text, in this engine.

    python -m benchmarks.findings --output build/findings.md
Documents are read densely up to a prefix; the tokens behind it are fed one at a time (decode rows, teacher-forced),
once per arm. Every arm is compared with dense attention of the same text on the same decoder: the native one, save the
oracle, which knows the true masses of each query, layer and KV head and runs on the torch reference in float32.
--dtype float32 keeps rounding out of the differences (README.md, KV cache dtypes, shows how much there is of it).
"""

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.skipping.bed import Bed, copy_prefixes
from benchmarks.skipping.documents import cut_documents
from benchmarks.skipping.scores import DOCUMENT_HEADER, HEADER, Dense, Score, compare, run_arms
from benchmarks.skipping.sets import IS_ON, MassAverages, heaviest_blocks, read_only
from etserve.config import BLOCK_SIZE, EngineConfig
from etserve.kernels import native
from etserve.kernels.reference_sketch import EXACT_BITS
from etserve.kernels.selection import BlockSelection, SelectionRule
from etserve.models.decoder import TorchDecoder
from etserve.models.files import resolve_model
from etserve.models.loader import load_model, open_checkpoint
from etserve.models.native import NativeDecoder
from etserve.models.rope import rope_tables
from etserve.tokenizer.loading import load_tokenizer

EPSILONS = (0.05, 0.1, 0.2, 0.3)
SHARE_OF = 0.1  # the epsilon whose kept share the arms with a fixed one take
NEARLY_ALL = 0.999999  # epsilon that leaves the choice to the rule's min_kept_share
Row = tuple[str, Score]


@dataclass(frozen=True)
class Models:
    """One model, by bits of its key sketches, and the torch reference that needs none."""

    native: Mapping[int, NativeDecoder]
    oracle: TorchDecoder | None


@dataclass(frozen=True)
class Trial:
    """One context: documents with their dense prefix read, and what dense attention made of the rest."""

    bed: Bed
    rule: SelectionRule
    averages: MassAverages  # of past masses at the end of the prefixes
    dense: Dense

    def constant(self, epsilons: Sequence[float], rule: SelectionRule) -> list[BlockSelection]:
        """By step: one arm per epsilon."""
        values = np.repeat(np.array(epsilons, np.float32), len(self.bed.documents))
        return [BlockSelection(values, rule=rule)] * self.bed.num_steps

    def past_sets(self, share: float) -> list[BlockSelection]:
        """By step: the blocks that had most attention before it, by dense attention's own masses."""
        averages, found = self.averages.copy(), []
        for step in range(self.bed.num_steps):
            blocks = self.bed.num_blocks(step)
            found.append(read_only(heaviest_blocks(averages.values, blocks, share, self.rule), self.rule))
            averages.observe(self.dense.masses[step], blocks)
        return found

    def present_sets(self, share: float) -> list[BlockSelection]:
        """By step: the blocks that have most attention in it, as a dense pass of it has measured."""
        return [
            read_only(heaviest_blocks(masses, self.bed.num_blocks(step), share, self.rule), self.rule)
            for step, masses in enumerate(self.dense.masses)
        ]


def placebo_share(score: Score, num_layers: int, dense_layers: int) -> float:
    """The share of blocks in layers that skip, such that a fixed share reads as much in all as the scored arm."""
    return max(0.0, (score.kept_share * num_layers - dense_layers) / (num_layers - dense_layers))


def two_bit_rows(trial: Trial) -> Iterator[Row]:
    """Dense first, then every epsilon."""
    epsilons = (0.0, *EPSILONS)
    names = ["dense", *(f"2-bit sketch, ε = {epsilon}" for epsilon in EPSILONS)]
    scores = run_arms(trial.bed, range(len(epsilons)), trial.constant(epsilons, trial.rule), trial.dense)
    return zip(names, scores, strict=True)


def fixed_share_rows(trial: Trial, share: float, first_branch: int) -> Iterator[Row]:
    """Arms that read the same share at each step, however much that misses."""
    rule = trial.rule
    arms = {
        "2-bit sketch, fixed share": trial.constant([NEARLY_ALL], replace(rule, min_kept_share=share)),
        "true masses of the step, one set per sequence": trial.present_sets(share),
        "past attention masses, one set per sequence": trial.past_sets(share),
        "recency": trial.constant([IS_ON], replace(rule, selector="recency", share=share)),
        "random": trial.constant([IS_ON], replace(rule, selector="random", share=share)),
    }
    for branch, (name, selections) in enumerate(arms.items(), first_branch):
        yield name, run_arms(trial.bed, [branch], selections, trial.dense)[0]


def one_bit_rows(trial: Trial, decoder: NativeDecoder) -> Iterator[Row]:
    bed = Bed(decoder, trial.bed.documents, trial.bed.prefix, len(EPSILONS))
    copy_prefixes(trial.bed, bed, sketch_bits=1)
    scores = run_arms(bed, range(len(EPSILONS)), trial.constant(EPSILONS, trial.rule), trial.dense)
    return zip((f"1-bit sketch, ε = {epsilon}" for epsilon in EPSILONS), scores, strict=True)


def oracle_rows(trial: Trial, decoder: TorchDecoder, share: float) -> Iterator[Row]:
    """Against the torch reference's own dense attention, which itself is compared with the native one's."""
    bed, dense = Bed(decoder, trial.bed.documents, trial.bed.prefix, 3), Dense()
    copy_prefixes(trial.bed, bed)
    scores = run_arms(bed, [0, 1], trial.constant([0.0, SHARE_OF], trial.rule), dense)
    yield "dense, torch reference against native", _between(trial, dense, scores[0])
    yield f"true masses per layer and KV head, ε = {SHARE_OF}", scores[1]
    rule = replace(trial.rule, min_kept_share=share)
    yield (
        "true masses per layer and KV head, fixed share",
        run_arms(bed, [2], trial.constant([NEARLY_ALL], rule), dense)[0],
    )


def _between(trial: Trial, found: Dense, counted: Score) -> Score:
    """Dense attention of another decoder against the trial's."""
    score, counts = Score(), [counted.column(name) for name in ("read", "total", "missing")]
    for step, rows in enumerate(found.log_probabilities):
        columns = compare(trial.dense.log_probabilities[step], rows, trial.bed.targets(step))
        score.add(**columns, **dict(zip(("read", "total", "missing"), (c[step] for c in counts), strict=True)))
    return score


def all_rows(models: Models, documents: Sequence[list[int]], prefix: int, rule: SelectionRule) -> Iterator[Row]:
    """Every arm at one context length, dense first."""
    decoder = models.native[2]
    bed = Bed(decoder, documents, prefix, 1 + len(EPSILONS) + 5)
    trial = Trial(bed, rule, bed.read_prefixes(), Dense())
    sketched = dict(two_bit_rows(trial))
    yield from sketched.items()
    at_same = sketched[f"2-bit sketch, ε = {SHARE_OF}"]
    share = placebo_share(at_same, decoder.spec.num_layers, rule.dense_layers)
    yield from fixed_share_rows(trial, share, first_branch=len(sketched))
    yield from one_bit_rows(trial, models.native[1])
    if models.oracle is not None:
        yield from oracle_rows(trial, models.oracle, share)


def load_models(model: str, dtype: str, *, with_oracle: bool) -> Models:
    files = resolve_model(model)
    decoders, length = {}, 0
    for bits in (2, 1):
        config = EngineConfig(model=model, backend="native", dtype=dtype, pruning_sketch_bits=bits)
        loaded = load_model(config, files)
        if not isinstance(loaded.decoder, NativeDecoder):
            raise SystemExit("this benchmark runs the native decoder")
        decoders[bits], length = loaded.decoder, loaded.max_model_len
    if not with_oracle:
        return Models(decoders, None)
    checkpoint = open_checkpoint(files)
    tables, f32 = rope_tables(checkpoint.spec, length), torch.float32
    return Models(decoders, TorchDecoder(checkpoint.spec, checkpoint.weights, f32, f32, tables, sketch_bits=EXACT_BITS))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="demo")
    dtypes = ["auto", "bfloat16", "float32"]
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="of the native arms")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1536, 4096], help="prefixes, multiples of 16")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="scored per document")
    parser.add_argument("--without-oracle", action="store_true", help="leave the torch reference out, which is slow")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("findings.md"))
    options = parser.parse_args()
    if any(context % BLOCK_SIZE for context in options.contexts):
        parser.error("contexts must be multiples of 16")
    return options


def head(options: argparse.Namespace) -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return [
        f"{options.model}, {options.dtype}, {options.documents} documents x {options.tokens} tokens a context, "
        f"{native.backend_name()}, {platform.machine()}, commit {commit.strip() or 'unknown'}.",
        "",
        HEADER,
        "|---" * (HEADER.count("|") - 1) + "|",
    ]


def main() -> None:
    options = parse()
    native.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    models = load_models(options.model, options.dtype, with_oracle=not options.without_oracle)
    encoder = load_tokenizer(resolve_model(options.model))
    lines, by_document = head(options), [DOCUMENT_HEADER, "|---" * (DOCUMENT_HEADER.count("|") - 1) + "|"]
    for context in options.contexts:
        documents = cut_documents(encoder, options.documents, context + options.tokens + 1)
        for name, score in all_rows(models, [each.tokens for each in documents], context, SelectionRule()):
            lines.append(score.row(context, name))
            print(f"{time.monotonic() - begin:.0f} s {lines[-1]}", file=sys.stderr, flush=True)
            if name == f"2-bit sketch, ε = {SHARE_OF}":
                by_document += [score.document_row(context, i, each.name) for i, each in enumerate(documents)]
        options.output.write_text("\n".join([*lines, "", *by_document]) + "\n", encoding="utf-8")
    print(options.output.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
