"""What is measured of a model agrees with a slow count, and the file that is written starts a server."""

import itertools
import math
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from etserve.bench import calibrate
from etserve.bench.ablate.lab import Lab
from etserve.bench.ablate.scoring import TokenScores
from etserve.bench.ablate.texts import quality_texts
from etserve.bench.ablate.workloads import SMOKE
from etserve.bench.calibrate import calibrate_model, measure_epsilons, measure_risks, measure_written, quantiles
from etserve.bench.calibration import Calibration, EpsilonLoss, RiskBin, as_toml, risk_pairs, settings_of
from etserve.bench.errors import BenchError
from etserve.cli import main as cli
from etserve.config import ControlConfig, EngineConfig, calibration_folder, load_config
from etserve.models.calibration_files import own_path
from etserve.models.files import resolve_model
from tests.engine.helpers import load_unit, reference_logits
from tests.unit.bench_helpers import UNIT_MODEL, unit_tokenizer

CONFIG = EngineConfig(model=str(UNIT_MODEL), dtype="float32", threads=1)
TEXTS = quality_texts(SMOKE.quality, unit_tokenizer(), 2048).documents


def found(*losses: tuple[float, float]) -> Calibration:
    return Calibration(
        model="unit",
        temperature=0.8,
        num_tokens=100,
        mean_entropy_nats=1.23456,
        quantiles_nats={"0.05": 0.1, "0.25": 0.5, "0.5": 1.0, "0.75": 2.0, "0.95": 3.0},
        losses=[EpsilonLoss(epsilon=e, relative_loss=lost, kept_share=0.5) for e, lost in losses],
    )


def test_entropies_are_of_the_text_written_at_its_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], int]] = []
    real = calibrate._entropies
    monkeypatch.setattr(calibrate, "_entropies", lambda d, ids, n, *x: (seen.append((ids, n)), real(d, ids, n, *x))[1])
    written = measure_written(Lab(CONFIG), temperature=0.7, num_prompts=2, prompt_tokens=21, output_tokens=9)
    assert len(written.raw_nats) == len(written.controlled_nats) == 18
    for which, (ids, num_prompt) in enumerate(seen):
        logits = reference_logits(ids).double()[num_prompt - 1 : -1]
        for temperature, measured in ((1.0, written.raw_nats), (0.7, written.controlled_nats)):
            log_p = torch.log_softmax(logits / temperature, -1)
            wanted = (-(log_p.exp() * log_p).sum(-1)).tolist()
            assert measured[9 * which : 9 * which + 9] == pytest.approx(wanted, abs=2e-3)


def test_entropies_are_read_by_the_estimator_that_is_set() -> None:
    """The laws will be told estimates, so estimates are what the calibration is of."""
    reading = msgspec.structs.replace(CONFIG, control=ControlConfig(entropy_estimator="mid", estimator_top_k=3))
    sizes = {"num_prompts": 1, "prompt_tokens": 21, "output_tokens": 9}
    exact = measure_written(Lab(CONFIG), temperature=1.0, **sizes)
    estimated = measure_written(Lab(reading), temperature=1.0, **sizes)
    assert estimated.controlled_nats == pytest.approx(estimated.raw_nats, abs=2e-3)  # at temperature 1 they are one
    assert estimated.raw_nats != pytest.approx(exact.raw_nats, abs=0.01)
    display = msgspec.structs.replace(CONFIG, control=ControlConfig(entropy_estimator="topk_renorm"))
    with pytest.raises(BenchError, match="display only"):
        calibrate_model(display, temperature=1.0, num_tokens=64, context_tokens=600)


def test_a_greedy_calibration_is_refused() -> None:
    with pytest.raises(BenchError, match="above 0"):
        measure_written(Lab(CONFIG), temperature=0.0, num_prompts=1, prompt_tokens=8, output_tokens=2)


def test_a_looser_epsilon_reads_less() -> None:
    losses = measure_epsilons(load_unit(sketch_bits=2).decoder, TEXTS, ControlConfig())
    kept = [each.kept_share for each in losses]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0]
    assert [each.epsilon for each in losses] == sorted({each.epsilon for each in losses})


def test_risk_bins_hold_every_check_once() -> None:
    bins = measure_risks(load_unit(sketch_bits=2).decoder, TEXTS, ControlConfig(), num_bins=3)
    assert sum(each.num_steps for each in bins) > 0
    assert all(a.high_nats == b.low_nats for a, b in itertools.pairwise(bins))
    assert all(each.low_nats < each.high_nats and each.mean_divergence_nats >= -1e-9 for each in bins)
    few = measure_risks(load_unit(sketch_bits=2).decoder, TEXTS, ControlConfig(), num_bins=1)
    assert sum(each.num_steps for each in few) == sum(each.num_steps for each in bins)


def test_the_chosen_epsilon_is_the_last_before_the_loss_is_too_high() -> None:
    assert found((0.05, 0.001), (0.1, 0.002), (0.2, 0.004)).epsilon == 0.1
    assert found((0.05, 0.004), (0.1, 0.002)).epsilon is None  # a lucky larger one is not trusted
    assert found((0.05, -0.001)).epsilon == 0.05
    assert found().epsilon is None


def test_quantiles_are_numpys() -> None:
    sample = [3.0, 1.0, 2.0, 10.0]
    assert quantiles(sample)["0.25"] == float(np.quantile(sample, 0.25))
    assert list(quantiles(sample)) == ["0.05", "0.25", "0.5", "0.75", "0.95"]


