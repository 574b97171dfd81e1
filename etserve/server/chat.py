"""Replies of POST /v1/chat/completions, whole or in chunks."""

from dataclasses import dataclass, field
from typing import Any

from etserve.outputs import SequenceOutput, TokenEntropy, TokenLogprobs
from etserve.server.logprobs import chat_logprobs
from etserve.server.replies import ReplyFacts, Usage, entropic_record, output_chunks


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    entropies: list[TokenEntropy] = field(default_factory=list)
    last: SequenceOutput | None = None


class ChatReply:
    """Gathers outputs into one object (`add`, `shape`) or turns each into chunks (`opening`, `chunks`)."""

    def __init__(self, facts: ReplyFacts) -> None:
        self._facts = facts
        self._choices = [_Choice() for _ in range(facts.params.n)]
        self._usage = Usage(facts)
        self._chunk_head = facts.head("chat.completion.chunk")

    def add(self, prompt_index: int, output: SequenceOutput) -> None:
        """Take in one output."""
        choice = self._choices[output.choice]
        choice.text.append(output.text)
        choice.logprobs += output.logprobs
        choice.entropies += output.entropies
        if output.finish_reason is not None:
            choice.last = output
            self._usage.add(prompt_index, output)

    def shape(self) -> dict[str, Any]:
        """The whole reply, once every choice has finished."""
        choices = [self._shape_choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._facts.head("chat.completion"), "choices": choices, "usage": self._usage.shape()}

    def _shape_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        last = choice.last
        shaped: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": last.finish_reason if last else None,
            "stop_reason": last.stop_reason if last else None,
        }
        if self._facts.trace != "none" and last is not None:
            shaped["entropic"] = entropic_record(self._facts.trace, last.entropy_summary, choice.entropies)
        return shaped

    def opening(self) -> list[dict[str, Any]]:
        """The chunks that name the role."""
        return [
            self._chunk(index, {"role": "assistant", "content": ""}, None, None) for index in range(len(self._choices))
        ]

    def chunks(self, prompt_index: int, output: SequenceOutput) -> list[dict[str, Any]]:
        """The chunks of one output: what it added, if anything, and the finish."""
        logprobs, added = self._logprobs(output.logprobs) if output.logprobs else None, None
        if output.text or logprobs or output.entropies:
            added = self._chunk(output.choice, {"content": output.text}, logprobs, None)
        if output.finish_reason is not None:
            self._usage.add(prompt_index, output)
        return output_chunks(
            self._facts.trace, output, added, self._chunk(output.choice, {}, None, output.finish_reason)
        )

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that carries the usage, and no choice."""
        return {**self._chunk_head, "choices": [], "usage": self._usage.shape()}

    def _chunk(
        self, index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._chunk_head, "choices": [choice]}

    def _logprobs(self, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
        num_top = self._facts.params.logprobs
        return None if num_top is None else chat_logprobs(entries, num_top, self._facts.tokenizer)
