"""Figures agree with counts by hand; a gain needs its interval, its quality and a beaten placebo."""

import msgspec
import pytest

from etserve.bench.ablate import similarity
from etserve.bench.ablate.arms import ARMS, control_of, select, share_of_skipping_layers
from etserve.bench.ablate.figures import STEADY_SHARE, deadline, kept_share, round_figures, steady_figures
from etserve.bench.ablate.goals import attempts, goals_section
from etserve.bench.ablate.records import PromptRun, QualityRun, Replay
from etserve.bench.ablate.statistics import compare, loss
from etserve.bench.ablate.verdicts import Figures, judge, steering
from etserve.bench.errors import BenchError
from etserve.config import ControlConfig
from tests.unit.ablate_helpers import quality, request, round_of, steps

GOOD = {"baseline": quality("baseline", [2.0, 3.0, 4.0]), "meso": quality("meso", [2.001, 3.002, 4.003])}


def test_figures_are_sums_and_means_of_what_happened() -> None:
    run = round_of(request(0), request(1, due_seconds=0.5))
    found = round_figures(run, deadline_seconds=1.75)
    assert found["e2e_mean_seconds"] == pytest.approx(1.75)
    assert found["tokens_per_second"] == pytest.approx(3.0)
    assert found["goodput"] == pytest.approx(0.5)  # the first took 2 s
    assert found["tau_per_gflop"] == pytest.approx(3.0 / 2.0)
    assert found["tau_per_gb"] == pytest.approx(3.0 / 1.0)
    assert found["tau_per_second"] == pytest.approx(3.0 / 2.0)
    assert found["blocks_skipped"] == 7
    assert found["num_preempted"] == 1
    assert found["mean_temperature"] == pytest.approx(0.8)


def test_a_failed_request_counts_as_failed_and_never_as_fast() -> None:
    broken = request(1, seconds=(0.1,), error="model_numerics", replay=None)
    found = round_figures(round_of(request(0), broken))
    assert found["num_failed"] == 1
    assert found["e2e_mean_seconds"] == pytest.approx(2.0)
    assert found["tokens_per_second"] == pytest.approx(1.5)


def test_nothing_complete_gives_no_rates_instead_of_a_crash() -> None:
    found = round_figures(round_of(request(0, error="internal")))
    assert "tpot_seconds" not in found
    assert found["tokens_per_second"] == 0.0


def test_the_steady_window_runs_while_nearly_all_sequences_decode() -> None:
    replayed = Replay(tau_nats=9.0, nats_resolved=15.0, entropies=[4.0, 3.0, 5.0, 1.0, 2.0])
    both = [
        request(i, seconds=seconds, entropies=[1.0] * 5, tau_nats=[0.0] * 5, replay=replayed)
        for i, seconds in enumerate([(1.0, 2.0, 3.0, 4.0, 5.0), (2.0, 3.0, 4.0, 5.0, 6.0)])
    ]
    shape = steps(
        end_seconds=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        num_decode_tokens=[0, 1, 9, 9, 9, 1],  # drafts count here
        num_prefill_tokens=[9, 9, 7, 0, 0, 0],
        step_seconds=[1.0] * 6,
        bytes_read=[9e9, 9e9, 3e8, 4e8, 4e8, 9e9],
        flops=[9e9, 9e9, 5e8, 5e8, 5e8, 9e9],
        num_blocks_skipped=[0] * 6, num_preempted=[0] * 6, num_forced=[0] * 6,
    )  # fmt: skip
    found = steady_figures(round_of(*both, steps=shape))
    assert found["steady_tokens_per_second"] == pytest.approx(6 / 3.0)  # (2, 5]: both decode
    assert found["steady_tpot_seconds"] == pytest.approx(1.0)
    assert found["steady_share"] == pytest.approx(0.6)
    tau = (0.0 + 4.0 + 0.0) + (1.0 + 0.0 + 4.0)  # the first one's last three tokens, the other's second to fourth
    assert found["steady_tau_per_second"] == pytest.approx(tau / 3.0)
    assert found["steady_tau_per_gb"] == pytest.approx(tau / 1.1)
    assert found["steady_tau_per_gflop"] == pytest.approx(tau / 1.5)
    assert found["steady_nats_per_second"] == pytest.approx((5.0 + 1.0 + 2.0 + 3.0 + 5.0 + 1.0) / 3.0)
    assert found["kv_share"] == pytest.approx(0.75)  # of the steps that read no prompt
    assert steady_figures(round_of(request(0, seconds=(1.0,)))) == {}


