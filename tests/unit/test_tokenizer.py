"""Tokenizers of the demo, the unit model and a SentencePiece-like vocabulary: exact ids, bytes and text."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from etserve.errors import ModelError, RequestError
from etserve.models.files import ModelFiles, resolve_model
from etserve.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from tests.unit.model_helpers import HAS_DEMO, UNIT_MODEL, edit_json, needs_demo

TEXTS = [
    "Hello, world! It's 2024 and we're 3.14159 apart.",
    "def f(x: int) -> str:\n\treturn f'{x ** 2}'  # ok\n\n\n",
    "naïve café — “quotes” … Straße",
    "你好,世界。日本語テスト 한국어",
    "emoji 🎉👩‍👩‍👧‍👦🇩🇪 done",
    "  leading, trailing  ",
    "",
]


@pytest.fixture(scope="module")
def unit() -> Tokenizer:
    return load_tokenizer(UNIT_MODEL)


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(resolve_model("demo"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(ModelFiles("pieces", folder=make_pieces(tmp_path_factory.mktemp("pieces"))))


def make_pieces(folder: Path) -> Path:
    """Llama 2's kind of tokenizer.json: a mark for the space, bytes as <0x..> for what no piece spells."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdehlotw"]
    merges = [("l", "l"), ("\u2581", "a"), ("h", "e")]
    tokens += ["".join(merge) for merge in merges]
    model = models.BPE(
        {t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    return folder


@needs_demo
@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_round_trips_text_and_adds_no_bos(demo: Tokenizer, text: str) -> None:
    ids = demo.encode(text)
    assert demo.decode(ids) == text
    assert ids == demo.encode(text, add_special_tokens=False)
    assert b"".join(demo.token_bytes(token_id) for token_id in ids) == text.encode()


@needs_demo
def test_the_demo_cuts_numbers_into_digits_and_knows_its_special_tokens(demo: Tokenizer) -> None:
    assert [demo.token_text(i) for i in demo.encode(" 2024")] == [" ", "2", "0", "2", "4"]
    assert demo.encode("Hello, world") == [19556, 28, 905]
    assert demo.encode("<|im_start|>user") == [1, 4093]
    assert (demo.vocab_size, demo.bos_token_id, demo.eos_token_ids) == (49_152, 1, (2,))


@needs_demo
def test_the_demos_chat_prompt_is_chatml(demo: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = demo.render_chat(messages)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert demo.apply_chat_template(messages) == demo.encode(text)
    assert demo.apply_chat_template(messages).count(1) == 3


@needs_demo
@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_has_the_ids_of_transformers_own_gguf_converter(demo: Tokenizer, text: str) -> None:
    """A byte-level vocabulary is put together here for speed; the converter is its oracle (digits never merge)."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    from etserve.tokenizer.gguf_header import read_gguf_header

    gguf = resolve_model("demo").gguf
    assert gguf is not None
    metadata = read_gguf_header(gguf).metadata
    named = {"tokens": "tokens", "merges": "merges", "token_type": "token_type"}
    described = {name: metadata[f"tokenizer.ggml.{key}"] for name, key in named.items()}
    oracle, _ = convert_gguf_tokenizer("llama", {**described, "tokenizer_type": "gpt2"})
    assert demo.encode(text) == oracle.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS)
def test_the_unit_models_ids_are_the_bytes(unit: Tokenizer, text: str) -> None:
    assert unit.encode(text) == list(text.encode())
    assert unit.decode(list(text.encode())) == text
    assert [unit.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_special_tokens_are_skipped_or_spelled_and_unknown_ids_are_nothing(unit: Tokenizer) -> None:
    ids = [256, 104, 105, 257, 319]
    assert unit.decode(ids) == "hi"
    assert unit.decode(ids, skip_special_tokens=False) == "<bos>hi<eos>"
    assert unit.token_bytes(319) == b""
    assert unit.vocab_size == 258


@pytest.mark.parametrize("text", ["hello a wet dat", "o 🎉 é", " b", "hello  all"])
def test_sentencepiece_like_ids_and_text_are_transformers(pieces: Tokenizer, text: str, tmp_path: Path) -> None:
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(make_pieces(tmp_path))
    ids = pieces.encode(text)
    assert ids == oracle.encode(text)
    assert ids[0] == pieces.bos_token_id == 1
    assert pieces.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == text


def test_a_bos_in_the_text_is_not_doubled(pieces: Tokenizer) -> None:
    assert pieces.encode("<s>") == [1]
    assert pieces.encode("a").count(1) == 1


def test_a_continuation_keeps_its_first_space(pieces: Tokenizer) -> None:
    ids = pieces.encode("a", add_special_tokens=False)
    assert (pieces.decode(ids), pieces.decode(ids, at_start=False)) == ("a", " a")


def test_a_lone_surrogate_is_the_clients_fault(unit: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate"):
        unit.encode("a\ud800")


ids_of = st.lists(st.integers(0, 319), max_size=40)
cuts_of = st.lists(st.integers(0, 40), max_size=8)


def check_stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool, at_start: bool) -> None:
    stream = IncrementalDetokenizer(tokenizer, skip, at_start=at_start)
    borders = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
    parts = [stream.push(ids[a:b]) for a, b in itertools.pairwise(borders)]
    assert "".join([*parts, stream.flush()]) == tokenizer.decode(ids, skip, at_start=at_start)


@settings(deadline=None, max_examples=200)
@given(ids_of, cuts_of, st.booleans(), st.booleans())
def test_streamed_bytes_are_the_whole_decode_for_every_split(
    ids: list[int], cuts: list[int], skip: bool, at_start: bool
) -> None:
    check_stream(SHARED["unit"], ids, cuts, skip, at_start)
    check_stream(SHARED["pieces"], [i % 300 for i in ids], cuts, skip, at_start)


@needs_demo
@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 49_151), max_size=30), cuts_of, st.booleans())
def test_the_demos_stream_is_the_whole_decode_for_every_split(ids: list[int], cuts: list[int], skip: bool) -> None:
    check_stream(SHARED["demo"], ids, cuts, skip, True)


@needs_demo
@settings(deadline=None, max_examples=100)
@given(st.text(max_size=40))
def test_text_streams_back_one_token_at_a_time_in_whole_code_points(text: str) -> None:
    tokenizer = SHARED["demo"]
    stream = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode(text)
    parts = [stream.push([token_id]) for token_id in ids]
    assert "".join([*parts, stream.flush()]) == tokenizer.decode(ids)
    if "\ufffd" not in text and tokenizer.decode(ids) == text:  # the vocabulary lacks a few of the 256 bytes
        assert all("\ufffd" not in part for part in parts)


SHARED: dict[str, Tokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def _shared(request: pytest.FixtureRequest, unit: Tokenizer, pieces: Tokenizer) -> None:
    """Hypothesis runs a test many times: it takes what is built once from here."""
    SHARED.update(unit=unit, pieces=pieces)
    if HAS_DEMO:
        SHARED["demo"] = request.getfixturevalue("demo")


def test_a_tokenizer_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    files = ModelFiles("pieces", folder=make_pieces(tmp_path))
    edit_json(tmp_path / "config.json", vocab_size=100)
    with pytest.raises(ModelError, match=r"tokenizer\.json: token id 272 is outside the model's vocabulary of 100"):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        load_tokenizer(files)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        load_tokenizer(files)


def test_a_word_piece_tokenizer_is_refused(tmp_path: Path) -> None:
    files = ModelFiles("pieces", folder=make_pieces(tmp_path))
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="neither byte-level BPE nor SentencePiece-like"):
        load_tokenizer(files)


def test_loading_and_using_a_tokenizer_never_imports_torch() -> None:
    name = "demo" if HAS_DEMO else str(UNIT_MODEL.path)
    program = (
        "import sys\n"
        "from etserve.models.files import resolve_model\n"
        "from etserve.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer(resolve_model({name!r}))\n"
        "ids = tokenizer.apply_chat_template([{'role': 'user', 'content': 'hi'}])\n"
        "assert tokenizer.decode(ids, skip_special_tokens=False).endswith(('assistant\\n', 'assistant: '))\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
