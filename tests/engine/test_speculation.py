"""Drafts change how many tokens a step gives, and nothing that it gives: the plain engine is the oracle."""

from typing import Any

import msgspec
import pytest
import torch

from etserve.config import BLOCK_SIZE, ControlConfig
from etserve.control.draft import DraftLaw
from etserve.engine.llm_engine import LLMEngine
from etserve.engine.streams import merge
from etserve.errors import RequestError
from etserve.outputs import GenerateRequest, SequenceOutput, StepStats
from etserve.plan import Sampled
from etserve.runner.batch_builder import Draw
from etserve.runner.drafts import draw_in_order
from etserve.runner.sampler import DrawnRows
from etserve.sampling_params import EntropicParams, Grammar
from etserve.scheduler.lookup import PromptLookup
from etserve.scheduler.speculation import Speculation
from etserve.sequence import Sequence
from tests.engine.helpers import PROMPTS, load_unit, make_engine, request, run, run_steps
from tests.unit.planning_helpers import make_sequence

Outputs = dict[tuple[str, int], SequenceOutput]
NO_DRAFTS = {"num_drafted_tokens": 0, "num_accepted_tokens": 0}
EAGER = DraftLaw(max_tokens=11, row_cost=1e-9)  # drafts whatever it costs, unless entropy is beyond 5 nats
NGRAM = ControlConfig(speculation="ngram", draft_row_cost=1e-6, max_draft_tokens=7)


class Prophet:
    """Drafts what the plain engine drew, but every `flaw`-th token wrong: all lengths of agreement occur."""

    def __init__(self, plain: Outputs, flaw: int) -> None:
        self._plain = plain
        self._flaw = flaw
        self.forgotten: set[int] = set()

    def begin_step(self) -> None:
        """Guesses cost it nothing."""

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        known = self._plain[seq.request_id, seq.choice].token_ids
        first = seq.num_output_tokens
        draft = (known[first:] + [7] * max_tokens)[:max_tokens]
        return [t if (first + i) % self._flaw else (t + 1) % 250 for i, t in enumerate(draft)]

    def forget(self, seq: Sequence) -> None:
        self.forgotten.add(seq.seq_id)


def told(output: SequenceOutput) -> SequenceOutput:
    """What must not depend on drafts: all but times, costs and counts of the drafts themselves."""
    summary = output.entropy_summary
    if summary is not None:
        summary = msgspec.structs.replace(summary, tau_per_gflop=0.0, tau_per_gb=0.0, tau_per_second=0.0)
    return msgspec.structs.replace(output, timings=None, entropy_summary=summary, num_cached_tokens=0, **NO_DRAFTS)


def drafting(engine: LLMEngine, drafter: Any, law: DraftLaw = EAGER) -> LLMEngine:
    """The same engine, with `drafter` for every request."""
    engine._scheduler._speculation = Speculation(drafter, law, engine.info.eos_token_ids)
    engine._control = msgspec.structs.replace(engine._control, speculation="ngram")
    return engine


def run_counted(engine: LLMEngine, wanted: list[GenerateRequest]) -> tuple[Outputs, list[StepStats]]:
    outputs, stats = run_steps(engine, wanted)
    by_choice: dict[tuple[str, int], list[SequenceOutput]] = {}
    for output in outputs:
        by_choice.setdefault((output.request_id, output.choice), []).append(output)
    return {key: merge(parts) for key, parts in by_choice.items()}, stats


def assert_same(found: Outputs, plain: Outputs) -> None:
    assert {key: told(output) for key, output in found.items()} == {key: told(output) for key, output in plain.items()}


