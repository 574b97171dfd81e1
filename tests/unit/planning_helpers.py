"""A scheduler over fake blocks, and a model whose next token depends on what the blocks really contain."""

import zlib
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from etserve.config import BLOCK_SIZE
from etserve.control.choice import ChoiceControl, ChoiceLaws, TokenMeasure
from etserve.control.draft import VerifyLaw
from etserve.control.eviction import EvictionConfig
from etserve.control.pruning import PruningConfig
from etserve.kv.block_pool import NULL_BLOCK
from etserve.kv.manager import KVCacheManager
from etserve.plan import ModelRunnerOutput, Sampled, ScheduledSequence, SchedulerOutput
from etserve.sampling_params import SamplingParams
from etserve.scheduler.scheduler import Scheduler
from etserve.sequence import Sequence, Status

EOS = 0
VOCAB = 50
# Guards under which short sequences skip something; the watchdog looks often, and finds damage now and then.
SKIPPING = PruningConfig(min_context_tokens=24, jump_nats=100.0, check_interval=5)


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_scheduler(
    num_blocks: int = 100, max_num_seqs: int = 8, max_step_tokens: int = 64, prefix_caching: bool = True
) -> Scheduler:
    return Scheduler(
        KVCacheManager(num_blocks, prefix_caching),
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_step_tokens,
        eos_token_ids=[EOS],
        now=FakeClock(),
    )


def make_sequence(
    seq_id: int = 1,
    num_tokens: int = 20,
    max_output: int = 4,
    *,
    token_ids: list[int] | None = None,
    forced: Collection[int] = (),
    priority: int = 0,
    salt: bytes = b"",
    params: SamplingParams | None = None,
    eviction: EvictionConfig | None = None,
    block_budget: int | None = None,
    protected: tuple[tuple[int, int], ...] = (),
    verify: VerifyLaw | None = None,
) -> Sequence:
    """Make one that arrives in the order of its id, with a prompt of its own unless told otherwise.

    One that is verified skips blocks, and nothing is evicted from it.
    """
    prompt = token_ids if token_ids is not None else [1 + (seq_id * 31 + i) % 97 for i in range(num_tokens)]
    return Sequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        choice=0,
        params=params or SamplingParams(ignore_eos=True),
        seed=seq_id,
        token_ids=[*prompt, *forced],
        num_prompt_tokens=len(prompt),
        max_output_tokens=max_output,
        arrival_seconds=float(seq_id),
        priority=priority,
        cache_salt=salt,
        num_forced_tokens=len(forced),
        control=ChoiceControl(
            ChoiceLaws(
                pruning=None if verify is None else SKIPPING,
                protected_spans=protected,
                verification=verify,
                eviction=eviction if verify is None else None,
                block_budget=block_budget,
            )
        ),
    )


def root_state(salt: bytes) -> int:
    return zlib.crc32(salt)


def next_state(state: int, token_id: int) -> int:
    """Return what a position's keys and values stand for: all tokens up to it."""
    return hash((state, token_id))


def draw(state: int) -> int:
    """Return the next token after a position: one in 17 is the end."""
    return EOS if state % 17 == 0 else 1 + state % VOCAB


def expected_output(prompt: list[int], salt: bytes, max_output: int, params: SamplingParams) -> list[int]:
    """Say what a request must give, alone, with no scheduler, no blocks and no cache: the oracle."""
    state = root_state(salt)
    for token_id in prompt:
        state = next_state(state, token_id)
    output: list[int] = []
    while len(output) < max_output:
        output.append(draw(state))
        state = next_state(state, output[-1])
        stops = (output[-1] == EOS and not params.ignore_eos) or output[-1] in params.stop_token_ids
        if stops and len(output) > params.min_tokens:
            break
    return output


State = int | tuple[str, int] | None


def clean(state: State) -> int | None:
    """What a slot stands for, spoilt or not."""
    return state[1] if isinstance(state, tuple) else state


