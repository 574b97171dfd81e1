"""A tokenizer out of GGUF metadata. Byte-level BPE is put together here from the tokenizers library's parts, which
takes a fraction of a second; SentencePiece vocabularies go through transformers' converter. Both are compared in tests.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from etserve.errors import ModelError
from etserve.tokenizer.bytes import byte_alphabet
from etserve.tokenizer.gguf_header import GgufHeader

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# Texts of control tokens that end a turn, whatever the file's eos id says (as llama.cpp has them).
END_TOKENS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "</s>")
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {  # tokenizer.ggml.pre -> how text is cut before merging
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _GPT2,  # after its digits, see _pre_tokenizer
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def build_gguf_tokenizer(header: GgufHeader) -> tokenizers.Tokenizer:
    """Encoder and decoder, special tokens included, without what is put around a text.

    Raises ModelError for a vocabulary that is missing, broken or of an unknown kind.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    tokens = _list(header, "tokenizer.ggml.tokens", str)
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"{header.path}: tokenizer.ggml.tokens has duplicates")
    if kind == "gpt2":
        return _byte_level(header, tokens)
    if kind == "llama":
        return _sentencepiece(header, tokens)
    raise ModelError(f"{header.path}: tokenizer.ggml.model {kind!r} is not supported (gpt2 and llama are)")


def gguf_special_tokens(header: GgufHeader) -> tuple[dict[str, str], bool, bool]:
    """Special tokens by transformers' names, and whether encoding adds BOS and EOS."""
    metadata = header.metadata
    tokens = _list(header, "tokenizer.ggml.tokens", str)
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ModelError(f"{header.path}: tokenizer.ggml.{key}_token_id {token_id!r} is no token")
        special[f"{name}_token"] = tokens[token_id]
    adds_by_default = metadata.get("tokenizer.ggml.model") == "llama" or _SPLITS.get(_pre(header)) is _LLAMA3
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_by_default)
    return special, bool(add_bos), bool(metadata.get("tokenizer.ggml.add_eos_token", False))


def gguf_end_token_ids(header: GgufHeader) -> tuple[int, ...]:
    """Ids that end generation: the file's eos and eot, and control tokens that are known to end a turn."""
    tokens = _list(header, "tokenizer.ggml.tokens", str)
    named = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = [i for i, (token, kind) in enumerate(zip(tokens, _types(header, tokens), strict=True))
             if kind == CONTROL and token in END_TOKENS]  # fmt: skip
    ids = {i for i in named if isinstance(i, int)} | set(known)
    return tuple(sorted(i for i in ids if 0 <= i < len(tokens)))


def _byte_level(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in _list(header, "tokenizer.ggml.merges", str)]
    if any(len(merge) != 2 for merge in merges):
        raise ModelError(f"{header.path}: tokenizer.ggml.merges has an entry that is not a pair")
    try:
        model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{header.path}: tokenizer.ggml.merges: {' '.join(str(error).split())[:200]}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(header)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, header, tokens)
    return tokenizer


def _pre(header: GgufHeader) -> str:
    return str(header.metadata.get("tokenizer.ggml.pre", "default"))


def _pre_tokenizer(header: GgufHeader) -> pre_tokenizers.PreTokenizer:
    pre = _pre(header)
    split = _SPLITS.get(pre)
    if split is None:
        raise ModelError(
            f"{header.path}: tokenizer.ggml.pre {pre!r} is not supported ({', '.join(sorted(_SPLITS))} are)"
        )
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> tokenizers.Tokenizer:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    described: dict[str, Any] = {
        "tokenizer_type": "llama",
        "tokens": tokens,
        "scores": _list(header, "tokenizer.ggml.scores", float),
        "token_type": _types(header, tokens),
    }
    if "tokenizer.ggml.merges" in header.metadata:
        described["merges"] = _list(header, "tokenizer.ggml.merges", str)
    try:
        converted: tokenizers.Tokenizer = convert_gguf_tokenizer("llama", described)[0]
    except Exception as error:  # another library's code on a file's data
        raise ModelError(f"{header.path}: the SentencePiece vocabulary cannot be converted: {error}") from None
    return converted


def _add_special_tokens(tokenizer: tokenizers.Tokenizer, header: GgufHeader, tokens: list[str]) -> None:
    alphabet = set(byte_alphabet())
    for token, kind in zip(tokens, _types(header, tokens), strict=True):
        # A control token outside the byte alphabet is a converter's mistake here; transformers skips it too.
        if kind == CONTROL and set(token) <= alphabet:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _types(header: GgufHeader, tokens: list[str]) -> list[int]:
    if "tokenizer.ggml.token_type" not in header.metadata:
        return [1] * len(tokens)
    types = _list(header, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelError(f"{header.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return types


def _list(header: GgufHeader, key: str, kind: type) -> list[Any]:
    values = header.metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise ModelError(f"{header.path}: metadata {key} is missing or not a list of {kind.__name__}")
    return values
