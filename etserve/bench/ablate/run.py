"""Run what is missing of a comparison: workloads, rounds and arms interleaved, then the quality suite."""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from etserve.bench import calibrate
from etserve.bench.ablate.arms import Arm, control_of
from etserve.bench.ablate.figures import kept_share, round_figures
from etserve.bench.ablate.lab import Lab
from etserve.bench.ablate.progress import Piece
from etserve.bench.ablate.quality import is_scored, run_quality, settings_of
from etserve.bench.ablate.records import QualityRun, RoundRun
from etserve.bench.ablate.rounds import RoundBench
from etserve.bench.ablate.settings import used
from etserve.bench.ablate.store import Store
from etserve.bench.ablate.texts import quality_texts
from etserve.bench.ablate.workloads import (
    AblationWorkload,
    Preset,
    arrivals,
    check_context,
    weight_of,
    weight_of_quality,
)
from etserve.bench.prompts import PromptMaker
from etserve.config import ControlConfig

Progress = Callable[[Piece], None]  # told each piece as it is done
_SEEDS_APART = 1000  # between two rounds


@dataclass(slots=True)
class Results:
    """What is there. Rounds by workload and arm, in their order."""

    rounds: dict[str, dict[str, list[RoundRun]]] = field(default_factory=dict)
    quality: dict[str, QualityRun] = field(default_factory=dict)


class Comparison:
    """One preset over one model. `arms` are in the registry's order, so that laws come before their placebos."""

    def __init__(
        self,
        lab: Lab,
        preset: Preset,
        arms: list[Arm],
        store: Store,
        base: ControlConfig,
        seed: int,
        progress: Progress,
    ) -> None:
        """`base`: what all arms share; a target entropy that it lacks is measured.

        Raises BenchError for a workload that is longer than the model's context.
        """
        for workload in preset.workloads:
            check_context(workload, lab.loaded().max_model_len)
        self._lab, self._preset, self._store, self._seed, self._progress = lab, preset, store, seed, progress
        self._arms = arms
        self._base = base
        self._maker = PromptMaker(lab.tokenizer, send_ids=True)

    def run(self) -> Results:
        """Whatever the store has is taken from it."""
        self._base = self._settle_base()
        found = Results()
        for workload in self._preset.workloads:
            arms = self._arms_of(workload)
            rounds = found.rounds[workload.name] = {arm.name: [] for arm in arms}
            for number in range(self._preset.rounds):
                self._round(workload, arms, number, rounds)
        found.quality = self._quality()
        return found

    def num_pieces(self) -> int:
        """Calls of `progress` that a whole run makes."""
        rounds = sum(self._preset.rounds_of(w, a.name) for w in self._preset.workloads for a in self._arms_of(w))
        return rounds + self._num_scored()

    def total_weight(self) -> float:
        """Of all those calls."""
        rounds = sum(
            weight_of(w) * self._preset.rounds_of(w, a.name) for w in self._preset.workloads for a in self._arms_of(w)
        )
        return rounds + weight_of_quality(self._preset.quality) * self._num_scored()

    def _num_scored(self) -> int:
        return len([arm for arm in self._arms if is_scored(arm)])

    # --- parts

    def _settle_base(self) -> ControlConfig:
        """H* comes from the model's own text where no settings say it."""
        settled = self._store.control()
        if settled is None:
            settled = self._base
            if settled.target() is None:
                settled = msgspec.structs.replace(settled, mean_entropy_nats=self._measure_mean())
            self._store.set_control(settled)
        return settled

    def _measure_mean(self) -> float:
        shortest = min(self._preset.workloads, key=lambda w: w.load.prompt_tokens.high)
        written = calibrate.measure_written(
            self._lab,
            temperature=shortest.temperature,
            num_prompts=8,
            prompt_tokens=shortest.load.prompt_tokens.high,
            output_tokens=shortest.load.output_tokens.high,
            seed=self._seed,
        )
        return sum(written.controlled_nats) / len(written.controlled_nats)

    def _arms_of(self, workload: AblationWorkload) -> list[Arm]:
        return [arm for arm in self._arms if arm.name in workload.arms]

    def _round(
        self, workload: AblationWorkload, arms: list[Arm], number: int, rounds: dict[str, list[RoundRun]]
    ) -> None:
        """Each arm once; who begins moves on from round to round, except in the first, which placebos measure by."""
        asked = arrivals(workload, self._maker, self._seed + number * _SEEDS_APART)
        due = [arm for arm in arms if number < self._preset.rounds_of(workload, arm.name)]
        bench: RoundBench | None = None
        for arm in due if number == 0 else [*due[number % len(due) :], *due[: number % len(due)]]:
            run = self._store.round(arm.name, workload.name, number)
            if is_fresh := run is None:
                bench = bench or RoundBench(self._lab, workload, asked)
                run = bench.run(arm, number, self._seed + number * _SEEDS_APART, self._control(arm, rounds))
                self._store.add_round(run)
            rounds[arm.name].append(run)
            self._progress(Piece(f"{workload.name}, round {number + 1}, {arm.name}", weight_of(workload), is_fresh))

    def _control(self, arm: Arm, rounds: dict[str, list[RoundRun]]) -> ControlConfig:
        matched = None
        if arm.matches is not None and arm.placebo_of is not None:
            figures = round_figures(rounds[arm.placebo_of][0])
            matched = figures.get(arm.matches)
            if arm.matches == "mean_temperature" and matched is not None:
                matched = max(0.01, matched)
        return control_of(arm, self._base, matched, self._lab.loaded().spec.num_layers)

    def _quality(self) -> dict[str, QualityRun]:
        """Laws first: their placebos read as much as they did on the same texts."""
        arms = [arm for arm in self._arms if is_scored(arm)]
        bits = max((arm.sketch_bits for arm in arms), default=0)
        loaded = self._lab.loaded(bits)
        texts = quality_texts(self._preset.quality, self._lab.tokenizer, loaded.max_model_len)
        done: dict[str, QualityRun] = {}
        for group in ([a for a in arms if a.matches is None], [a for a in arms if a.matches is not None]):
            controls = {arm.name: self._quality_control(arm, done, loaded.spec.num_layers) for arm in group}
            known = {name: self._store.quality(name, settings_of(c)) for name, c in controls.items()}
            missing = {name: control for name, control in controls.items() if known[name] is None}
            fresh = run_quality(loaded.decoder, texts, missing) if missing else {}
            for name in controls:
                run = known[name]
                if run is None:
                    run = fresh[name]
                    self._store.add_quality(run)
                done[name] = run
                weight = weight_of_quality(self._preset.quality)
                self._progress(Piece(f"quality, {name}", weight, is_fresh=known[name] is None))
        return done

    def _quality_control(self, arm: Arm, done: dict[str, QualityRun], num_layers: int) -> ControlConfig:
        matched = None
        if arm.placebo_of is not None and arm.placebo_of in done:
            matched = kept_share([v for each in done[arm.placebo_of].kept_fractions for v in each])
        return control_of(arm, self._base, matched, num_layers)


def manifest(lab: Lab, preset: Preset, arms: list[Arm], base: ControlConfig, seed: int) -> dict[str, object]:
    """What a folder of results is for: another model, size or setting belongs into another."""
    return {
        "schema_version": 2,
        "model": lab.config.model,
        "engine": used(lab.config),
        "control": msgspec.to_builtins(base),
        "preset": msgspec.to_builtins(preset),
        "arms": [arm.name for arm in arms],
        "seed": seed,
    }
