"""What one engine step did, added up while it runs."""

from collections import Counter
from collections.abc import Callable

from etserve.control.choice import ChoiceControl
from etserve.control.cost_model import STEP_KINDS
from etserve.engine.costs import CostMeter
from etserve.engine.rendering import ClockAdvance
from etserve.outputs import StepStats
from etserve.plan import ModelRunnerOutput, Sampled, SchedulerOutput
from etserve.scheduler.scheduler import Scheduler


class StepMeter:
    """Made when a step begins, read when it ends."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._begin = self._planned = now()
        self._sampled: list[Sampled] = []
        self._tau_nats = 0.0
        self._tau_up_nats = 0.0
        self._fallbacks: Counter[str] = Counter()
        self._saturated: Counter[str] = Counter()
        self._num_accepted = 0

    def is_planned(self) -> None:
        self._planned = self._now()

    def observe(
        self, sampled: Sampled, advance: ClockAdvance, control: ChoiceControl, *, is_accepted: bool = False
    ) -> None:
        """One token was drawn and told; it moved its sequence's clock, and its control loop to `control`.

        `is_accepted`: it followed a drafted token, so its sequence was spared a step.
        """
        self._sampled.append(sampled)
        self._num_accepted += is_accepted
        self._tau_nats += advance.tau_nats
        self._tau_up_nats += advance.tau_up_nats
        self._saturated[control.saturated] += 1
        if control.fallback is not None:
            self._fallbacks[control.fallback] += 1

    def stats(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, scheduler: Scheduler, costs: CostMeter
    ) -> StepStats:
        """What there is to tell; `costs` learn from the step."""
        entropies = [sampled.entropy_nats for sampled in self._sampled]
        num_drafted = sum(len(item.draft) for item in plan.scheduled)
        num_prefill, num_decode = _count_tokens(plan, result)
        flops = sum(result.flops.values())
        end = self._now()
        costs.observe(
            num_prefill_tokens=num_prefill,
            flops=flops,
            bytes_read=result.bytes_read,
            seconds=end - self._planned,
        )
        skipping = (result.sampled.get(item.seq.seq_id) for item in plan.scheduled if item.epsilon > 0.0)
        pruned = [sampled.measured for sampled in skipping if sampled is not None]
        return StepStats(
            step=plan.step,
            step_seconds=end - self._begin,
            schedule_seconds=self._planned - self._begin,
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode + self._num_accepted,
            num_cached_tokens=sum(seq.num_cached_tokens for seq in plan.admitted),
            num_verifications=plan.num_verifications,
            num_drafted_tokens=num_drafted,
            num_accepted_tokens=self._num_accepted,
            num_prompt_tokens=sum(seq.num_prompt_tokens for seq in plan.admitted),
            num_preempted=len(plan.preempted),
            num_nonfinite_rows=result.num_nonfinite_rows,
            flops=flops,
            bytes_read=result.bytes_read,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            kv_blocks_active=scheduler.kv.num_active_blocks,
            kv_blocks_cached=scheduler.kv.num_cached_blocks,
            kv_blocks_free=scheduler.kv.num_free_blocks,
            entropies=entropies,
            varentropies=[sampled.varentropy for sampled in self._sampled],
            temperatures=[sampled.temperature for sampled in self._sampled],
            tau_nats=self._tau_nats,
            tau_up_nats=self._tau_up_nats,
            nats_resolved=sum(entropies),
            kept_fractions=[measured.kept_fraction for measured in pruned],
            skipped_masses=[measured.skipped_mass for measured in pruned],
            num_blocks_skipped=result.num_blocks_skipped,
            num_blocks_evicted=plan.num_blocks_evicted,
            num_sequences_evicted=plan.num_sequences_evicted,
            prune_fallbacks=dict(self._fallbacks),
            num_saturated_low=self._saturated["low"],
            num_saturated_high=self._saturated["high"],
            schedule_ages_seconds=[item.age_seconds for item in plan.scheduled if item.ahead_of is None],
            num_forced=sum(item.is_forced for item in plan.scheduled),
            cost_r_squared={kind: costs.fit(kind).r_squared for kind in STEP_KINDS},
        )


def _count_tokens(plan: SchedulerOutput, result: ModelRunnerOutput) -> tuple[int, int]:
    """Tokens computed of prompts, and of outputs without drafts. Guesses ahead count nowhere: nobody is told of them.

    What renews entries is one token of an output, as it would be without: the others were counted when first computed.
    """
    num_prefill = num_decode = 0
    for item in plan.scheduled:
        if item.is_refresh:
            num_decode += item.seq.seq_id in result.sampled
        elif not item.is_decode:
            num_prefill += item.num_tokens
        elif item.ahead_of is None:
            num_decode += item.num_tokens - len(item.draft)
    return num_prefill, num_decode
