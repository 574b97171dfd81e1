"""Every guard of eviction, over arbitrary sequences of blocks."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etserve.control.eviction import (
    Block,
    EvictionConfig,
    MassAverage,
    choose_evictions,
    is_evictable,
    max_evictable,
    may_be_prefix_source,
    num_over_budget,
)

CONFIG = EvictionConfig()
SLOW_TO_BUILD = settings(max_examples=60)
averages = st.builds(MassAverage, weighted=st.floats(0.0, 1.0), weight=st.sampled_from([0.0, 0.2, 1.0]))


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[Block], int]:
    """A sequence of up to 120 blocks of which some were evicted before."""
    num_blocks = draw(st.integers(0, 120))
    indices = sorted(draw(st.sets(st.integers(0, num_blocks - 1)))) if num_blocks else []
    if draw(st.booleans()):
        indices = list(range(num_blocks))
    held = [
        Block(
            index=i,
            mass=draw(averages),
            mean_surprisal_nats=draw(st.floats(0.0, 12.0) | st.just(math.nan)),
            is_protected=draw(st.booleans()) and draw(st.booleans()),
            num_refs=draw(st.sampled_from([1, 1, 1, 2])),
            is_cached=draw(st.booleans()) and draw(st.booleans()),
        )
        for i in indices
    ]
    return held, num_blocks


def plain_blocks(count: int) -> list[Block]:
    """Blocks without any guard, scores ascending with the index."""
    return [Block(i, MassAverage().observe((i + 1) / count, 0.8), 1.0) for i in range(count)]


@SLOW_TO_BUILD
@given(sequences(), st.integers(-3, 150))
def test_no_guarded_block_is_ever_evicted_and_no_floor_undercut(case: tuple[list[Block], int], wanted: int) -> None:
    held, num_blocks = case
    chosen = choose_evictions(held, num_blocks, wanted, CONFIG)
    by_index = {block.index: block for block in held}
    assert len(set(chosen)) == len(chosen) <= max(0, wanted)
    for index in chosen:
        block = by_index[index]
        assert not block.is_protected
        assert block.num_refs == 1
        assert not block.is_cached
        assert 1 <= index < num_blocks - 4
        assert math.isfinite(block.score)
    if chosen:
        left = len(held) - len(chosen)
        assert left >= 32
        assert left >= 0.5 * num_blocks


@SLOW_TO_BUILD
@given(sequences(), st.integers(0, 150))
def test_whoever_stays_though_evictable_scores_at_least_as_high(case: tuple[list[Block], int], wanted: int) -> None:
    held, num_blocks = case
    chosen = set(choose_evictions(held, num_blocks, wanted, CONFIG))
    evictable = [block for block in held if is_evictable(block, num_blocks, CONFIG)]
    gone = [block.score for block in evictable if block.index in chosen]
    stayed = [block.score for block in evictable if block.index not in chosen]
    assert not gone or not stayed or max(gone) <= min(stayed)
    assert len(gone) == min(wanted, len(evictable), max_evictable(len(held), num_blocks, CONFIG))


def test_lowest_scores_go_first_and_the_older_of_equals() -> None:
    assert choose_evictions(plain_blocks(100), 100, 3, CONFIG) == (1, 2, 3)
    equal = [Block(i, MassAverage().observe(0.1, 0.8), 1.0) for i in range(100)]
    assert choose_evictions(equal, 100, 2, CONFIG) == (1, 2)
    guessed = [Block(i, MassAverage().observe(0.1, 0.8), 0.1 if i == 50 else 1.0) for i in range(100)]
    assert choose_evictions(guessed, 100, 1, CONFIG) == (50,)


@pytest.mark.parametrize(("num_blocks", "kept"), [(100, 50), (101, 51)])
def test_repeated_eviction_stops_at_half_of_the_sequence(num_blocks: int, kept: int) -> None:
    held = plain_blocks(num_blocks)
    for _ in range(20):
        gone = choose_evictions(held, num_blocks, 9, CONFIG)
        held = [block for block in held if block.index not in gone]
    assert len(held) == kept


def test_a_short_sequence_keeps_32_blocks() -> None:
    assert len(choose_evictions(plain_blocks(40), 40, 40, CONFIG)) == 8
    assert choose_evictions(plain_blocks(32), 32, 40, CONFIG) == ()


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=50), st.floats(0.0, 0.99))
def test_the_average_stays_within_what_was_seen_from_the_first_step_on(masses: list[float], decay: float) -> None:
    average = MassAverage()
    for i, mass in enumerate(masses):
        average = average.observe(mass, decay)
        seen = masses[: i + 1]
        assert min(seen) - 1e-9 <= average.value <= max(seen) + 1e-9
    assert MassAverage().observe(masses[0], decay).value == pytest.approx(masses[0])


def test_a_block_nobody_measured_is_unknown_and_not_idle() -> None:
    assert math.isnan(MassAverage().value)
    seen = MassAverage().observe(0.5, 0.8)
    assert seen.observe(math.nan, 0.8) == seen
    assert not is_evictable(Block(10, MassAverage(), 1.0), 100, CONFIG)
    assert not is_evictable(Block(10, seen, math.nan), 100, CONFIG)
    assert is_evictable(Block(10, seen, 1.0), 100, CONFIG)


def test_a_block_budget_asks_for_the_excess_only() -> None:
    assert num_over_budget(50, None) == 0
    assert num_over_budget(50, 64) == 0
    assert num_over_budget(70, 64) == 6


def test_an_evicted_sequence_is_no_prefix_source() -> None:
    assert may_be_prefix_source(0)
    assert not may_be_prefix_source(1)


@pytest.mark.parametrize(
    "fields", [{"mass_decay": 1.0}, {"min_kept_share": 1.5}, {"recent_blocks": -1}, {"mass_decay": math.nan}]
)
def test_values_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        EvictionConfig(**fields)  # type: ignore[arg-type]
