"""Decode-style scores are the model's own, the law is the engine's, and texts hold what they promise."""

from typing import Any

import pytest
import torch

from etserve.bench.ablate.scoring import TextBatch
from etserve.bench.ablate.texts import ScoredText, quality_texts
from etserve.bench.ablate.workloads import SMOKE, STANDARD, QualityPlan
from etserve.config import ControlConfig
from etserve.control import pruning
from etserve.control.pruning import PruningState
from tests.engine.helpers import load_unit, reference_logits
from tests.unit.bench_helpers import unit_tokenizer

TEXTS = quality_texts(SMOKE.quality, unit_tokenizer(), 2048)
PLAN = QualityPlan(
    num_documents=3, prefix_tokens=700, scored_tokens=20, num_cloze=1, num_needles=3, needle_tokens=600
)  # fmt: skip


def score(texts: list[ScoredText], **control: Any) -> Any:
    return TextBatch(load_unit(sketch_bits=2).decoder, texts).score(ControlConfig(**control))


@pytest.mark.parametrize(("length", "first"), [(60, 50), (5, 1), (40, 3)])
def test_dense_scores_are_those_of_transformers(length: int, first: int) -> None:
    ids = TEXTS.documents[0].token_ids[:length]
    (found,) = score([ScoredText(ids, first)])
    log_p = torch.log_softmax(reference_logits(ids).double(), -1)
    wanted = [-float(log_p[i - 1, ids[i]]) for i in range(first, length)]
    entropies = [float(-(log_p[i - 1].exp() * log_p[i - 1]).sum()) for i in range(first, length)]
    assert found.nll_nats == pytest.approx(wanted, abs=2e-3)
    assert found.entropies == pytest.approx(entropies, abs=2e-3)
    assert found.is_likeliest == [int(log_p[i - 1].argmax()) == ids[i] for i in range(first, length)]
    assert found.kept_fractions == [1.0] * (length - first)


def test_company_and_earlier_laws_change_no_score() -> None:
    batch = TextBatch(load_unit(sketch_bits=2).decoder, TEXTS.documents)
    law = ControlConfig(pruning="on", epsilon=0.3)
    first = batch.score(law)
    batch.score(ControlConfig(pruning="on", epsilon=0.5, prune_selector="random", prune_share=0.2))
    again = batch.score(law)
    alone = TextBatch(load_unit(sketch_bits=2).decoder, TEXTS.documents[1:]).score(law)
    assert [each.nll_nats for each in first] == [each.nll_nats for each in again]
    assert first[1].nll_nats == alone[0].nll_nats
    assert min(first[0].kept_fractions) < 1.0


def test_each_step_follows_the_law_by_the_entropies_before_it() -> None:
    """A text scored from its second token on has no warm start: the whole run of the law is seen."""
    ids = TEXTS.documents[0].token_ids
    settings: dict[str, Any] = {"pruning": "on", "epsilon": 0.3, "epsilon_swing": 1.0, "jump_nats": 1.0}
    settings["watchdog_steps"] = 10_000
    (found,) = score([ScoredText(ids, 1)], **settings)
    law, state = ControlConfig(**settings).pruning_law(), PruningState()
    num_skipping = 0
    for position, (entropy, kept) in enumerate(zip(found.entropies, found.kept_fractions, strict=True), start=1):
        may_skip = pruning.epsilon(law, state, position) > 0.0
        assert may_skip or kept == 1.0
        num_skipping += kept < 1.0
        state = pruning.observe(law, state, entropy)
    assert 0 < num_skipping < len(ids) - law.min_context_tokens  # jumps made some of the steps dense


def test_checks_compare_the_same_step_both_ways() -> None:
    often: dict[str, Any] = {"pruning": "on", "epsilon": 0.3, "watchdog_steps": 1, "watchdog_divergence_nats": 20.0}
    (found,) = score(TEXTS.documents[:1], **often, jump_nats=50.0)
    assert len(found.divergences) == len(found.nll_nats) // 2  # a check that is done is due again a step later
    assert all(value >= -1e-9 for value in found.divergences)
    assert max(found.divergences) > 0.0
    checked = [share for share in found.kept_fractions if share == 1.0]
    assert len(checked) == len(found.divergences)  # what counts is the dense pass


def test_texts_have_the_planned_sizes_and_the_needle_is_in_the_hay() -> None:
    texts = quality_texts(PLAN, unit_tokenizer(), 2048)
    assert [(len(t.token_ids), t.first_scored) for t in texts.documents] == [(720, 700)] * 3
    assert len({tuple(t.token_ids) for t in texts.documents}) == 3
    depths = []
    for text in texts.needles:
        whole = unit_tokenizer().decode(text.token_ids)
        question, answer = whole.rsplit(" The secret word of ", 1)[1].split(" is ")
        assert whole.count(f"The secret word of {question} is {answer}.") == 1
        assert unit_tokenizer().decode(text.token_ids[text.first_scored :]) == f" {answer}"
        depths.append(whole.index("The secret word"))
    assert depths == sorted(depths)
    assert texts.cloze[0].first_scored < len(texts.cloze[0].token_ids) <= 720 + 20


def test_texts_fit_a_short_context() -> None:
    texts = quality_texts(STANDARD.quality, unit_tokenizer(), 512)
    assert len(texts.cloze) == STANDARD.quality.num_cloze
    for text in (*texts.documents, *texts.cloze, *texts.needles):
        assert 0 < text.first_decoded <= text.first_scored < len(text.token_ids) <= 512


def test_the_law_is_told_what_the_estimator_reads_and_the_scores_stay_exact() -> None:
    often: dict[str, Any] = {"pruning": "on", "epsilon": 0.3, "watchdog_steps": 1, "watchdog_divergence_nats": 20.0}
    (exact,) = score(TEXTS.documents[:1], **often, jump_nats=50.0)
    assert exact.divergence_entropies == [h for h in exact.entropies if h in exact.divergence_entropies]
    (found,) = score(TEXTS.documents[:1], **often, jump_nats=50.0, entropy_estimator="mid", estimator_top_k=2)
    checked = [h for h, share in zip(found.entropies, found.kept_fractions, strict=True) if share == 1.0]
    apart = [abs(told - h) for told, h in zip(found.divergence_entropies, checked, strict=True)]
    assert max(apart) > 0.1
