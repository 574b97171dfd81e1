"""What one engine step did, added up while it runs."""

from collections.abc import Callable

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

    def is_planned(self) -> None:
        self._planned = self._now()

    def observe(self, sampled: Sampled, advance: ClockAdvance) -> None:
        """One token was drawn and moved its sequence's clock."""
        self._sampled.append(sampled)
        self._tau_nats += advance.tau_nats
        self._tau_up_nats += advance.tau_up_nats

    def stats(self, plan: SchedulerOutput, result: ModelRunnerOutput, scheduler: Scheduler) -> StepStats:
        entropies = [sampled.entropy_nats for sampled in self._sampled]
        num_decode = sum(item.num_tokens for item in plan.scheduled if item.is_decode)
        return StepStats(
            step=plan.step,
            step_seconds=self._now() - self._begin,
            schedule_seconds=self._planned - self._begin,
            num_prefill_tokens=plan.num_tokens - num_decode,
            num_decode_tokens=num_decode,
            num_cached_tokens=sum(seq.num_cached_tokens for seq in plan.admitted),
            num_prompt_tokens=sum(seq.num_prompt_tokens for seq in plan.admitted),
            num_preempted=len(plan.preempted),
            num_nonfinite_rows=result.num_nonfinite_rows,
            flops=sum(result.flops.values()),
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
        )
