"""What the KV blocks of each computed sequence are to it after a step; made only while somebody watches."""

from etserve.outputs import SequenceBlocks
from etserve.plan import ModelRunnerOutput, SchedulerOutput
from etserve.sequence import Status

MAX_SEQUENCES = 64  # of one report


def sequence_blocks(plan: SchedulerOutput, result: ModelRunnerOutput) -> list[SequenceBlocks]:
    """Of the first MAX_SEQUENCES of the step's sequences that still run."""
    found = []
    for item in plan.scheduled[:MAX_SEQUENCES]:
        seq = item.seq
        if seq.status is Status.RUNNING:
            sampled = result.sampled.get(seq.seq_id)
            found.append(
                SequenceBlocks(
                    request_id=seq.request_id,
                    choice=seq.choice,
                    num_blocks=len(item.block_table),
                    num_evicted=item.num_evicted_blocks,
                    kept_fraction=1.0 if sampled is None else sampled.measured.kept_fraction,
                )
            )
    return found