@dataclass
class GhostModel:
    """Writes into every slot what it stands for, and reads it back through the block table before going on.

    What is computed while blocks are evicted, or with blocks skipped, is marked as spoilt: only its own sequence may
    read it, while it is not whole. A guess is as a rule what the sequence will draw.
    """

    kv: KVCacheManager
    slots: dict[int, list[State]] = field(default_factory=dict)  # block -> state of each position in it
    states: dict[int, list[int]] = field(default_factory=dict)  # seq_id -> the true state after each token

    def execute(self, plan: SchedulerOutput, failing: Collection[int] = ()) -> ModelRunnerOutput:
        for item in plan.scheduled:
            self._check_history(item)
            self._write(item)
        sampling = [item for item in plan.scheduled if item.samples]
        return ModelRunnerOutput(
            sampled={
                item.seq.seq_id: self._sample(item, item.known_end)
                for item in sampling
                if item.seq.seq_id not in failing
            },
            followers={
                item.seq.seq_id: self._follow(item)
                for item in sampling
                if item.draft and item.seq.seq_id not in failing
            },
            failed={item.seq.seq_id: "model_numerics" for item in sampling if item.seq.seq_id in failing},
            flops={item.seq.seq_id: float(item.num_tokens) for item in plan.scheduled},
            block_masses={item.seq.seq_id: self._masses(item) for item in sampling if item.seq.may_be_evicted},
            given_surprisals={
                item.seq.seq_id: dict.fromkeys(
                    range(item.start + 1, min(item.end + 1, item.seq.num_prompt_tokens)), 0.5
                )
                for item in plan.scheduled
                if item.seq.may_be_evicted
            },
        )

    def _masses(self, item: ScheduledSequence) -> NDArray[np.float32]:
        """Of each kept block, keyed by its content."""
        num_blocks = -(-item.context // BLOCK_SIZE)
        kept = [block for block in item.block_table if block != NULL_BLOCK][:num_blocks]
        return np.array([(zlib.crc32(repr(self.slots[block][0]).encode()) % 997) / 997 for block in kept], np.float32)

    def _true_states(self, seq: Sequence, num_tokens: int) -> list[int]:
        states = self.states.setdefault(seq.seq_id, [])
        for token_id in seq.token_ids[len(states) : num_tokens]:
            states.append(_state_after(states, token_id, seq))
        return states

    def _states(self, item: ScheduledSequence) -> list[int]:
        """The state after each token up to the item's end, those guessed at included."""
        known = item.seq if item.ahead_of is None else item.ahead_of
        states = self._true_states(known, known.num_tokens)[: item.end]
        for token_id in [*item.seq.token_ids[len(states) :], *item.draft][: item.end - len(states)]:
            states.append(_state_after(states, token_id, item.seq))
        return states

    def _check_history(self, item: ScheduledSequence) -> None:
        truth = self._states(item)
        assert item.end <= len(item.block_table) * BLOCK_SIZE, "the table does not cover the step"
        for begin in range(0, item.start, BLOCK_SIZE):
            end = min(begin + BLOCK_SIZE, item.start)
            block = item.block_table[begin // BLOCK_SIZE]
            if block == NULL_BLOCK and item.num_evicted_blocks:
                continue
            found = self.slots.get(block, [])[: end - begin]
            num_clean = _num_clean(item) - begin
            found = [state if place < num_clean else clean(state) for place, state in enumerate(found)]
            assert found == truth[begin:end], f"block {block} holds something else"

    def _write(self, item: ScheduledSequence) -> None:
        truth = self._states(item)
        is_spoilt = item.epsilon > 0.0 or _num_clean(item) < item.start
        for index in range(item.start // BLOCK_SIZE, (item.end - 1) // BLOCK_SIZE + 1):
            block, base = item.block_table[index], index * BLOCK_SIZE
            assert block != 0, "the null block is written"
            assert self.kv._pool.num_refs(block) == 1, f"block {block} is shared, and written"
            slots = self.slots.setdefault(block, [None] * BLOCK_SIZE)  # [BLOCK_SIZE]
            for position in range(max(item.start, base), min(item.end, base + BLOCK_SIZE)):
                slots[position - base] = ("spoilt", truth[position]) if is_spoilt else truth[position]

    def _sample(self, item: ScheduledSequence, num_tokens: int) -> Sampled:
        """Draw the token after so many; every fifth guess is wrong, and every second check of the watchdog an alarm."""
        block = item.block_table[(num_tokens - 1) // BLOCK_SIZE]
        state = clean(self.slots[block][(num_tokens - 1) % BLOCK_SIZE])
        assert state is not None
        token_id = draw(state + 1 if item.ahead_of is not None and state % 5 == 0 else state)
        divergence = float(state % 2) if item.check_epsilon > 0.0 else None
        measured = TokenMeasure(divergence_nats=divergence)
        return Sampled(token_id, (state % 1000) / 250.0, 1.0, 1.0, surprisal_nats=(state % 7) / 2.0, measured=measured)

    def _follow(self, item: ScheduledSequence) -> list[Sampled]:
        """What is drawn after each drafted token, as far as each is the one drawn before it."""
        followers: list[Sampled] = []
        latest = self._sample(item, item.known_end)
        for num_drafted, token_id in enumerate(item.draft, start=1):
            if latest.token_id != token_id:
                break
            latest = self._sample(item, item.known_end + num_drafted)
            followers.append(latest)
        return followers


def _state_after(states: list[int], token_id: int, seq: Sequence) -> int:
    return next_state(states[-1] if states else root_state(seq.cache_salt), token_id)


def _num_clean(item: ScheduledSequence) -> int:
    """So many of the entries before the item's start must be what dense attention gives."""
    if item.num_evicted_blocks:
        return 0
    if item.ahead_of is not None:
        return item.ahead_of.num_computed_tokens
    return item.start if item.seq.num_dense_tokens is None else item.seq.num_dense_tokens


def take_followers(scheduler: Scheduler, plan: SchedulerOutput, output: ModelRunnerOutput) -> list[Sequence]:
    """Hand accepted drafts over as the engine does; return the sequences that they ended."""
    ended = []
    for item in plan.scheduled:
        for follower in output.followers.get(item.seq.seq_id, ()):
            if item.seq.status is Status.FINISHED:
                break
            if scheduler.accept(item.seq, follower):
                ended.append(item.seq)
    return ended


def run_step(
    scheduler: Scheduler, model: GhostModel, failing: Collection[int] = ()
) -> tuple[SchedulerOutput, list[Sequence]]:
    plan = scheduler.schedule()
    output = model.execute(plan, failing)
    finished = scheduler.update(plan, output)
    return plan, finished + take_followers(scheduler, plan, output)


def run_until_idle(scheduler: Scheduler, model: GhostModel, max_steps: int = 10_000) -> list[SchedulerOutput]:
    """Step until nobody is left. Fails if a step plans nothing or there are more than `max_steps`."""
    plans = []
    while scheduler.has_work:
        plan, _ = run_step(scheduler, model)
        assert plan.scheduled, "work, but an empty step"
        plans.append(plan)
        assert len(plans) <= max_steps, "no end in sight"
    scheduler.kv.audit()
    assert scheduler.kv.num_active_blocks == 0
    return plans
