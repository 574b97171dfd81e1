"""Replies of POST /v1/completions, whole or in chunks. Choice i of prompt p has index p * n + i."""

from dataclasses import dataclass, field
from typing import Any

from etserve.outputs import SequenceOutput, TokenEntropy, TokenLogprobs
from etserve.server.logprobs import CompletionLogprobs
from etserve.server.replies import ReplyFacts, Usage, entropic_record, output_chunks

Logprobs = dict[str, list[Any]]


@dataclass(slots=True)
class _Choice:
    shaper: CompletionLogprobs | None
    text: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    entropies: list[TokenEntropy] = field(default_factory=list)
    last: SequenceOutput | None = None
    is_echoed: bool = False


@dataclass(slots=True)
class _PromptScores:
    """A prompt's logprobs come once, with the first choice; the other choices' outputs wait here until then."""

    logprobs: list[TokenLogprobs | None] | None = None
    held: list[SequenceOutput] = field(default_factory=list)

    def release(self, output: SequenceOutput) -> list[SequenceOutput]:
        """Return the outputs that can be shaped now, in order."""
        if output.prompt_logprobs is not None:
            self.logprobs = output.prompt_logprobs
            held, self.held = self.held, []
            return [output, *held]
        if self.logprobs is None:
            self.held.append(output)
            return []
        return [output]


class CompletionReply:
    """Gathers outputs into one object (`add`, `shape`) or turns each into chunks (`opening`, `chunks`).

    `echo` holds the prompts' texts when they are to stand in front of the completions, else None.
    """

    def __init__(self, facts: ReplyFacts, echo: list[str] | None) -> None:
        self._facts = facts
        self._echo = echo
        self._choices = [_Choice(self._shaper()) for _ in range(len(facts.prompts) * facts.params.n)]
        self._scores = [_PromptScores() for _ in facts.prompts]
        self._is_scored = echo is not None and facts.params.logprobs is not None
        self._usage = Usage(facts)
        self._head = facts.head("text_completion")

    def _shaper(self) -> CompletionLogprobs | None:
        params = self._facts.params
        if params.logprobs is None:
            return None
        return CompletionLogprobs(self._facts.tokenizer, params.logprobs, params.skip_special_tokens)

    def add(self, prompt_index: int, output: SequenceOutput) -> None:
        """Take in one output."""
        for released in self._release(prompt_index, output):
            self._add(prompt_index, released)

    def _release(self, prompt_index: int, output: SequenceOutput) -> list[SequenceOutput]:
        return self._scores[prompt_index].release(output) if self._is_scored else [output]

    def _add(self, prompt_index: int, output: SequenceOutput) -> None:
        choice = self._choices[prompt_index * self._facts.params.n + output.choice]
        text, logprobs = self._take(choice, prompt_index, output)
        choice.text.append(text)
        choice.logprobs += logprobs
        choice.entropies += output.entropies
        if output.finish_reason is not None:
            choice.last = output
            self._usage.add(prompt_index, output)

    def shape(self) -> dict[str, Any]:
        """The whole reply, once every choice has finished."""
        choices = [self._shape_choice(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": self._usage.shape()}

    def _shape_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        last = choice.last
        shaped: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": None if choice.shaper is None else _joined(choice.logprobs),
            "finish_reason": last.finish_reason if last else None,
            "stop_reason": last.stop_reason if last else None,
        }
        if self._facts.trace != "none" and last is not None:
            shaped["entropic"] = entropic_record(self._facts.trace, last.entropy_summary, choice.entropies)
        return shaped

    def opening(self) -> list[dict[str, Any]]:
        """This route's streams begin with the first text."""
        return []

    def chunks(self, prompt_index: int, output: SequenceOutput) -> list[dict[str, Any]]:
        """The chunks of one output: what it added, if anything, and the finish."""
        released = self._release(prompt_index, output)
        return [chunk for one in released for chunk in self._chunks(prompt_index, one)]

    def _chunks(self, prompt_index: int, output: SequenceOutput) -> list[dict[str, Any]]:
        index = prompt_index * self._facts.params.n + output.choice
        text, logprobs = self._take(self._choices[index], prompt_index, output)
        added = None
        if text or logprobs or output.entropies:
            added = self._chunk(index, text, _joined(logprobs) if logprobs else None, None)
        if output.finish_reason is not None:
            self._usage.add(prompt_index, output)
        return output_chunks(self._facts.trace, output, added, self._chunk(index, "", None, output.finish_reason))

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that carries the usage, and no choice."""
        return {**self._head, "choices": [], "usage": self._usage.shape()}

    def _chunk(self, index: int, text: str, logprobs: Logprobs | None, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}

    def _take(self, choice: _Choice, prompt_index: int, output: SequenceOutput) -> tuple[str, list[Logprobs]]:
        """Text and logprobs that this output adds; the choice's first one brings the echoed prompt."""
        text, logprobs = output.text, []
        if self._echo is not None and not choice.is_echoed:
            choice.is_echoed = True
            text = self._echo[prompt_index] + text
            scores = self._scores[prompt_index].logprobs
            if choice.shaper is not None and scores is not None:
                logprobs.append(choice.shaper.shape(self._facts.prompts[prompt_index], scores, is_prompt=True))
        if choice.shaper is not None and output.logprobs:
            ids = [entry.token_id for entry in output.logprobs]
            logprobs.append(choice.shaper.shape(ids, list(output.logprobs)))
        return text, logprobs


def _joined(parts: list[Logprobs]) -> Logprobs:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for part in parts for item in part[name]] for name in names}
