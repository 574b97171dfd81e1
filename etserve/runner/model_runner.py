"""Runs one planned step: batch, forward pass, measurements, draws. Knows no queue and decides nothing."""

from collections.abc import Iterator

import torch

from etserve.control.cost import ModelShape, count_layer_parameters, dense_flops, dense_kv_bytes
from etserve.models.types import Decoder, DecoderSpec
from etserve.plan import ModelRunnerOutput, SchedulerOutput
from etserve.runner.batch_builder import RowPlan, RowSpan, build_batch
from etserve.runner.measuring import entropies, prompt_logprobs
from etserve.runner.sampler import Sampler
from etserve.sequence import Sequence

MAX_LOGIT_ROWS = 64  # logits are made for so many rows at a time: 12 MB at 49k tokens, whatever the batch


def model_shape(spec: DecoderSpec, kv_element_bytes: float) -> ModelShape:
    """The decoder as the cost formulas see it."""
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        num_active_parameters=count_layer_parameters(
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        ),
        kv_element_bytes=kv_element_bytes,
    )


class ModelRunner:
    """Owns the KV tensors. One call of `execute` at a time."""

    def __init__(self, decoder: Decoder, num_blocks: int, sampler: Sampler, shape: ModelShape) -> None:
        """`num_blocks` counts the null block 0."""
        self._decoder = decoder
        self._cache = decoder.allocate_cache(num_blocks)
        self._sampler = sampler
        self._shape = shape

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Write the planned tokens' KV entries, draw a token for every sequence whose last known one is among them."""
        result = ModelRunnerOutput(sampled={})
        if not plan.scheduled:
            return result
        batch, rows = build_batch(plan)
        hidden = self._decoder.forward(batch, self._cache)
        self._measure_prompts(rows, hidden, result)
        self._measure_replays(rows, hidden, result)
        num_bad_rows = self._draw(rows, hidden, result)
        return self._with_costs(plan, rows, result, num_bad_rows + result.num_nonfinite_rows)

    def _draw(self, rows: RowPlan, hidden: torch.Tensor, result: ModelRunnerOutput) -> int:
        num_bad_rows = 0
        draws = [(seq, row) for seq, row in rows.draws if seq.seq_id not in result.failed]
        for begin in range(0, len(draws), MAX_LOGIT_ROWS):
            part = draws[begin : begin + MAX_LOGIT_ROWS]
            logits = self._decoder.logits(_select(hidden, [row for _, row in part]))
            drawn = self._sampler.draw([seq for seq, _ in part], logits)
            result.sampled.update(drawn.sampled)
            result.failed.update(drawn.failed)
            num_bad_rows += drawn.num_nonfinite_rows
        return num_bad_rows

    def _measure_prompts(self, rows: RowPlan, hidden: torch.Tensor, result: ModelRunnerOutput) -> None:
        for span in rows.prompts:
            found = result.prompt_logprobs.setdefault(span.seq.seq_id, [])
            for position, logits in self._span_logits(span, hidden):
                targets = span.seq.token_ids[position + 1 : position + 1 + len(logits)]
                measured = prompt_logprobs(logits, targets, span.seq.params.prompt_logprobs or 0)
                if measured is None:
                    result.failed[span.seq.seq_id] = "model_numerics"
                    break
                found += measured

    def _measure_replays(self, rows: RowPlan, hidden: torch.Tensor, result: ModelRunnerOutput) -> None:
        for span in rows.replays:
            found = result.forced_entropies.setdefault(span.seq.seq_id, [])
            for _, logits in self._span_logits(span, hidden):
                found += entropies(logits)

    def _span_logits(self, span: RowSpan, hidden: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first position, logits) in slices of at most MAX_LOGIT_ROWS."""
        for offset in range(0, span.num_rows, MAX_LOGIT_ROWS):
            first = span.first_row + offset
            last = min(first + MAX_LOGIT_ROWS, span.first_row + span.num_rows)
            yield span.position + offset, self._decoder.logits(hidden[first:last])

    def _with_costs(
        self, plan: SchedulerOutput, rows: RowPlan, result: ModelRunnerOutput, num_bad_rows: int
    ) -> ModelRunnerOutput:
        num_logits = _count_logits(rows)
        weight_share = self._decoder.weight_bytes / len(plan.scheduled)
        kv_bytes = 0.0
        for item in plan.scheduled:
            seq_id = item.seq.seq_id
            result.flops[seq_id] = dense_flops(
                self._shape, start=item.start, num_tokens=item.num_tokens, num_logits=num_logits.get(seq_id, 0)
            )
            read = dense_kv_bytes(self._shape, start=item.start, num_tokens=item.num_tokens)
            result.seq_bytes[seq_id] = read + weight_share
            kv_bytes += read
        return ModelRunnerOutput(
            sampled=result.sampled,
            prompt_logprobs=result.prompt_logprobs,
            failed=result.failed,
            forced_entropies=result.forced_entropies,
            num_nonfinite_rows=num_bad_rows,
            flops=result.flops,
            seq_bytes=result.seq_bytes,
            bytes_read=self._decoder.weight_bytes + kv_bytes,
        )

    def forget(self, seq: Sequence) -> None:
        """Free what is kept for a sequence that has ended. Idempotent."""
        self._sampler.forget(seq)


def _select(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows (ascending); a view where they are neighbours."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return hidden[rows[0] : rows[-1] + 1]
    return hidden[rows]


def _count_logits(rows: RowPlan) -> dict[int, int]:
    counts: dict[int, int] = {}
    for seq, _ in rows.draws:
        counts[seq.seq_id] = counts.get(seq.seq_id, 0) + 1
    for span in (*rows.prompts, *rows.replays):
        counts[span.seq.seq_id] = counts.get(span.seq.seq_id, 0) + span.num_rows
    return counts
