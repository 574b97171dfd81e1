"""The findings benchmark: its arms choose what they say, against slow oracles, and its table runs on any model."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.findings import EPSILONS, SHARE_OF, Models, Trial, all_rows, load_models
from benchmarks.skipping.bed import Bed, copy_prefixes
from benchmarks.skipping.documents import cut_documents
from benchmarks.skipping.scores import DOCUMENT_HEADER, HEADER, Dense, Score, compare
from benchmarks.skipping.sets import MassAverages, heaviest_blocks, read_only
from etserve.control.eviction import MassAverage
from etserve.kernels.reference_sketch import EXACT_BITS
from etserve.kernels.selection import SelectionRule
from etserve.models.decoder import TorchDecoder
from etserve.models.native import NativeDecoder, NativeKV
from tests.kernels.decoders import BASE, RandomWeights, prompt, tables
from tests.unit.bench_helpers import UNIT_MODEL, unit_tokenizer
from tests.unit.model_helpers import save_tiny

F32 = torch.float32
SPEC = replace(BASE, num_layers=3, max_position=512)
RULE = SelectionRule(dense_layers=1, min_context_tokens=64, min_kept_blocks=5)
PREFIX, TOKENS = 304, 19  # 19 blocks; a new one begins with the first token, and another before the last
DOCUMENTS = [prompt(PREFIX + TOKENS + 1, seed) for seed in range(2)]


def native_decoder(bits: int = 2) -> NativeDecoder:
    return NativeDecoder(SPEC, RandomWeights(SPEC), F32, F32, tables(SPEC), sketch_bits=bits)


def read_bed(bits: int = 2) -> Bed:
    bed = Bed(native_decoder(bits), DOCUMENTS, PREFIX, 2)
    bed.read_prefixes()
    return bed


def oracle_bed(source: Bed) -> Bed:
    decoder = TorchDecoder(SPEC, RandomWeights(SPEC), F32, F32, tables(SPEC), sketch_bits=EXACT_BITS)
    bed = Bed(decoder, DOCUMENTS, PREFIX, 2)
    copy_prefixes(source, bed)
    return bed


# --- sets of blocks


def test_averages_are_those_that_eviction_keeps_of_each_block() -> None:
    random = np.random.default_rng(3)
    averages, slow = MassAverages(2, 7, 0.8), [[MassAverage() for _ in range(7)] for _ in range(2)]
    for num_blocks in (3, 3, 4, 6, 6):
        masses = random.random((2, 7)).astype(np.float32)
        averages.observe(masses, num_blocks)
        for document in range(2):
            for block in range(num_blocks):
                slow[document][block] = slow[document][block].observe(float(masses[document, block]), 0.8)
    expected = [[math.inf if math.isnan(one.value) else one.value for one in row] for row in slow]
    np.testing.assert_allclose(averages.values, expected)
    assert np.isinf(averages.values[:, 6]).all()  # never seen, so never left out


def test_a_copy_of_averages_is_of_its_own() -> None:
    averages = MassAverages(1, 3)
    averages.observe(np.array([[0.1, 0.2, 0.3]], np.float32), 3)
    copy = averages.copy()
    copy.observe(np.ones((1, 3), np.float32), 3)
    np.testing.assert_allclose(averages.values, [[0.1, 0.2, 0.3]])
    assert (copy.values > averages.values).all()


@pytest.mark.parametrize(("num_blocks", "share"), [(9, 0.5), (23, 0.3), (23, 0.61), (40, 0.0), (40, 1.0), (3, 0.2)])
def test_a_set_holds_what_is_always_read_and_then_the_heaviest_blocks(num_blocks: int, share: float) -> None:
    masses = np.random.default_rng(5).integers(0, 6, (3, 40)) / 8  # many equal ones
    size = min(num_blocks, max(8, math.ceil(share * num_blocks)))
    mask = heaviest_blocks(masses, num_blocks, share, SelectionRule())
    for row, found in zip(masses, mask, strict=True):
        always = {0, *range(max(0, num_blocks - 4), num_blocks)}
        others = sorted(set(range(num_blocks)) - always, key=lambda block: (-row[block], -block))
        expected = always | set(others[: max(0, size - len(always))])
        assert set(np.flatnonzero(found).tolist()) == expected


def trial_of(masses: list[np.ndarray]) -> Trial:
    bed = Bed(native_decoder(), DOCUMENTS, PREFIX, 1)
    return Trial(bed, RULE, MassAverages(2, bed.max_blocks), Dense(masses=masses))


def test_past_sets_know_the_steps_before_and_present_ones_their_own() -> None:
    random = np.random.default_rng(7)
    masses = [random.random((2, 21)).astype(np.float32) for _ in range(TOKENS)]
    changed = [each.copy() for each in masses]
    changed[8] = changed[8][:, ::-1].copy()
    for name, is_same in (("past_sets", lambda step: step <= 8), ("present_sets", lambda step: step != 8)):
        before, after = (getattr(trial_of(each), name)(0.4) for each in (masses, changed))
        equal = [bool((a.protected == b.protected).all()) for a, b in zip(before, after, strict=True)]
        assert all(equal[step] for step in range(TOKENS) if is_same(step))
        assert not all(equal)


def test_the_engine_reads_a_given_set_and_nothing_else_as_the_torch_decoder_does() -> None:
    bed = read_bed()
    oracle = oracle_bed(bed)
    masses = np.random.default_rng(9).random((2, bed.max_blocks))
    masks = [heaviest_blocks(masses, bed.num_blocks(step), 0.4, RULE) for step in range(TOKENS)]
    selections = [read_only(mask, RULE) for mask in masks]
    both = zip(bed.decode([1], selections), oracle.decode([1], selections), strict=True)
    for step, (found, expected) in enumerate(both):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        dense = np.full(2, bed.num_blocks(step))
        wanted = SPEC.num_kv_heads * (dense + 2 * masks[step].sum(1, dtype=np.int64))
        assert bed.counts.read_blocks.tolist() == oracle.counts.read_blocks.tolist() == wanted.tolist()
        assert (wanted < bed.counts.total_blocks).all()


# --- beds


def test_copied_prefixes_are_those_that_would_have_been_read() -> None:
    source, read = read_bed(2), read_bed(1)
    copied = Bed(native_decoder(1), DOCUMENTS, PREFIX, 3)
    copy_prefixes(source, copied, sketch_bits=1)
    assert isinstance(read.cache, NativeKV)
    assert isinstance(copied.cache, NativeKV)
    assert read.cache.sketches is not None
    assert copied.cache.sketches is not None
    shared = read.num_shared_blocks
    assert torch.equal(copied.cache.tensor[:, :shared], read.cache.tensor[:, :shared])
    assert torch.equal(copied.cache.sketches[:, 1:shared], read.cache.sketches[:, 1:shared])
    assert copied.cache.sketches[:, 1:shared].any()
    with pytest.raises(ValueError, match="do not share"):
        copy_prefixes(source, Bed(native_decoder(1), DOCUMENTS[:1], PREFIX, 1), sketch_bits=1)


def test_averages_at_the_end_of_a_prefix_are_of_its_last_tokens() -> None:
    """The dense masses of the same positions, asked for one by one."""
    bed = Bed(native_decoder(), DOCUMENTS, PREFIX, 1)
    found = bed.read_prefixes().values
    assert np.isinf(found[:, 19:]).all()
    assert np.isfinite(found[:, :19]).all()
    again = Bed(native_decoder(), [tokens[: PREFIX + 1] for tokens in DOCUMENTS], PREFIX - 32, 1)
    again.read_prefixes()
    averages = MassAverages(2, again.max_blocks)
    every = [read_only(np.ones((2, again.max_blocks), np.uint8), RULE)] * again.num_steps
    for step, _ in enumerate(again.decode([0], every, wants_masses=True)):
        assert again.counts.block_mass is not None
        averages.observe(again.counts.block_mass, again.num_blocks(step))
    assert again.num_steps == 32
    np.testing.assert_allclose(found[:, :19], averages.values[:, :19], rtol=1e-4, atol=1e-6)


# --- scores and texts


def test_scores_are_torchs_own_divergence_and_losses() -> None:
    generator = torch.Generator().manual_seed(1)
    dense, found = (torch.randn(3, 50, generator=generator).log_softmax(-1) for _ in range(2))
    found[0] = dense[0]
    targets = torch.tensor([4, 0, 49])
    columns = compare(dense, found, targets)
    expected = torch.nn.functional.kl_div(found, dense, log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(columns["divergence"], expected.numpy(), rtol=1e-5, atol=1e-6)
    losses = [torch.nn.functional.nll_loss(rows, targets, reduction="none").numpy() for rows in (dense, found)]
    np.testing.assert_allclose(columns["nll"], losses[1], rtol=1e-6)
    np.testing.assert_allclose(columns["excess"], losses[1] - losses[0], atol=1e-6)
    assert columns["agrees"][0]
    assert columns["agrees"].tolist() == [bool(a.argmax() == b.argmax()) for a, b in zip(dense, found, strict=True)]


def test_a_row_tells_means_over_all_tokens_and_its_error() -> None:
    score = Score()
    for excess in (0.1, 0.3):
        columns = {"divergence": [0.5, 0.0], "agrees": [True, False], "nll": [1.0, 2.0], "missing": [0.1, 0.2]}
        arrays = {name: np.array(values) for name, values in columns.items()}
        score.add(**arrays, excess=np.array([excess, -excess]), read=np.array([1, 2]), total=np.array([4, 8]))
    assert score.row(64, "arm") == "| 64 | arm | 25.0% | 0.2500 | 50.0% | +0.0000 ± 0.1291 | 0.150 |"
    assert score.row(64, "arm").count("|") == HEADER.count("|")
    assert score.document_row(64, 0, "a") == "| 64 | a | 1.000 | 25.0% | 0.5000 | +0.2000 ± 0.1000 |"
    assert score.document_row(64, 0, "a").count("|") == DOCUMENT_HEADER.count("|")


def test_documents_are_different_parts_of_several_texts() -> None:
    found = cut_documents(unit_tokenizer(), 8, 500)
    assert [each.name for each in found[:4]] == [
        "Emma, part 1",
        "Northanger Abbey, part 1",
        "Wikipedia, Apollo 11",
        "Emma, part 2",
    ]
    assert {len(each.tokens) for each in found} == {500}
    assert len({tuple(each.tokens) for each in found}) == 8
    with pytest.raises(SystemExit, match="not 3"):
        cut_documents(unit_tokenizer(), 3, 250_000)


# --- the whole table


def rows_of(models: Models, documents: list[list[int]], prefix: int) -> dict[str, Score]:
    return dict(all_rows(models, documents, prefix, RULE))


def check_table(rows: dict[str, Score], num_blocks: int) -> None:
    """What must hold of any model."""
    dense = rows["dense"]
    assert dense.kept_share == 1.0
    assert not dense.column("divergence").any()
    assert not dense.column("excess").any()
    assert rows["dense, torch reference against native"].column("divergence").max() < 1e-3
    for bits in (1, 2):
        arms = [rows[f"{bits}-bit sketch, ε = {epsilon}"] for epsilon in EPSILONS]
        shares = [arm.kept_share for arm in arms]
        assert shares == sorted(shares, reverse=True)
        for arm, epsilon in zip(arms, EPSILONS, strict=True):
            assert arm.column("missing").max() <= epsilon + 1e-5
    same = rows[f"2-bit sketch, ε = {SHARE_OF}"].kept_share
    fixed = [name for name in rows if "fixed share" in name or "one set" in name or name in ("recency", "random")]
    assert len(fixed) == 6
    for name in fixed:
        assert abs(rows[name].kept_share - same) <= 2 / num_blocks, name
    assert rows["recency"].kept_share == rows["past attention masses, one set per sequence"].kept_share
    oracle = rows[f"true masses per layer and KV head, ε = {SHARE_OF}"]
    assert oracle.column("missing").max() <= SHARE_OF + 1e-5
    assert oracle.kept_share < 1.0


def test_the_table_of_the_unit_model_holds_every_arm() -> None:
    models = load_models(str(UNIT_MODEL), "float32", with_oracle=True)
    documents = [each.tokens for each in cut_documents(unit_tokenizer(), 3, 352 + 12 + 1)]
    rows = rows_of(models, documents, 352)
    check_table(rows, 22)
    assert all(score.column("divergence").shape == (12, 3) for score in rows.values())
    asked, past = (
        rows[name].column("divergence").mean()
        for name in ("2-bit sketch, fixed share", "past attention masses, one set per sequence")
    )
    assert asked < past


def test_the_table_runs_on_a_second_architecture(tmp_path: Path) -> None:
    """A random Qwen2: that the path runs, nothing about quality."""
    save_tiny(tmp_path, "Qwen2", hidden_size=96, max_position_embeddings=512)
    models = load_models(str(tmp_path), "float32", with_oracle=True)
    check_table(rows_of(models, [prompt(320 + 9, seed, 131) for seed in range(2)], 320), 20)