def test_prompts_that_were_read_for_all_arms_count_in_the_whole_run_and_not_in_the_window() -> None:
    alone, shared = round_of(request(0)), round_of(request(0), prompts=PromptRun(seconds=2, flops=2e9, bytes_read=1e9))
    mine, theirs = round_figures(shared, 4.0), round_figures(alone, 4.0)
    assert (theirs["tokens_per_second"], mine["tokens_per_second"]) == (1.5, 0.75)
    assert (theirs["e2e_mean_seconds"], mine["e2e_mean_seconds"]) == (2.0, 4.0)
    assert mine["tau_per_gflop"] == pytest.approx(1.5 / 4.0)
    assert mine["tau_per_gb"] == pytest.approx(1.5 / 2.0)
    assert mine["goodput"] == pytest.approx(0.25)
    assert mine["steady_tokens_per_second"] == theirs["steady_tokens_per_second"]
    assert deadline([shared]) == 4.0


def test_kept_share_is_of_the_steps_that_skip() -> None:
    assert kept_share([1.0, 0.5, 0.25]) == pytest.approx(0.375)
    assert kept_share([1.0, 1.0]) == 1.0


def test_the_deadline_is_the_baselines_median_latency() -> None:
    assert deadline([round_of(request(0), request(1, due_seconds=1.0), request(2, due_seconds=1.5))]) == 1.0
    assert deadline([round_of(request(error="internal"))]) is None


def test_ratios_are_paired_by_round_and_a_constant_ratio_has_a_closed_interval() -> None:
    by = [{"x": float(value)} for value in (1, 2, 4, 8)]
    of = [{"x": 1.5 * each["x"]} for each in by]
    found = compare(of, by, "x")
    assert found is not None
    assert (found.value, found.low, found.high) == (1.5, 1.5, 1.5)
    assert compare(of, [{}] * 4, "x") is None


def test_loss_is_relative_and_its_interval_holds_it() -> None:
    found = loss(quality("a", [2.02, 3.06, 4.0]), quality("b", [2.0, 3.0, 4.0]))
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.value == pytest.approx(9.08 / 9.0 - 1.0)
    assert found.low <= found.value <= found.high
    assert loss(quality("a", []), quality("b", [])) is None


def test_equal_scores_lose_exactly_nothing() -> None:
    found = loss(GOOD["baseline"], GOOD["baseline"])
    assert found is not None
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def faster(factor: float) -> list[dict[str, float]]:
    return [{"tokens_per_second": factor * base} for base in (10.0, 11.0, 12.0, 13.0, 14.0)]


FIGURES = {"baseline": faster(1.0), "meso": faster(1.5), "random-blocks": faster(1.5)}
BAD_PLACEBO = {**GOOD, "random-blocks": quality("random-blocks", [2.2, 3.3, 4.5])}


def test_a_gain_is_clear_of_one_keeps_quality_and_loses_less_than_its_placebo() -> None:
    (verdict,) = judge("w", FIGURES, BAD_PLACEBO)
    assert verdict.is_gain
    assert verdict.ratio.value == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("figures", "scores", "reason"),
    [
        ({**FIGURES, "meso": faster(1.0)}, BAD_PLACEBO, "holds 1.00"),
        ({**FIGURES, "meso": faster(0.5)}, BAD_PLACEBO, "worse than the baseline"),
        ({name: rounds[:2] for name, rounds in FIGURES.items()}, BAD_PLACEBO, "too few rounds"),
        (FIGURES, {**BAD_PLACEBO, "meso": quality("meso", [2.1, 3.1, 4.1])}, "above 1%"),
        (FIGURES, {**BAD_PLACEBO, "random-blocks": GOOD["meso"]}, "not better than random-blocks"),
        ({"baseline": faster(1.0), "full": faster(1.5)}, {**GOOD, "full": GOOD["meso"]}, "no placebo"),
        (FIGURES, {"baseline": GOOD["baseline"]}, "not measured"),
        (FIGURES, GOOD, "no placebo"),  # it ran, but nobody knows what it loses
    ],
)
def test_what_is_no_gain_says_why(figures: Figures, scores: dict[str, QualityRun], reason: str) -> None:
    (verdict,) = judge("w", figures, scores)
    assert not verdict.is_gain
    assert reason in verdict.reason


def test_blind_skipping_is_beaten_by_what_it_loses_on_whatever_workload() -> None:
    figures = {"baseline": faster(1.0), "meso": faster(1.5)}
    assert judge("w", figures, BAD_PLACEBO)[0].is_gain
    assert not judge("w", figures, {**BAD_PLACEBO, "recent-blocks": GOOD["meso"]})[0].is_gain


