"""From a plan to the arrays of one forward pass. Knows no model."""

from dataclasses import dataclass

import numpy as np

from etserve.attention.batch import StepBatch
from etserve.config import BLOCK_SIZE
from etserve.kernels.selection import SelectionRule
from etserve.kv.block_pool import NULL_BLOCK
from etserve.plan import ScheduledSequence
from etserve.runner.skipping import selection_of
from etserve.sequence import Sequence

SURPRISAL_STRIDE = 4  # every fourth prompt token stands for its neighbours: all would cost as many rows of logits


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Logit rows [first_row, first_row + num_rows) belong to positions [position, position + num_rows) of `seq`."""

    seq: Sequence
    position: int
    first_row: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Draw:
    """The next token of `seq` is drawn from logit row `row`; those after its drafted tokens from the rows behind."""

    seq: Sequence
    row: int
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> range:
        return range(self.row, self.row + 1 + len(self.draft))


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What each logit row is wanted for. Rows are numbered as in StepBatch.logit_rows."""

    draws: list[Draw]
    prompts: list[RowSpan]  # log-probabilities of the prompt's tokens position+1 ..
    replays: list[RowSpan]  # entropies of forced output tokens position+1 .., which no draw will measure
    # (sequence, position, row): surprisal of the prompt's token position+1, where blocks may be evicted by it
    surprisals: list[tuple[Sequence, int, int]]


def build_batch(scheduled: tuple[ScheduledSequence, ...], rule: SelectionRule) -> tuple[StepBatch, RowPlan]:
    """Lay the planned tokens out in their own order; every array int32 and C-contiguous.

    `rule`: guards of what the sequences with an epsilon may skip.
    """
    token_ids: list[int] = []
    query_start = np.zeros(len(scheduled) + 1, np.int32)
    context_lens = np.empty(len(scheduled), np.int32)
    evicted = np.empty(len(scheduled), np.int32)
    for index, item in enumerate(scheduled):
        if item.num_tokens == 1:
            token_ids.append(item.seq.token_ids[item.start])
        else:
            token_ids += item.seq.token_ids[item.start : item.known_end]
            token_ids += item.draft
        query_start[index + 1] = len(token_ids)
        context_lens[index] = item.context
        evicted[index] = item.num_evicted_blocks * BLOCK_SIZE
    counts = np.diff(query_start)
    positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(evicted + context_lens - query_start[1:], counts)
    tables = _block_tables(scheduled)
    logit_rows, rows = _plan_rows(scheduled, query_start.tolist())
    batch = StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=tables,
        logit_rows=np.array(logit_rows, np.int32),
        selection=selection_of(scheduled, tables.shape[1], rule),
        wants_block_mass=any(item.samples and item.seq.may_be_evicted for item in scheduled),
    )
    return batch, rows


def _block_tables(scheduled: tuple[ScheduledSequence, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    widths = [-(-item.context // BLOCK_SIZE) for item in scheduled]
    tables = np.zeros((len(scheduled), max(widths, default=0)), np.int32)
    for index, (item, width) in enumerate(zip(scheduled, widths, strict=True)):
        tables[index, :width] = kept_blocks(item)[:width]
    return tables


def kept_blocks(item: ScheduledSequence) -> list[int]:
    """The item's block table without the places whose blocks were evicted."""
    if item.num_evicted_blocks == 0:
        return item.block_table
    return [block for block in item.block_table if block != NULL_BLOCK]


def _plan_rows(scheduled: tuple[ScheduledSequence, ...], query_start: list[int]) -> tuple[list[int], RowPlan]:
    logit_rows: list[int] = []
    rows = RowPlan([], [], [], [])
    for index, item in enumerate(scheduled):
        seq, base = item.seq, query_start[index] - item.start
        if seq.params.prompt_logprobs is not None:
            _add_span(rows.prompts, logit_rows, seq, base, item.start, min(item.end, seq.num_prompt_tokens - 1))
        elif seq.may_be_evicted and seq.clock.count == 0:  # later they are known
            first = -(-item.start // SURPRISAL_STRIDE) * SURPRISAL_STRIDE
            for position in range(first, min(item.end, seq.num_prompt_tokens - 1), SURPRISAL_STRIDE):
                rows.surprisals.append((seq, position, len(logit_rows)))
                logit_rows.append(base + position)
        if seq.num_forced_tokens > seq.clock.count:
            first = max(item.start, seq.num_prompt_tokens - 1 + seq.clock.count)
            last = min(item.known_end, seq.num_prompt_tokens + seq.num_forced_tokens - 1)
            _add_span(rows.replays, logit_rows, seq, base, first, last)
        if item.samples and seq.max_output_tokens > 0:
            rows.draws.append(Draw(seq, len(logit_rows), item.draft))
            logit_rows.extend(range(base + item.known_end - 1, base + item.end))
    return logit_rows, rows


def _add_span(spans: list[RowSpan], logit_rows: list[int], seq: Sequence, base: int, begin: int, end: int) -> None:
    if begin < end:
        spans.append(RowSpan(seq, begin, len(logit_rows), end - begin))
        logit_rows.extend(range(base + begin, base + end))