def test_the_file_is_a_config_that_says_what_it_comes_from(tmp_path: Path) -> None:
    text = as_toml(found((0.05, 0.001)))
    path = tmp_path / "unit.toml"
    path.write_text(text)
    control = load_config(path, environment={}).control
    assert control.mean_entropy_nats == pytest.approx(1.2346)
    assert (control.entropy_low_nats, control.entropy_high_nats, control.epsilon) == (0.5, 2.0, 0.05)
    assert "epsilon 0.05: NLL +0.100%" in text
    assert "leave pruning off" in as_toml(found((0.05, 0.01)))


def bins(*given: tuple[float, float]) -> list[RiskBin]:
    """By upper edge and mean."""
    lows = [0.0, *(edge for edge, _ in given)]
    return [
        RiskBin(low_nats=low, high_nats=high, mean_divergence_nats=mean, num_steps=3)
        for low, (high, mean) in zip(lows, given, strict=False)
    ]


def test_the_risks_are_a_setting_that_verification_reads(tmp_path: Path) -> None:
    risks = bins((0.80008, 0.0007212), (1.77614, 0.0035381), (7.6, 0.00683))
    measured = msgspec.structs.replace(found((0.05, 0.001)), risks=risks, risk_epsilon=0.05)
    path = tmp_path / "unit.toml"
    path.write_text(as_toml(measured))
    assert "at epsilon 0.05" in path.read_text()
    for control in (load_config(path, environment={}), load_config(environment={}, calibration=path)):
        assert control.control.verify_risks_nats == ((0.8001, 0.000721), (1.7761, 0.003538), (7.6, 0.00683))
        law = control.control.verify_law("bounded")
        assert law is not None
        assert law.table.risk_nats(0.5 * 0.8001) == 0.000721
        assert law.table.risk_nats(99.0) == 0.00683


def test_bins_are_written_so_that_they_load() -> None:
    assert risk_pairs(bins((0.00001, 0.5), (1.00001, -1e-9), (1.00002, 0.2), (math.inf, math.nan))) == [
        [1.0, 0.0],
        [20.0, 20.0],
    ]
    assert risk_pairs([]) == []
    assert "verify_risks_nats" not in settings_of(found())


def test_a_model_without_doubt_keeps_the_default_quartiles() -> None:
    flat = msgspec.structs.replace(found(), quantiles_nats=dict.fromkeys(("0.05", "0.25", "0.5", "0.75", "0.95"), 0.0))
    assert set(settings_of(flat)) == {"mean_entropy_nats"}


def test_a_short_context_looks_for_no_epsilon() -> None:
    short = msgspec.structs.replace(CONFIG, max_model_len=256)
    measured = calibrate_model(short, temperature=0.8, num_tokens=64, context_tokens=600, num_texts=1)
    assert measured.losses == []
    assert measured.epsilon is None
    assert measured.num_tokens > 0


def test_risks_are_measured_at_the_epsilon_just_found(monkeypatch: pytest.MonkeyPatch) -> None:
    epsilons: list[float] = []
    real = calibrate.TextBatch.score

    def score(self: calibrate.TextBatch, control: ControlConfig) -> list[TokenScores]:
        epsilons.append(control.epsilon)
        return real(self, control)

    monkeypatch.setattr(calibrate, "measure_epsilons", lambda *_: found((0.05, 0.001), (0.1, 0.01)).losses)
    monkeypatch.setattr(calibrate.TextBatch, "score", score)
    calibrate_model(CONFIG, temperature=0.8, num_tokens=64, context_tokens=700, num_texts=1)
    assert epsilons == [0.05]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's own calibration of the unit model lies."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = own_path(resolve_model(str(UNIT_MODEL)), calibration_folder())
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize("before", ["[control\n", "[control]\nepsilon = 0.45\nmean_entropy_nats = 1.5\n"])
def test_what_was_measured_before_plays_no_part(before: str, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ControlConfig] = []

    def measure(config: EngineConfig, **_: object) -> Calibration:
        seen.append(config.control)
        return found((0.05, 0.001))

    own.write_text(before)
    monkeypatch.setattr(calibrate, "calibrate_model", measure)
    assert [cli.run(["calibrate", str(UNIT_MODEL)]) for _ in range(2)] == [0, 0]
    assert seen == [ControlConfig(), ControlConfig()]
    assert tomllib.loads(own.read_text())["control"]["epsilon"] == 0.05


def test_settings_that_need_a_calibration_do_not_keep_it_from_being_made(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "cool.toml"
    config.write_text('[control]\ntemperature_mode = "cool"\nprune_selector = "random"\njump_nats = 2.0\n')
    seen: list[ControlConfig] = []

    def measure(config: EngineConfig, **_: object) -> Calibration:
        seen.append(config.control)
        return found()

    monkeypatch.setattr(calibrate, "calibrate_model", measure)
    assert cli.run(["calibrate", str(UNIT_MODEL), "--config", str(config)]) == 0
    assert seen == [ControlConfig(jump_nats=2.0)]
    assert own.exists()


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "unit.toml"
    options = ["--tokens", "128", "--context-tokens", "600", "--dtype", "float32", "--threads", "1", "--out", str(out)]
    assert cli.run(["calibrate", str(UNIT_MODEL), *options]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    written = tomllib.loads(out.read_text())["control"]
    assert "mean_entropy_nats" in written
    assert len(written["verify_risks_nats"]) > 1
    assert msgspec.json.decode(out.with_suffix(".json").read_bytes(), type=Calibration).risk_epsilon is not None
    assert (tmp_path / "unit.json").exists()
    load_config(out, environment={})
