"""Who gets the step: finite keys, and the ageing bound under arbitrary adversaries and floods from both sides."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etserve.control.priority import (
    Candidate,
    DropAverage,
    Mode,
    PriorityConfig,
    ServiceClass,
    age,
    choose_victim,
    finish_nearness,
    forced_slots,
    gain,
    is_forced,
    median_drop_per_cost,
    rank,
    standing,
)

MODES: list[Mode] = ["fcfs", "paper", "entropic", "entropic_inverse", "random"]
AGEING: list[Mode] = ["entropic", "entropic_inverse", "random"]
STEERED: list[Mode] = ["paper", *AGEING]
CLASSES: list[ServiceClass] = ["decode", "waiting", "batch"]
STEP_SECONDS = 0.1
LN_VOCAB = math.log(49_152)

anything = st.floats(allow_nan=True, allow_infinity=True)
candidates = st.builds(
    Candidate,
    arrival=st.integers(0, 10**6),
    service_class=st.sampled_from(CLASSES),
    seconds_since_service=st.floats(0.0, 100.0) | anything,
    drop_per_cost=st.floats(0.0, 100.0) | st.sampled_from([0.0, math.nan, math.inf]) | anything,
    tokens_left=st.floats(0.0, 4096.0) | anything,
    end_probability=st.floats(0.0, 1.0) | anything,
    entropy_nats=st.sampled_from([0.0, LN_VOCAB, math.nan]) | anything,
    seed=st.integers(0, 2**63),
)
crowds = st.lists(candidates, max_size=12, unique_by=lambda c: c.arrival)


@dataclass
class Client:
    """One sequence in the simulator."""

    candidate: Candidate
    last_service: float  # arrival at first
    since: float = 0.0  # when it entered its class


def candidate(arrival: int, service_class: ServiceClass = "decode", seconds: float = 0.0, **rest: float) -> Candidate:
    return Candidate(arrival, service_class, seconds, **rest)  # type: ignore[arg-type]


@given(crowds, st.sampled_from(MODES), st.integers(0, 8), st.integers(0, 1000))
def test_the_rank_is_a_permutation_whatever_is_unknown(
    crowd: list[Candidate], mode: Mode, slots: int, step: int
) -> None:
    order = rank(crowd, slots, step, PriorityConfig(mode=mode))
    assert sorted(c.arrival for c in order) == sorted(c.arrival for c in crowd)


@given(crowds, st.sampled_from(MODES), st.integers(0, 8), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_the_rank_does_not_depend_on_the_order_of_the_list(
    crowd: list[Candidate], mode: Mode, slots: int, step: int, rng: random.Random
) -> None:
    shuffled = list(crowd)
    rng.shuffle(shuffled)
    config = PriorityConfig(mode=mode)
    assert [c.arrival for c in rank(shuffled, slots, step, config)] == [
        c.arrival for c in rank(crowd, slots, step, config)
    ]


@given(candidates, st.floats(0.0, 100.0) | st.just(math.inf), st.sampled_from(AGEING), st.integers(0, 1000))
def test_what_is_added_to_age_stays_within_one_whatever_is_unknown(
    one: Candidate, median: float, mode: Mode, step: int
) -> None:
    assert 0.0 <= standing(one, median, PriorityConfig(mode=mode), step) <= 1.0
    assert age(one, PriorityConfig(mode=mode)) >= 0.0


@pytest.mark.parametrize("mode", AGEING)
def test_below_forcing_the_order_is_that_of_standing_plus_age(mode: Mode) -> None:
    config = PriorityConfig(mode=mode)
    rng = random.Random(6)
    crowd = [
        candidate(i, seconds=rng.uniform(0.0, 0.39), drop_per_cost=rng.random(), tokens_left=rng.uniform(0.0, 99.0))
        for i in range(30)
    ]
    median = median_drop_per_cost(crowd)
    order = rank(crowd, 4, 9, config)
    values = [standing(c, median, config, 9) + age(c, config) for c in order]
    assert values == sorted(values, reverse=True)


@given(st.floats(0.0, 1e6) | st.just(math.inf), st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_gain_grows_with_the_drop_and_is_a_half_at_the_median(median: float, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert 0.0 <= gain(low, median) <= gain(high, median) + 1e-12 <= 1.0 + 1e-12
    assert gain(median, median) == 0.5
    assert gain(math.nan, median) == 0.5


def test_the_median_is_of_the_known_rates_only() -> None:
    crowd = [candidate(i, drop_per_cost=rho) for i, rho in enumerate([1.0, math.nan, 5.0, 2.0, -1.0])]
    assert median_drop_per_cost(crowd) == 2.0
    assert median_drop_per_cost([candidate(0)]) == 0.0
    assert median_drop_per_cost([]) == 0.0


def test_nearness_of_the_end_by_count_or_by_the_probability_of_the_end() -> None:
    assert finish_nearness(0.0, 0.0, 16.0) == 1.0
    assert finish_nearness(16.0, 0.0, 16.0) == 0.5
    assert finish_nearness(math.inf, 0.7, 16.0) == 0.7
    assert finish_nearness(math.nan, math.nan, 16.0) == 0.0
    assert finish_nearness(math.inf, 9.0, 16.0) == 1.0


@given(st.lists(st.sampled_from([0.0, LN_VOCAB, math.nan]) | st.floats(0.0, 11.0), max_size=40))
def test_the_drop_average_is_bounded_by_the_largest_drop(entropies: list[float]) -> None:
    average = DropAverage()
    known: list[float] = []
    for h in entropies:
        average = average.observe(h)
        known += [h] if math.isfinite(h) else []
        drops = [max(0.0, a - b) for a, b in itertools.pairwise(known)]
        if drops:
            assert -1e-12 <= average.drop_nats <= max(drops) + 1e-12
        else:
            assert math.isnan(average.per_cost(1.0))


def test_the_drop_average_by_hand_and_per_cost() -> None:
    average = DropAverage().observe(3.0).observe(2.0).observe(2.5).observe(math.nan).observe(2.0)
    assert average.drop_nats == pytest.approx(0.8 * (0.8 * 1.0) + 0.2 * 0.5)
    assert average.per_cost(2.0) == pytest.approx(average.drop_nats / 2.0)
    assert math.isnan(average.per_cost(0.0))
    assert math.isnan(average.per_cost(math.nan))


def test_fcfs_is_by_arrival_with_decode_first_and_ignores_everything_else() -> None:
    crowd = [
        candidate(3, "decode", drop_per_cost=9.0),
        candidate(1, "waiting", 99.0),
        candidate(2, "decode", entropy_nats=9.0),
        candidate(0, "waiting"),
    ]
    assert [c.arrival for c in rank(crowd, 1, 0, PriorityConfig())] == [2, 3, 0, 1]


def test_each_mode_orders_as_its_name_says() -> None:
    crowd = [
        candidate(0, drop_per_cost=1.0, entropy_nats=1.0),
        candidate(1, drop_per_cost=5.0, entropy_nats=1.0),
        candidate(2, drop_per_cost=1.0, entropy_nats=4.0),
        candidate(3, drop_per_cost=0.0, tokens_left=0.0),
    ]

    def order(mode: Mode, step: int = 0) -> list[int]:
        return [c.arrival for c in rank(crowd, 4, step, PriorityConfig(mode=mode))]

    assert order("paper") == [1, 2, 0, 3]
    assert order("entropic") == [3, 1, 0, 2]  # the finish bonus; then the steepest; equals by arrival
    assert order("entropic_inverse") == [3, 0, 2, 1]
    draws = {tuple(order("random", step)) for step in range(40)}
    assert len(draws) > 10
    assert order("random", 7) == order("random", 7)


def test_random_differs_by_seed() -> None:
    config = PriorityConfig(mode="random")
    orders = {
        tuple(c.arrival for c in rank([candidate(i, seed=seed) for i in range(5)], 5, 0, config)) for seed in range(30)
    }
    assert len(orders) > 10


@pytest.mark.parametrize("mode", STEERED)
def test_age_two_forces_inclusion(mode: Mode) -> None:
    config = PriorityConfig(mode=mode)
    fresh = [candidate(i, seconds=0.39, drop_per_cost=100.0, tokens_left=0.0) for i in range(20)]
    overdue = candidate(99, seconds=0.4, drop_per_cost=0.0)
    assert is_forced(overdue, config)
    assert rank([*fresh, overdue], 1, 0, config)[0] is overdue


@given(crowds, st.sampled_from(MODES), st.integers(0, 1000))
def test_decode_goes_before_new_prefill_unless_that_is_overdue(crowd: list[Candidate], mode: Mode, step: int) -> None:
    config = PriorityConfig(mode=mode)
    calm = [replace(c, seconds_since_service=0.1) for c in crowd]
    is_decode = [c.service_class == "decode" for c in rank(calm, 8, step, config)]
    assert is_decode == sorted(is_decode, reverse=True)


@given(st.integers(0, 64), st.integers(0, 5000), st.integers(1, 200))
def test_reserved_slots_are_a_quarter_of_any_run_of_steps_to_within_one(slots: int, first: int, length: int) -> None:
    given_out = sum(forced_slots(slots, step, PriorityConfig()) for step in range(first, first + length))
    assert abs(given_out - 0.25 * slots * length) < 1.0 + 1e-9
    assert all(forced_slots(slots, step, PriorityConfig()) <= slots for step in range(first, first + 8))


def test_the_victim_is_the_last_in_rank() -> None:
    crowd = [candidate(0), candidate(1), candidate(2, "waiting")]
    chosen = choose_victim(crowd, 2, 0, PriorityConfig())
    assert chosen is crowd[2]
    assert choose_victim([], 2, 0, PriorityConfig()) is None


# --- ageing: a small simulator, served by rank alone -----------------------------------------------------------------

Adversary = Callable[[int, float], list[Candidate]]  # (step, now) -> arrivals; their unset fields are redrawn each step


class Simulator:
    """Steps of fixed length; serves the first `slots` in rank and checks each wait against the law's bound."""

    def __init__(self, config: PriorityConfig, slots: int, rng: random.Random) -> None:
        self.config, self.slots, self.rng = config, slots, rng
        self.clients: dict[int, Client] = {}
        self.step = 0
        self.served: list[Candidate] = []
        # per client: [competitors at the deadline, its own slots since]; set once the deadline has passed
        self.after_deadline: dict[int, list[int]] = {}

    @property
    def now(self) -> float:
        return self.step * STEP_SECONDS

    def arrive(self, service_class: ServiceClass) -> None:
        arrival = len(self.served) + 10_000 * (self.step + 1) + len(self.clients)
        while arrival in self.clients:
            arrival += 1
        self.clients[arrival] = Client(Candidate(arrival, service_class, 0.0), self.now)

    def patience(self, one: Candidate) -> float:
        """From when on the bound counts: W in decode of ageing modes, else the forced age."""
        ages = self.config.mode in AGEING and one.service_class == "decode"
        return (1.0 if ages else self.config.forced_age) * self.config.wait_seconds(one.service_class)

    def run_step(self, leave_probability: float) -> None:
        # The adversary sets what the law reads anew in each step, as badly as it likes.
        crowd = [
            replace(
                client.candidate,
                seconds_since_service=self.now - client.last_service,
                drop_per_cost=self.rng.choice([0.0, 1.0, 50.0, math.inf, math.nan]),
                tokens_left=self.rng.choice([0.0, 5.0, math.inf]),
                entropy_nats=self.rng.choice([0.0, LN_VOCAB, math.nan]),
            )
            for client in self.clients.values()
        ]
        self._open_deadlines(crowd)
        reserved = forced_slots(self.slots, self.step, self.config)
        chosen = rank(crowd, self.slots, self.step, self.config)[: self.slots]
        assert len(chosen) == min(self.slots, len(crowd)), "a slot stays empty while somebody waits"
        for one in chosen:
            self.served.append(one)
            self.after_deadline.pop(one.arrival, None)
            self.clients[one.arrival].last_service = self.now
            if self.rng.random() < leave_probability:
                del self.clients[one.arrival]
        self._check_bounds(reserved)
        self.step += 1

    def _open_deadlines(self, crowd: list[Candidate]) -> None:
        num_decode = sum(c.service_class == "decode" for c in crowd)
        for one in crowd:
            if one.arrival not in self.after_deadline and one.seconds_since_service > self.patience(one) + 1e-9:
                is_decode = one.service_class == "decode"
                competitors = (num_decode if is_decode else len(crowd) - num_decode) - 1
                self.after_deadline[one.arrival] = [competitors, 0]

    def _check_bounds(self, reserved: int) -> None:
        for arrival, counts in self.after_deadline.items():
            is_decode = self.clients[arrival].candidate.service_class == "decode"
            counts[1] += self.slots - reserved if is_decode else reserved
            assert counts[1] <= counts[0], f"{counts[1]} slots went by after the deadline, {counts[0]} competitors"


