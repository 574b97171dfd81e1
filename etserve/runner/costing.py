"""What a forward pass costs by the formulas of control/cost.py, per sequence, with what attention skipped left out."""

from collections.abc import Mapping, Sequence

from etserve.control.cost import ModelShape, step_flops, step_kv_bytes
from etserve.plan import ModelRunnerOutput, ScheduledSequence


def add_costs(
    shape: ModelShape,
    weight_bytes: float,
    items: Sequence[ScheduledSequence],
    num_logits: Mapping[int, int],
    kept: Mapping[int, float],
    result: ModelRunnerOutput,
) -> float:
    """Add one pass over `items` to the result's FLOPs and bytes by seq_id; return the bytes it read in all.

    `num_logits`: rows of logits by seq_id. `kept`: share of KV blocks read, of the sequences that were allowed to skip;
    they read the sketches of all their blocks besides. The weights are shared evenly.
    """
    weight_share = weight_bytes / len(items)
    kv_bytes = 0.0
    for item in items:
        seq_id = item.seq.seq_id
        share = kept.get(seq_id, 1.0)
        mean_context = item.context - item.num_tokens + (item.num_tokens + 1) / 2.0
        flops = step_flops(
            shape,
            num_tokens=item.num_tokens,
            kept_tokens=shape.num_layers * mean_context * share,
            num_logits=num_logits.get(seq_id, 0),
        )
        read = step_kv_bytes(shape, num_tokens=item.num_tokens, kept_tokens=shape.num_layers * item.context * share)
        if seq_id in kept:
            read += shape.sketch_token_bytes * shape.num_layers * item.context
        result.flops[seq_id] = result.flops.get(seq_id, 0.0) + flops
        result.seq_bytes[seq_id] = result.seq_bytes.get(seq_id, 0.0) + read + weight_share
        kv_bytes += read
    return weight_bytes + kv_bytes
