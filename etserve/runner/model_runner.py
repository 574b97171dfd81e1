"""Runs one planned step: batch, forward pass, measurements, draws. Knows no queue and decides nothing."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from etserve.control.cost import ModelShape, count_layer_parameters
from etserve.kernels.selection import SelectionRule
from etserve.models.types import Decoder, DecoderSpec, KVCache
from etserve.plan import ModelRunnerOutput, SchedulerOutput
from etserve.runner.batch_builder import RowPlan, RowSpan, build_batch
from etserve.runner.costing import add_costs
from etserve.runner.drafts import draw_in_order, split_draws
from etserve.runner.measuring import prompt_logprobs, surprisals
from etserve.runner.sampler import Sampler
from etserve.runner.skipping import divergence, kept_fractions, tell_divergences, tell_masses, tell_skipped
from etserve.sequence import Sequence

MAX_LOGIT_ROWS = 64  # logits are made for so many rows at a time: 12 MB at 49k tokens, whatever the batch


def model_shape(spec: DecoderSpec, kv_element_bytes: float, sketch_token_bytes: float = 0.0) -> ModelShape:
    """The decoder as the cost formulas see it; see ModelShape for the units."""
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
        sketch_token_bytes=sketch_token_bytes,
    )


class ModelRunner:
    """Writes the KV tensors. One call of `execute` at a time."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        sampler: Sampler,
        shape: ModelShape,
        rule: SelectionRule,
    ) -> None:
        """`cache`: the decoder's. `rule`: guards of what attention may skip where a plan allows it."""
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._shape = shape
        self._rule = rule

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Write the planned tokens' KV entries, draw a token for every sequence whose last known one is among them."""
        result = ModelRunnerOutput(sampled={})
        if not plan.scheduled:
            return result
        skipped, check_bytes = self._run_skipping(plan, result)  # first: the dense entries are those that stay
        batch, rows = build_batch(plan.scheduled, self._rule)
        hidden = self._decoder.forward(batch, self._cache)
        if batch.wants_block_mass:
            tell_masses(plan.scheduled, self._decoder.attention_counts, result)
        counts = None if batch.selection is None else self._decoder.attention_counts
        self._measure_prompts(rows, hidden, result)
        self._measure_replays(rows, hidden, result)
        self._measure_surprisals(rows, hidden, result)
        compared = self._compare(rows, hidden, skipped)
        num_bad_rows = self._draw(rows, hidden, result)
        num_skipped = tell_skipped(plan.scheduled, counts, result)
        tell_divergences(compared, result)
        kept = kept_fractions(plan.scheduled, counts)
        weight_bytes = self._decoder.weight_bytes
        num_bytes = add_costs(self._shape, weight_bytes, plan.scheduled, _count_logits(rows), kept, result)
        return replace(
            result,
            num_nonfinite_rows=num_bad_rows + result.num_nonfinite_rows,
            bytes_read=check_bytes + num_bytes,
            num_blocks_skipped=num_skipped,
        )

    def _run_skipping(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> tuple[dict[int, torch.Tensor], float]:
        """Run the steps that the watchdog checks as they would be without a check.

        Returns their logits, f32 [vocab] by seq_id, and the bytes read. The entries written are overwritten by the
        dense pass that follows.
        """
        checked = tuple(replace(i, epsilon=i.check_epsilon) for i in plan.scheduled if i.check_epsilon > 0.0)
        if not checked:
            return {}, 0.0
        batch, rows = build_batch(checked, self._rule)
        hidden = self._decoder.forward(batch, self._cache)
        found: dict[int, torch.Tensor] = {}
        for draw in rows.draws:
            found[draw.seq.seq_id] = self._decoder.logits(hidden[draw.row : draw.row + 1])[0].clone()
        kept = kept_fractions(checked, self._decoder.attention_counts)
        weight_bytes = self._decoder.weight_bytes
        return found, add_costs(self._shape, weight_bytes, checked, _count_logits(rows), kept, result)

    def _compare(self, rows: RowPlan, hidden: torch.Tensor, skipped: dict[int, torch.Tensor]) -> dict[int, float]:
        """KL(dense || skipped) in nats of the checked steps, by seq_id."""
        return {
            draw.seq.seq_id: divergence(
                self._decoder.logits(hidden[draw.row : draw.row + 1])[0], skipped[draw.seq.seq_id]
            )
            for draw in rows.draws
            if draw.seq.seq_id in skipped
        }

    def _draw(self, rows: RowPlan, hidden: torch.Tensor, result: ModelRunnerOutput) -> int:
        num_bad_rows = 0
        draws = [draw for draw in rows.draws if draw.seq.seq_id not in result.failed]
        for part in split_draws(draws, MAX_LOGIT_ROWS):
            logits = self._decoder.logits(_select(hidden, [row for draw in part for row in draw.rows]))
            drawn, followers = draw_in_order(self._sampler, part, logits)
            result.sampled.update(drawn.sampled)
            result.followers.update(followers)
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
                if span.seq.may_be_evicted:
                    nats = result.given_surprisals.setdefault(span.seq.seq_id, {})
                    nats |= {position + 1 + i: -one.logprob for i, one in enumerate(measured)}

    def _measure_replays(self, rows: RowPlan, hidden: torch.Tensor, result: ModelRunnerOutput) -> None:
        for span in rows.replays:
            found = result.forced_entropies.setdefault(span.seq.seq_id, [])
            for position, logits in self._span_logits(span, hidden):
                measured = self._sampler.replay(span.seq, position, logits)
                found += measured
                if span.seq.may_be_evicted:
                    nats = result.given_surprisals.setdefault(span.seq.seq_id, {})
                    nats |= {position + 1 + i: surprisal for i, (_, surprisal) in enumerate(measured)}

    def _measure_surprisals(self, rows: RowPlan, hidden: torch.Tensor, result: ModelRunnerOutput) -> None:
        for begin in range(0, len(rows.surprisals), MAX_LOGIT_ROWS):
            part = rows.surprisals[begin : begin + MAX_LOGIT_ROWS]
            logits = self._decoder.logits(_select(hidden, [row for _, _, row in part])).cpu()
            found = surprisals(logits, [seq.token_ids[position + 1] for seq, position, _ in part])
            for (seq, position, _), nats in zip(part, found, strict=True):
                result.given_surprisals.setdefault(seq.seq_id, {})[position + 1] = nats

    def _span_logits(self, span: RowSpan, hidden: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first position, logits) in slices of at most MAX_LOGIT_ROWS."""
        for offset in range(0, span.num_rows, MAX_LOGIT_ROWS):
            first = span.first_row + offset
            last = min(first + MAX_LOGIT_ROWS, span.first_row + span.num_rows)
            yield span.position + offset, self._decoder.logits(hidden[first:last]).cpu()

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
    for draw in rows.draws:
        counts[draw.seq.seq_id] = counts.get(draw.seq.seq_id, 0) + len(draw.rows)
    for span in (*rows.prompts, *rows.replays):
        counts[span.seq.seq_id] = counts.get(span.seq.seq_id, 0) + span.num_rows
    for seq, _, _ in rows.surprisals:
        counts[seq.seq_id] = counts.get(seq.seq_id, 0) + 1
    return counts