@settings(max_examples=40)
@given(
    st.sampled_from(STEERED),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 1)), min_size=1, max_size=8),
    st.floats(0.0, 1.0),
    st.integers(0, 2**32),
)
def test_nobody_waits_longer_than_the_bound_whatever_arrives(
    mode: Mode, slots: int, pattern: list[tuple[int, int, int]], leave_probability: float, seed: int
) -> None:
    simulator = Simulator(PriorityConfig(mode=mode, batch_wait_seconds=2.0), slots, random.Random(seed))
    for step in range(80):
        arrivals = pattern[step % len(pattern)] if step < 15 else (0, 0, 0)
        for service_class, count in zip(CLASSES, arrivals, strict=True):
            for _ in range(count):
                simulator.arrive(service_class)
        simulator.run_step(leave_probability)


@pytest.mark.parametrize("mode", AGEING)
@pytest.mark.parametrize(("num", "slots"), [(1, 1), (7, 1), (40, 3), (33, 8)])
def test_within_a_class_nobody_waits_longer_than_w_and_one_round(mode: Mode, num: int, slots: int) -> None:
    simulator = Simulator(PriorityConfig(mode=mode), slots, random.Random(num))
    for _ in range(num):
        simulator.arrive("decode")
    longest = 0.0
    for _ in range(150):
        simulator.run_step(leave_probability=0.0)
        longest = max(longest, *(simulator.now - c.last_service for c in simulator.clients.values()))
    bound = math.ceil(0.2 / STEP_SECONDS) + math.ceil((num - 1) / slots)
    assert longest <= (bound + 1) * STEP_SECONDS + 1e-9  # + 1: `now` already stands at the next step