SCHEMA = '{"type": "object", "properties": {"a": {"enum": ["aa", "ab", "ba"]}}, "required": ["a"]}'
WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 1.2, "seed": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "logprobs": 3},
    {"temperature": 1.0, "seed": 13, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.9, "seed": 14, "n": 3},
    {"temperature": 0.7, "seed": 15, "stop": (" the", "ing"), "min_tokens": 4},
    {"temperature": 0.9, "seed": 16, "stop_token_ids": (101, 32), "min_tokens": 9},
    {"temperature": 1.0, "seed": 17, "logit_bias": {101: 2.0, 97: -5.0}, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 18, "grammar": Grammar(kind="json_schema", schema=SCHEMA), "max_tokens": 40},
    {"seed": 19, "grammar": Grammar(kind="json_object"), "max_tokens": 12},
    {"max_tokens": 1},
    {"max_tokens": 2, "temperature": 0.5, "seed": 20},
    {"temperature": 1.0, "seed": 21, "ignore_eos": True, "max_tokens": 50},
    *(
        {"temperature": 1.0, "seed": 22, "entropic": EntropicParams(temperature_mode=mode, target_entropy_nats=1.5)}
        for mode in ("cool", "two_sided", "edt", "mirostat")
    ),
]


def mixed_requests() -> list[GenerateRequest]:
    return [
        request(f"{index}", PROMPTS[index % len(PROMPTS)], **{"max_tokens": 30, "trace": "tokens", **wishes})
        for index, wishes in enumerate(WISHES)
    ]


@pytest.fixture(scope="module")
def plain() -> Outputs:
    return run(make_engine(), mixed_requests())


VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 16},
    {"prefix_caching": False},
    {"max_num_seqs": 3},
    {"num_kv_blocks": 20, "max_model_len": 320},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("flaw", [1, 2, 5, 1000])