def test_an_arm_that_skips_nothing_beats_its_placebo_at_the_figure_itself() -> None:
    figures = {"baseline": faster(1.0), "macro": faster(1.5), "random-priority": faster(1.2)}
    assert judge("w", figures, {})[0].is_gain
    figures["random-priority"] = faster(1.6)
    assert "random-priority" in judge("w", figures, {})[0].reason


def test_steering_is_judged_by_loss_against_a_constant_epsilon() -> None:
    scores = {"meso": quality("meso", [2.0, 3.0, 4.0]), "constant-epsilon": quality("c", [2.1, 3.1, 4.1])}
    found = steering(scores)
    assert found is not None
    assert found.value < 0.0
    assert steering({}) is None


def test_placebos_take_their_measure_from_their_law() -> None:
    base = ControlConfig(mean_entropy_nats=2.0)
    assert control_of(ARMS["fixed-temperature"], base, 0.7).fixed_temperature == 0.7
    assert control_of(ARMS["random-blocks"], base, 0.5, num_layers=4).prune_share == 0.01  # two dense layers are half
    assert control_of(ARMS["random-blocks"], base, 0.75, num_layers=4).prune_share == pytest.approx(0.5)
    with pytest.raises(ValueError, match="kept_share"):
        control_of(ARMS["recent-blocks"], base)


@pytest.mark.parametrize(("calibrated", "wanted"), [(0.1, 0.2), (0.2, 0.4), (0.3, 0.5)])
def test_a_loose_arm_misses_twice_what_the_calibrated_one_may(calibrated: float, wanted: float) -> None:
    base = ControlConfig(epsilon=calibrated)
    tight, loose = control_of(ARMS["meso"], base), control_of(ARMS["loose"], base)
    assert (tight.epsilon, loose.epsilon) == (calibrated, pytest.approx(wanted))
    assert loose == msgspec.structs.replace(tight, epsilon=loose.epsilon)


def test_a_share_counts_the_dense_layers() -> None:
    assert share_of_skipping_layers(0.4, dense_layers=2, num_layers=30) == pytest.approx((12 - 2) / 28)
    assert share_of_skipping_layers(1.0, 2, 30) == 1.0
    assert share_of_skipping_layers(0.5, 2, 2) == 1.0


def test_every_arm_differs_from_the_plain_engine_and_is_valid() -> None:
    base = ControlConfig(mean_entropy_nats=2.0)
    settings = {name: control_of(arm, base, 0.6, 4) for name, arm in ARMS.items()}
    assert settings["baseline"] == base
    assert len({repr(each) for each in settings.values()}) == len(ARMS)
    assert all(arm.placebo_of is None or arm.placebo_of in ARMS for arm in ARMS.values())


def test_choosing_arms_brings_the_baseline_and_what_a_placebo_measures_by() -> None:
    assert [arm.name for arm in select("random-blocks")] == ["baseline", "meso", "random-blocks"]
    assert [arm.name for arm in select(None)] == list(ARMS)
    with pytest.raises(BenchError, match="unknown arm 'meta'"):
        select("meta")


def test_texts_are_compared_by_the_kept_libraries() -> None:
    same = ["the cat sat on the mat today"]
    assert similarity.rouge_l(same, same) == pytest.approx(1.0)
    assert similarity.bleu(same, same) == pytest.approx(100.0)
    assert similarity.rouge_l(["a dog ran"], same) < 0.5
    assert similarity.repetition([[1, 2, 3, 4, 1, 2, 3, 4]]) == pytest.approx(1 / 5)
    assert similarity.repetition([[1, 2]]) == 0.0


def test_the_closest_law_to_a_goal_keeps_the_quality() -> None:
    name = "steady_tokens_per_second"
    figures = {
        arm: [{name: factor * base} for base in (10.0, 11.0, 12.0)]
        for arm, factor in (("baseline", 1.0), ("meso", 2.0), ("full", 1.5), ("random-blocks", 3.0))
    }
    scores = {**GOOD, "full": GOOD["meso"]}
    (best,) = attempts("long-context", figures, scores)
    assert (best.arm, best.ratio.value, best.is_reached) == ("meso", 2.0, True)
    (best,) = attempts("long-context", figures, {**scores, "meso": quality("meso", [2.1, 3.1, 4.1])})
    assert (best.arm, best.ratio.value, best.is_reached) == ("full", 1.5, False)
    (worst,) = attempts("short-chat", figures, scores)
    assert (worst.arm, worst.is_reached) == ("full", True)
    assert attempts("mixed", figures, scores) == []
    text = goals_section([best, worst], [])
    assert (STEADY_SHARE, "three quarters of the sequences decode" in text) == (0.75, True)
    lines = text.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert "**no**" in table[2]
    assert table[3].endswith("| yes |")
