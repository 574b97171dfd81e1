"""What the engine's steps say of each running sequence, gathered into frames. Knows no HTTP and no clock."""

from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from etserve.control.clock import EntropyClock
from etserve.outputs import FinishReason, SequenceBlocks, SequenceOutput, StepStats

MAX_TRACKED = 4096  # sequences; beyond it the one that was silent longest is forgotten
MAX_SHOWN = 64  # sequences in one frame
_Key = tuple[str, int]  # request id, choice
_Row = tuple[float, float, float]  # entropy in nats, varentropy, temperature


@dataclass(slots=True)
class _Tracked:
    """One sequence. Its entropic clock is kept here, from its first token on, whatever its client asked to trace."""

    clock: EntropyClock = field(default_factory=EntropyClock)
    varentropy: float | None = None
    temperature: float | None = None
    kept_fraction: float | None = None  # None: not told yet
    blocks: SequenceBlocks | None = None  # None: not told yet
    recent: list[float] = field(default_factory=list)  # entropies since the last frame
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _Interval:
    """Sums over the steps since the last frame."""

    num_steps: int = 0
    step_seconds: float = 0.0
    longest_step_seconds: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preempted: int = 0
    tau_nats: float = 0.0
    nats_resolved: float = 0.0

    def add(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.step_seconds += stats.step_seconds
        self.longest_step_seconds = max(self.longest_step_seconds, stats.step_seconds)
        self.num_prefill_tokens += stats.num_prefill_tokens
        self.num_decode_tokens += stats.num_decode_tokens
        self.num_preempted += stats.num_preempted
        self.tau_nats += stats.tau_nats
        self.nats_resolved += stats.nats_resolved

    def shape(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "mean_step_seconds": self.step_seconds / self.num_steps if self.num_steps else None,
            "longest_step_seconds": self.longest_step_seconds if self.num_steps else None,
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_decode_tokens": self.num_decode_tokens,
            "num_preempted": self.num_preempted,
            "tau_nats": self.tau_nats,
            "nats_resolved": self.nats_resolved,
        }


class LiveState:
    """`observe` every step, `take_frame` now and then. With `is_watched` unset nothing is gathered between frames."""

    def __init__(self) -> None:
        self.is_watched = False
        self._tracked: dict[_Key, _Tracked] = {}  # in the order of their latest token
        self._ended: dict[_Key, _Tracked] = {}  # since the last frame
        self._interval = _Interval()
        self._latest: StepStats | None = None

    def observe(self, stats: StepStats, outputs: list[SequenceOutput]) -> None:
        """Take in what one step reported. A report with step_seconds 0 is no step (see EngineFront)."""
        self._latest = stats
        if stats.step_seconds > 0.0 and self.is_watched:
            self._interval.add(stats)
        for output, rows in zip(outputs, _rows_of(stats, outputs), strict=True):
            key = (output.request_id, output.choice)
            tracked = self._tracked.pop(key, None) or _Tracked()
            self._advance(tracked, output, rows)
            if output.finish_reason is None:
                self._tracked[key] = tracked
            elif self.is_watched:
                tracked.finish_reason = output.finish_reason
                self._ended[key] = tracked
        for blocks in stats.kv_map:
            if (found := self._tracked.get((blocks.request_id, blocks.choice))) is not None:
                found.blocks, found.kept_fraction = blocks, blocks.kept_fraction
        if not stats.num_running and not stats.num_waiting:
            self._tracked.clear()  # also those that a lost engine never ended
        while len(self._tracked) > MAX_TRACKED:
            del self._tracked[next(iter(self._tracked))]

    def _advance(self, tracked: _Tracked, output: SequenceOutput, rows: list[_Row]) -> None:
        for entropy, varentropy, temperature in rows:
            tracked.clock = tracked.clock.observe(entropy)
            tracked.varentropy, tracked.temperature = varentropy, temperature
            if self.is_watched:
                tracked.recent.append(entropy)
        if output.entropies:
            tracked.kept_fraction = output.entropies[-1].kept_fraction

    def take_frame(self) -> dict[str, Any]:
        """What happened since the last frame, and how things stand. Numbers that are not known are None."""
        latest, interval = self._latest, self._interval.shape()
        shown = [*self._ended.items(), *reversed(self._tracked.items())]
        sequences = [_shape(key, tracked) for key, tracked in shown[:MAX_SHOWN]]
        for tracked in self._tracked.values():
            tracked.recent = []
        self._ended, self._interval = {}, _Interval()
        return {
            "step": latest.step if latest else 0,
            **interval,
            "num_running": latest.num_running if latest else 0,
            "num_waiting": latest.num_waiting if latest else 0,
            "num_waiting_tokens": latest.num_waiting_tokens if latest else 0,
            "kv_blocks": _blocks(latest) if latest else None,
            "sequences": sequences,
            "num_sequences_hidden": len(shown) - len(sequences),
        }


def _rows_of(stats: StepStats, outputs: list[SequenceOutput]) -> list[list[_Row]]:
    """The measurements of each output's tokens: its own record if it has one, else its share of the step's lists.

    The lists hold one entry per token drawn, in the order of the outputs. Where the counts differ, an output that
    failed has drawn a token that it does not show, and no entry can be told from its neighbour.
    """
    num_drawn = sum(len(output.token_ids) for output in outputs)
    listed = zip(stats.entropies, stats.varentropies, stats.temperatures, strict=False)
    step_rows = iter(listed if num_drawn == len(stats.entropies) else ())
    found = []
    for output in outputs:
        shared = list(islice(step_rows, len(output.token_ids)))
        own = [(entry.entropy_nats, entry.varentropy, entry.temperature) for entry in output.entropies]
        found.append(own or shared)
    return found


def _shape(key: _Key, tracked: _Tracked) -> dict[str, Any]:
    clock = tracked.clock
    return {
        "id": key[0],
        "choice": key[1],
        "num_tokens": clock.count,
        "entropy_nats": clock.entropy_nats if clock.count else None,
        "varentropy": tracked.varentropy,
        "tau_nats": clock.tau_nats,
        "mean_entropy_nats": clock.mean_entropy_nats,
        "temperature": tracked.temperature,
        "kept_fraction": tracked.kept_fraction,
        "blocks": _shares(tracked.blocks),
        "entropies_nats": tracked.recent,
        "finish_reason": tracked.finish_reason,
    }


def _shares(blocks: SequenceBlocks | None) -> dict[str, int] | None:
    """How many of a sequence's blocks its latest step read and skipped, on average over layers; and those evicted."""
    if blocks is None:
        return None
    num_held = blocks.num_blocks - blocks.num_evicted
    num_read = round(num_held * blocks.kept_fraction)
    return {"read": num_read, "skipped": num_held - num_read, "evicted": blocks.num_evicted}


def _blocks(stats: StepStats) -> dict[str, int]:
    return {"active": stats.kv_blocks_active, "cached": stats.kv_blocks_cached, "free": stats.kv_blocks_free}
