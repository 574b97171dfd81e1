"""The quality suite over several arms at once: each text's beginning is read once, its end scored under every law."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from etserve.bench.ablate.arms import Arm
from etserve.bench.ablate.records import QualityRun
from etserve.bench.ablate.scoring import TextBatch, TokenScores
from etserve.bench.ablate.texts import QualityTexts, ScoredText
from etserve.config import ControlConfig
from etserve.models.types import Decoder

_TEXTS_AT_ONCE = 8
Progress = Callable[[str], None]
Controls = Mapping[str, ControlConfig]  # by the arm's name


def is_scored(arm: Arm) -> bool:
    """The others give the baseline's distribution for the same text, or evict, which is not scored.

    Verification is not in force here: an arm whose entries are renewed meanwhile is scored as if they were not.
    """
    return arm.name == "baseline" or (arm.changes.get("pruning") == "on" and arm.is_lossy)


def settings_of(control: ControlConfig) -> dict[str, Any]:
    """What differs from the defaults, as plain data."""
    default: dict[str, Any] = msgspec.to_builtins(ControlConfig())
    given: dict[str, Any] = msgspec.to_builtins(control)
    return {name: value for name, value in given.items() if value != default[name]}


def run_quality(
    decoder: Decoder, texts: QualityTexts, controls: Controls, progress: Progress = lambda _: None
) -> dict[str, QualityRun]:
    """Score all texts under each arm's law. `decoder` keeps the sketches that the laws need."""
    documents = _scores(decoder, texts.documents, controls, progress)
    cloze = _scores(decoder, texts.cloze, controls, progress)
    needles = _scores(decoder, texts.needles, controls, progress)
    return {
        name: QualityRun(
            arm=name,
            settings=settings_of(control),
            nll_nats=[found.nll_nats for found in documents[name]],
            entropies=[found.entropies for found in documents[name]],
            kept_fractions=[found.kept_fractions for found in documents[name]],
            cloze_nll=[found.total_nll for found in cloze[name]],
            cloze_hits=[found.is_hit for found in cloze[name]],
            needle_nll=[found.total_nll for found in needles[name]],
            needle_hits=[found.is_hit for found in needles[name]],
        )
        for name, control in controls.items()
    }


def _scores(
    decoder: Decoder, texts: list[ScoredText], controls: Controls, progress: Progress
) -> dict[str, list[TokenScores]]:
    found: dict[str, list[TokenScores]] = {name: [] for name in controls}
    for part in _parts(texts):
        batch = TextBatch(decoder, part)
        for name, control in controls.items():
            found[name] += batch.score(control)
            progress(name)
    return found


def _parts(texts: list[ScoredText]) -> Iterator[list[ScoredText]]:
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        yield texts[start : start + _TEXTS_AT_ONCE]


def count_parts(texts: QualityTexts) -> int:
    """Calls of `progress` per arm."""
    return sum(-(-len(each) // _TEXTS_AT_ONCE) for each in (texts.documents, texts.cloze, texts.needles))
