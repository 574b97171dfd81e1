"""How a plan's wish to skip blocks reaches attention, and how what it skipped is told. Chooses no blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from etserve.config import BLOCK_SIZE
from etserve.kernels.selection import AttentionCounts, BlockSelection, SelectionRule
from etserve.kv.block_pool import NULL_BLOCK
from etserve.plan import ModelRunnerOutput, ScheduledSequence


def selection_of(scheduled: Sequence[ScheduledSequence], num_blocks: int, rule: SelectionRule) -> BlockSelection | None:
    """What each sequence may skip; None where every step is dense, so that attention does what it does without.

    `num_blocks`: width of the batch's block tables.
    """
    if not any(item.epsilon > 0.0 for item in scheduled):
        return None
    epsilon = np.array([item.epsilon for item in scheduled], np.float32)
    return BlockSelection(epsilon, _protected(scheduled, num_blocks), rule)


def _protected(scheduled: Sequence[ScheduledSequence], num_blocks: int) -> NDArray[np.uint8] | None:
    """Blocks that touch a protected span, uint8 [B, num_blocks]; None if there are no spans."""
    if not any(item.seq.control.laws.protected_spans for item in scheduled):
        return None
    protected = np.zeros((len(scheduled), num_blocks), np.uint8)
    for index, item in enumerate(scheduled):
        for start, end in item.seq.control.laws.protected_spans:
            if end > start:
                _mark(protected[index], item, start // BLOCK_SIZE, -(-end // BLOCK_SIZE))
    return protected


def _mark(row: NDArray[np.uint8], item: ScheduledSequence, first: int, last: int) -> None:
    """Protect the blocks at places [first, last) of the sequence's table; evicted ones before them shift the row."""
    if item.num_evicted_blocks:
        table = item.block_table
        first, last = (place - table[:place].count(NULL_BLOCK) for place in (first, last))
    row[first:last] = 1


def kept_fractions(scheduled: Sequence[ScheduledSequence], counts: AttentionCounts | None) -> dict[int, float]:
    """Share of KV blocks read, by seq_id, of the sequences that were allowed to skip."""
    if counts is None:
        return {}
    shares = (counts.read_blocks / np.maximum(counts.total_blocks, 1)).tolist()
    return {item.seq.seq_id: shares[i] for i, item in enumerate(scheduled) if item.epsilon > 0.0}


def tell_skipped(
    scheduled: Sequence[ScheduledSequence], counts: AttentionCounts | None, result: ModelRunnerOutput
) -> int:
    """Write into the sampled tokens what their steps read; return how many block reads were spared."""
    if counts is None:
        return 0
    kept = kept_fractions(scheduled, counts)
    for index, item in enumerate(scheduled):
        sampled = result.sampled.get(item.seq.seq_id)
        if sampled is not None and item.seq.seq_id in kept:
            measured = replace(
                sampled.measured,
                kept_fraction=kept[item.seq.seq_id],
                skipped_mass=float(counts.missing_mass[index]),
            )
            result.sampled[item.seq.seq_id] = replace(sampled, measured=measured)
    return int((counts.total_blocks - counts.read_blocks).sum())


def tell_masses(
    scheduled: Sequence[ScheduledSequence], counts: AttentionCounts | None, result: ModelRunnerOutput
) -> None:
    """Write what each kept block was worth to the sequences that may be evicted from and sample in this step."""
    if counts is None or counts.block_mass is None:
        return
    for index, item in enumerate(scheduled):
        if item.samples and item.seq.may_be_evicted:
            num_blocks = -(-item.context // BLOCK_SIZE)
            result.block_masses[item.seq.seq_id] = counts.block_mass[index, :num_blocks]


def tell_divergences(compared: Mapping[int, float], result: ModelRunnerOutput) -> None:
    """Write the watchdog's comparisons, in nats by seq_id, into the tokens that were sampled."""
    for seq_id, value in compared.items():
        sampled = result.sampled.get(seq_id)
        if sampled is not None:
            result.sampled[seq_id] = replace(sampled, measured=replace(sampled.measured, divergence_nats=value))


def divergence(dense: torch.Tensor, skipped: torch.Tensor) -> float:
    """KL(dense || skipped) in nats of two rows of logits, f32 [vocab]; NaN if one is not finite."""
    log_p = torch.log_softmax(dense.double(), -1)
    log_q = torch.log_softmax(skipped.double(), -1)
    return float((log_p.exp() * (log_p - log_q)).sum())