def test_whatever_is_drafted_every_measured_bit_is_the_plain_engine_s(
    changes: dict[str, Any], flaw: int, plain: Outputs
) -> None:
    prophet = Prophet(plain, flaw)
    found, stats = run_counted(drafting(make_engine(**changes), prophet), mixed_requests())
    assert_same(found, plain)
    assert len(prophet.forgotten) == len(plain)
    drawn = sum(len(one.entropies) for one in stats)
    assert drawn == sum(output.num_output_tokens for output in found.values())
    drafted, accepted = sum(one.num_drafted_tokens for one in stats), sum(one.num_accepted_tokens for one in stats)
    assert drafted == sum(output.num_drafted_tokens for output in found.values())
    assert accepted == sum(output.num_accepted_tokens for output in found.values())  # none behind a stop string
    assert (accepted > 0) == (flaw > 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_on_each_backend_greedy_drafts_give_the_same_tokens(dtype: str, backend: str) -> None:
    if backend == "torch" and dtype == "bfloat16":
        pytest.skip("torch's products of one row and of many differ in their last bits")
    loaded = load_unit(backend, dtype)
    wanted = [request(f"{i}", prompt, max_tokens=60, trace="tokens") for i, prompt in enumerate(PROMPTS)]
    plain = run(make_engine(loaded), wanted)
    found, _ = run_counted(drafting(make_engine(loaded), Prophet(plain, 6)), wanted)
    assert {key: output.token_ids for key, output in found.items()} == {k: o.token_ids for k, o in plain.items()}
    if backend == "native":
        assert_same(found, plain)


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    wanted = [request("a", PROMPTS[0], max_tokens=61, ignore_eos=True)]
    plain, stats = run_counted(make_engine(), wanted)
    right, fewer = run_counted(drafting(make_engine(), Prophet(plain, 1000)), wanted)
    wrong, same = run_counted(drafting(make_engine(), Prophet(plain, 1)), wanted)
    assert_same(right, plain)
    assert_same(wrong, plain)
    assert len(stats) == 61
    assert len(same) == 61
    assert len(fewer) == 1 + 5  # the prompt's step draws one; then 12 a step


def test_a_tight_pool_preempts_with_drafts_as_without_and_changes_nothing() -> None:
    wanted = [
        request(f"{i}", f"{i} was ", max_tokens=70, temperature=0.5 * (i % 2), seed=i, trace="tokens") for i in range(5)
    ]
    plain = run(make_engine(), wanted)
    for flaw in (3, 1000):
        engine = drafting(make_engine(num_kv_blocks=9, max_model_len=96), Prophet(plain, flaw))
        found, stats = run_counted(engine, wanted)
        assert_same(found, plain)
        assert sum(step.num_preempted for step in stats) > 0


def test_a_sequence_that_is_preempted_leaves_no_index_behind() -> None:
    wanted = [request(f"{i}", f"{i} was ", max_tokens=70, ignore_eos=True) for i in range(5)]
    lookup = PromptLookup()
    engine = drafting(make_engine(num_kv_blocks=9, max_model_len=96), lookup)
    scheduler = engine._scheduler
    for item in wanted:
        engine.add_request(item)
    preempted: set[int] = set()
    indexed: set[int] = set()
    while engine.has_work:
        engine.step()
        assert set(lookup._indices) <= {seq.seq_id for seq in scheduler._running}
        preempted |= {seq.seq_id for seq in scheduler._waiting if seq.num_preemptions} & indexed
        indexed |= set(lookup._indices)
    assert preempted


def test_blocks_of_rejected_drafts_are_given_back_and_never_found_as_a_prefix() -> None:
    wanted = request("a", PROMPTS[0], max_tokens=40, ignore_eos=True)
    plain = run(make_engine(), [wanted])
    engine = drafting(make_engine(), Prophet(plain, 4))
    engine.add_request(wanted)
    kv = engine._scheduler.kv
    (seq,) = engine._requests["a"]
    while engine.has_work:
        engine.step()
        kv.audit()
        if engine.has_work:
            assert len(kv.block_table(seq)) == -(-seq.num_computed_tokens // BLOCK_SIZE)
            keys = kv._holdings[seq.seq_id].chain.keys
            assert len(keys) <= seq.num_computed_tokens // BLOCK_SIZE
    again = run(engine, [wanted])
    assert_same(again, plain)
    assert again["a", 0].num_cached_tokens > 0


def test_an_abort_between_steps_leaves_nothing_behind() -> None:
    wanted = request("a", PROMPTS[0], max_tokens=60, temperature=0.7, seed=2, n=2)
    plain = run(make_engine(), [wanted])
    engine = drafting(make_engine(), Prophet(plain, 4))
    engine.add_request(wanted)
    told_ids: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(3):
        for output in engine.step()[0]:
            told_ids[output.choice] += output.token_ids
    engine.abort("a")
    endings, _ = run_steps(engine, [])
    assert sorted((output.choice, output.finish_reason) for output in endings) == [(0, "abort"), (1, "abort")]
    for choice, tokens in told_ids.items():
        assert tokens == plain["a", choice].token_ids[: len(tokens)]
        assert endings[choice].num_output_tokens == len(tokens)


def test_a_stream_that_is_taken_up_again_goes_on_the_same_with_drafts() -> None:
    wanted = request("a", PROMPTS[1], temperature=0.9, seed=4, n=2, max_tokens=40, trace="tokens")
    plain = run(make_engine(), [wanted])
    forced = [plain["a", 0].token_ids[:9], plain["a", 1].token_ids[:2]]
    engine = drafting(make_engine(max_step_tokens=16), Prophet(plain, 5))
    resumed = run(engine, [msgspec.structs.replace(wanted, forced_output=forced)])
    for choice, known in enumerate(forced):
        assert known + resumed["a", choice].token_ids == plain["a", choice].token_ids
        assert resumed["a", choice].entropies == plain["a", choice].entropies[len(known) :]


def test_prompt_lookup_saves_steps_on_text_that_repeats_and_changes_nothing() -> None:
    prompt = "the cat sat on the mat. " * 6
    wanted = [
        request("greedy", prompt, max_tokens=60, trace="tokens", ignore_eos=True),
        request("seeded", prompt, max_tokens=60, trace="tokens", temperature=0.6, seed=3, ignore_eos=True),
        request("plain", prompt, max_tokens=60, ignore_eos=True, entropic=EntropicParams(speculation="off")),
    ]
    plain, steps = run_counted(make_engine(), wanted)
    found, _ = run_counted(make_engine(control=NGRAM), wanted)
    assert_same(found, plain)
    alone, fewer = run_counted(make_engine(control=NGRAM), wanted[:1])
    assert_same(alone, {key: plain[key] for key in alone})
    assert len(fewer) < 0.8 * len(steps)
    undrafted, as_many = run_counted(make_engine(control=NGRAM), wanted[2:])
    assert_same(undrafted, {key: plain[key] for key in undrafted})
    assert len(as_many) == 60  # one a token, the first with the prompt's own step


def test_where_blocks_may_be_skipped_nothing_is_drafted_and_the_output_is_the_same() -> None:
    text = (" ".join(PROMPTS[:4]) + " ") * 4
    pruned = ControlConfig(pruning="on", epsilon=0.3)
    wanted = [
        request("long", text[:900], max_tokens=40, temperature=0.7, seed=3, trace="tokens", ignore_eos=True),
        request("edge", text[:500], max_tokens=60, temperature=0.7, seed=4, trace="tokens", ignore_eos=True),
    ]
    loaded = load_unit("auto", "float32", 2)
    options: dict[str, Any] = {"pruning_sketch_bits": 2, "control": pruned, "max_model_len": 1600}
    plain = run(make_engine(loaded, **options), wanted)
    found, stats = run_counted(drafting(make_engine(loaded, **options), Prophet(plain, 1000)), wanted)
    assert_same(found, plain)
    assert min(entry.kept_fraction for entry in found["long", 0].entropies) < 1.0
    assert len(stats) < 60  # below 512 tokens of context the second one drafts


def test_a_request_can_refuse_guesses_but_not_ask_for_them_where_there_are_none() -> None:
    with pytest.raises(RequestError) as caught:
        make_engine().add_request(request("a", "a", entropic=EntropicParams(speculation="on")))
    assert caught.value.param == "entropic.speculation"


def test_with_speculation_off_the_scheduler_has_no_drafter() -> None:
    engine = make_engine()
    assert engine._scheduler._speculation is None
    engine.add_request(request("a", PROMPTS[0]))
    (seq,) = engine._requests["a"]
    assert not seq.drafts_ahead
    engine.abort("a")
    run_steps(engine, [])


class CountedTokens(list[int]):
    """Counts its copies."""

    num_copies = 0

    def copy(self) -> "CountedTokens":
        CountedTokens.num_copies += 1
        return CountedTokens(self)


class NineSampler:
    """Draws the token 9."""

    def draw(self, seqs: list[Sequence], logits: torch.Tensor) -> DrawnRows:
        return DrawnRows({seq.seq_id: Sampled(9, 1.0, 1.0, 1.0) for seq in seqs})

    def is_complete(self, seq: Sequence) -> bool:
        return False


DRAFTS = [((4, 9), 0, 0), ((9, 4), 1, 1), ((9, 9), 2, 1)]


@pytest.mark.parametrize(("draft", "num_accepted", "num_copies"), DRAFTS)
def test_tokens_are_copied_once_and_only_for_a_draft_that_is_accepted(
    draft: tuple[int, ...], num_accepted: int, num_copies: int
) -> None:
    seq = make_sequence(token_ids=[1, 2, 3])
    seq.token_ids = CountedTokens(seq.token_ids)
    CountedTokens.num_copies = 0
    sampler: Any = NineSampler()
    _, followers = draw_in_order(sampler, [Draw(seq, 0, draft)], torch.zeros(3, 16))
    assert len(followers.get(seq.seq_id, ())) == num_accepted
    assert CountedTokens.num_copies == num_copies
    assert seq.token_ids == [1, 2, 3]