@pytest.mark.parametrize("mode", STEERED)
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_flood_of_new_requests_does_not_starve_running_ones(mode: Mode, slots: int) -> None:
    simulator = Simulator(PriorityConfig(mode=mode), slots, random.Random(1))
    for _ in range(slots):
        simulator.arrive("decode")
    running = set(simulator.clients)
    for _ in range(60):
        for _ in range(2 * slots):
            simulator.arrive("waiting")
        simulator.run_step(leave_probability=0.0)
    shares = [sum(c.arrival == arrival for c in simulator.served) for arrival in running]
    assert sum(shares) >= 0.75 * slots * 60 - 1
    assert min(shares) >= 5
    assert any(c.service_class == "waiting" for c in simulator.served)


@pytest.mark.parametrize("mode", STEERED)
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_flood_of_running_requests_does_not_starve_a_new_one(mode: Mode, slots: int) -> None:
    simulator = Simulator(PriorityConfig(mode=mode), slots, random.Random(2))
    simulator.arrive("waiting")
    newcomer = next(iter(simulator.clients))
    for _ in range(40):
        for _ in range(2 * slots):
            simulator.arrive("decode")
        simulator.run_step(leave_probability=0.5)
    first = next(c for c in simulator.served if c.arrival == newcomer)
    assert first.seconds_since_service <= 2.0 * 1.0 + 4 * STEP_SECONDS + 1e-9  # forced, then at most four steps


def test_without_ageing_the_paper_s_order_alone_would_starve() -> None:
    """The simulator is able to fail: with forcing out of reach one candidate waits for ever."""
    never = PriorityConfig(mode="paper", forced_age=1e9)
    crowd = [candidate(0, seconds=50.0, drop_per_cost=0.0), candidate(1, seconds=0.0, drop_per_cost=1.0)]
    assert all(rank(crowd, 1, step, never)[0].arrival == 1 for step in range(20))


@pytest.mark.parametrize(
    "fields",
    [
        {"gain_weight": 0.9},
        {"finish_weight": -0.1},
        {"decode_wait_seconds": 0.0},
        {"batch_wait_seconds": math.inf},
        {"forced_age": 0.5},
        {"forced_share": 1.0},
        {"gain_weight": math.nan},
    ],
)
def test_settings_that_break_the_bound_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        PriorityConfig(**fields)  # type: ignore[arg-type]
