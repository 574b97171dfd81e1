"""What both completion routes' replies share: ids, usage, the entropic record, and the state of each choice."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from etserve import __version__
from etserve.outputs import EntropySummary, SequenceOutput, TokenEntropy
from etserve.sampling_params import SamplingParams, Trace
from etserve.tokenizer.tokenizer import Tokenizer

FINGERPRINT = f"etserve-{__version__}"
_SUMS = (
    *("tau_nats", "tau_up_nats", "tau_deadband_nats", "tau_ratchet_nats"),
    *("nats_resolved", "surprisal_nats", "blocks_evicted"),
)


@dataclass(frozen=True, slots=True)
class ReplyFacts:
    """What a reply says of its request."""

    reply_id: str
    model_name: str
    tokenizer: Tokenizer
    prompts: list[list[int]]
    params: SamplingParams
    trace: Trace  # as the client asked; params.trace is what the engine was told
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every reply object begins with."""
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.model_name,
            "system_fingerprint": FINGERPRINT,
        }


class Usage:
    """Counts tokens as the last outputs of the choices report them."""

    def __init__(self, facts: ReplyFacts) -> None:
        self._facts = facts
        self._num_cached = [0] * len(facts.prompts)
        self._num_output = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._sums: dict[str, float] = {}
        self._estimator = ""

    def add(self, prompt_index: int, output: SequenceOutput) -> None:
        """Count a finished choice."""
        self._num_output += output.num_output_tokens
        self._num_drafted += output.num_drafted_tokens
        self._num_accepted += output.num_accepted_tokens
        if output.choice == 0:
            self._num_cached[prompt_index] = output.num_cached_tokens
        if output.entropy_summary is not None:
            for name in _SUMS:
                self._sums[name] = self._sums.get(name, 0) + getattr(output.entropy_summary, name)
            self._estimator = output.entropy_summary.entropy_estimator

    def shape(self) -> dict[str, Any]:
        """OpenAI's usage object; a prompt counts once, however many choices it has.

        Rejected tokens are guesses that were computed in vain: they are no part of completion_tokens.
        """
        num_prompt = sum(len(prompt) for prompt in self._facts.prompts)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }
        if self._num_drafted:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._num_accepted,
                "rejected_prediction_tokens": self._num_drafted - self._num_accepted,
            }
        if self._facts.trace != "none":
            usage["entropic"] = {**self._sums, "entropy_estimator": self._estimator} if self._sums else {}
        return usage


def output_chunks(
    trace: Trace, output: SequenceOutput, added: dict[str, Any] | None, ending: dict[str, Any]
) -> list[dict[str, Any]]:
    """The chunks of one output: `added`, if anything was, and `ending` if it is the last; with the traced record."""
    chunks = []
    if added is not None:
        if trace == "tokens":
            added["choices"][0]["entropic"] = {"tokens": entropic_tokens(output.entropies)}
        chunks.append(added)
    if output.finish_reason is not None:
        ending["choices"][0]["stop_reason"] = output.stop_reason
        if trace != "none":
            ending["choices"][0]["entropic"] = entropic_summary(output.entropy_summary)
        chunks.append(ending)
    return chunks


def entropic_record(trace: Trace, summary: EntropySummary | None, entries: list[TokenEntropy]) -> dict[str, Any]:
    """A whole choice's record: the summary, and with trace "tokens" an entry per token."""
    record = entropic_summary(summary)
    return {**record, "tokens": entropic_tokens(entries)} if trace == "tokens" else record


def entropic_tokens(entries: list[TokenEntropy]) -> list[dict[str, float]]:
    """The record of each token, by name."""
    return [msgspec.structs.asdict(entry) for entry in entries]


def entropic_summary(summary: EntropySummary | None) -> dict[str, Any]:
    """The record of a finished choice, by name."""
    return {} if summary is None else msgspec.structs.asdict(summary)
