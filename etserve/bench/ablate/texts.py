"""What the quality suite reads: held-out documents, names to recall, needles in a novel. Knows a tokenizer only."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from etserve.bench.ablate.workloads import QualityPlan
from etserve.bench.prompts import Encoder

WARM_TOKENS = 32  # decoded before the first scored one: the law knows no entropy at first, and reads densely
_NEEDLE = " The secret word of {name} is {word}."
_QUESTION = " The secret word of {name} is"
_NAMES = ("Captain Brook", "Miss Lorne", "Doctor Vane", "Colonel Hart", "Lady Marsh", "Mr. Finch")
_WORDS = ("orange", "silver", "window", "garden", "winter", "letter", "bridge", "candle")


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Token ids, and from which on they are scored, [first_scored, len(token_ids))."""

    token_ids: list[int]
    first_scored: int

    @property
    def first_decoded(self) -> int:
        """Tokens before it are read in one go; its own logits come from a decode step."""
        return max(1, self.first_scored - WARM_TOKENS)


@dataclass(frozen=True, slots=True)
class QualityTexts:
    """The suite for one model."""

    documents: list[ScoredText]
    cloze: list[ScoredText]
    needles: list[ScoredText]


def quality_texts(plan: QualityPlan, encoder: Encoder, max_model_len: int) -> QualityTexts:
    """As many of each as planned and the model's context holds; the same ones for the same tokenizer."""
    room = max_model_len - 1
    scored = min(plan.scored_tokens, max(1, room // 4))
    prefix = min(plan.prefix_tokens, room - scored)
    needle_tokens = min(plan.needle_tokens, room)
    return QualityTexts(
        documents=list(_documents(encoder, plan.num_documents, prefix, scored)),
        cloze=list(_cloze(encoder, plan.num_cloze, prefix, room)),
        needles=[_needle(encoder, index, plan.num_needles, needle_tokens) for index in range(plan.num_needles)],
    )


def _documents(encoder: Encoder, count: int, prefix: int, scored: int) -> Iterator[ScoredText]:
    """Articles and pieces of the novel in turn."""
    articles = [str(row["text"]) for row in _rows("wikipedia.jsonl")]
    novel = encoder.encode(_novel(), False)
    size = prefix + scored
    for index in range(count):
        ids = encoder.encode(articles[index // 2 % len(articles)], False)[:size] if index % 2 == 0 else []
        if len(ids) < size:
            start = (index // 2) * size % max(1, len(novel) - size)
            ids = novel[start : start + size]
        yield ScoredText(ids, prefix)


def _cloze(encoder: Encoder, count: int, prefix: int, room: int) -> Iterator[ScoredText]:
    for row in _rows("cloze.jsonl")[:count]:
        context = encoder.encode(str(row["context"]), False)
        target = encoder.encode(str(row["target"]), False)
        context = context[-min(prefix, room - len(target)) :]
        yield ScoredText([*context, *target], len(context))


def _needle(encoder: Encoder, index: int, count: int, num_tokens: int) -> ScoredText:
    """A sentence at a depth that moves through the text with `index`, asked for at the end."""
    generator = np.random.default_rng((0x4EED, index))
    name, word = _NAMES[index % len(_NAMES)], _WORDS[int(generator.integers(len(_WORDS)))]
    needle = encoder.encode(_NEEDLE.format(name=name, word=word), False)
    question = encoder.encode(_QUESTION.format(name=name), False)
    answer = encoder.encode(f" {word}", False)
    room = max(1, num_tokens - len(needle) - len(question) - len(answer))
    novel = _novel()
    start = novel.index(". ", int(generator.integers(0, len(novel) // 2))) + 2
    hay = encoder.encode(novel[start : start + 8 * room], False)[:room]
    depth = int((index + 0.5) / count * 0.8 * len(hay)) + len(hay) // 20
    context = [*hay[:depth], *needle, *hay[depth:], *question]
    return ScoredText([*context, *answer], len(context))


def _rows(name: str) -> list[dict[str, object]]:
    text = files("etserve.bench").joinpath(f"data/quality/{name}").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line]


def _novel() -> str:
    text = files("etserve.bench").joinpath("data/quality/northanger_abbey_excerpt.txt").read_text(encoding="utf-8")
    return " ".join(text.split())
