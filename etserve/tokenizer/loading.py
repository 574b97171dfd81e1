"""Tokenizers from a Hugging Face folder (tokenizer.json) or from a GGUF file's metadata."""

import json
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken, processors

from etserve.errors import ModelError
from etserve.tokenizer.bytes import Spelling, spelling_of
from etserve.tokenizer.chat import ChatTemplate
from etserve.tokenizer.gguf_header import read_gguf_header
from etserve.tokenizer.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens
from etserve.tokenizer.tokenizer import Tokenizer

MAX_JSON_BYTES = 256 * 1024 * 1024
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerFiles(Protocol):
    """etserve.models.files.ModelFiles, as far as a tokenizer cares."""

    @property
    def folder(self) -> Path | None: ...

    @property
    def gguf(self) -> Path | None: ...


def load_tokenizer(files: TokenizerFiles, check_chat_template: bool = False) -> Tokenizer:
    """Build the tokenizer; the chat template is compiled (and transformers imported) on first use, or now if asked to.

    Raises ModelError naming the file.
    """
    if files.gguf is not None:
        tokenizer, template = _from_gguf(files.gguf)
    elif files.folder is not None:
        tokenizer, template = _from_folder(files.folder)
    else:
        raise ValueError("a model is a folder or a .gguf file")
    if check_chat_template and template is not None:
        template.check()
    return tokenizer


def _from_folder(folder: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: missing (tokenizers without it, as tokenizer.model alone, are not supported)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path}: {_one_line(error)}") from None
    config = _read_object(folder / "tokenizer_config.json", required=False)
    special = {name: text for name in SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    template = _folder_template(folder, config, special)
    _mark_special(backend, special)
    vocab_size = _read_object(folder / "config.json", required=True).get("vocab_size")
    return _finish(backend, special, template, path, vocab_size), template


def _from_gguf(path: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    header = read_gguf_header(path)
    backend = build_gguf_tokenizer(header)
    special, add_bos, add_eos = gguf_special_tokens(header)
    _set_special_ends(backend, special, add_bos, add_eos)
    source = header.metadata.get("tokenizer.chat_template")
    template = ChatTemplate(source, special, str(path)) if isinstance(source, str) else None
    embedding = header.tensors.get("token_embd.weight")
    return _finish(backend, special, template, path, embedding.shape[0] if embedding else None), template


def _finish(
    backend: tokenizers.Tokenizer, special: dict[str, str], template: ChatTemplate | None, path: Path, num_rows: object
) -> Tokenizer:
    bos = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    tokenizer = Tokenizer(
        backend,
        _spelling(backend, path),
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        chat_template=template,
    )
    if isinstance(num_rows, int) and tokenizer.vocab_size > num_rows:
        raise ModelError(
            f"{path}: token id {tokenizer.vocab_size - 1} is outside the model's vocabulary of {num_rows} "
            f"(embedding rows)"
        )
    return tokenizer


def _mark_special(backend: tokenizers.Tokenizer, special: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json calls special are so in transformers too."""
    known = backend.get_added_tokens_decoder()
    for text in special.values():
        token_id = backend.token_to_id(text)
        if token_id is not None and token_id not in known:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _spelling(backend: tokenizers.Tokenizer, path: Path) -> Spelling:
    spelling = spelling_of(backend.decoder)
    if spelling is None:
        raise ModelError(f"{path}: the tokenizer is neither byte-level BPE nor SentencePiece-like")
    return spelling


def _set_special_ends(backend: tokenizers.Tokenizer, special: dict[str, str], add_bos: bool, add_eos: bool) -> None:
    """What encoding puts around a text. (A tokenizer.json says so itself, and transformers then ignores the flags.)"""
    before = [special["bos_token"]] if add_bos and "bos_token" in special else []
    after = [special["eos_token"]] if add_eos and "eos_token" in special else []
    tokens = [(token, backend.token_to_id(token)) for token in {*before, *after}]
    if any(token_id is None for _, token_id in tokens):
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, "$B"], special_tokens=tokens
    )


def _folder_template(folder: Path, config: dict[str, Any], special: dict[str, str]) -> ChatTemplate | None:
    """chat_template.jinja goes before chat_template.json, and that before tokenizer_config.json, as in transformers."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return ChatTemplate(_read_text(jinja), special, str(jinja))
    separate = folder / "chat_template.json"
    origin, holder = (
        (separate, _read_object(separate, required=True))
        if separate.is_file()
        else (folder / "tokenizer_config.json", config)
    )
    source = holder.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelError(f"{origin}: chat_template is not a text")
    return ChatTemplate(source, special, str(origin))


def _read_object(path: Path, required: bool) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not UTF-8") from None


def _token_text(value: object) -> str | None:
    """A special token is spelled as text or as an AddedToken object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
