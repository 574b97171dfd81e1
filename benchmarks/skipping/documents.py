"""Text to measure on: parts of two novels and of Wikipedia articles, as token ids. All of it comes with the package."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Protocol


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Document:
    """A part of one text."""

    name: str
    tokens: list[int]


def cut_documents(encoder: Encoder, count: int, length: int) -> list[Document]:
    """`count` parts of `length` tokens, none overlapping: *Emma*, *Northanger Abbey* and an article in turn.

    Raises SystemExit if the texts do not yield so many.
    """
    pools = [_novel(encoder, "Emma", "emma_excerpt.txt", length)]
    pools.append(_novel(encoder, "Northanger Abbey", "quality/northanger_abbey_excerpt.txt", length))
    pools.append(_articles(encoder, length))
    found: list[Document] = []
    while pools and len(found) < count:
        pool = pools.pop(0)
        document = next(pool, None)
        if document is not None:
            found.append(document)
            pools.append(pool)
    if len(found) < count:
        raise SystemExit(f"the texts yield {len(found)} parts of {length} tokens, not {count}")
    return found


def _novel(encoder: Encoder, name: str, file: str, length: int) -> Iterator[Document]:
    tokens = encoder.encode(_one_line(_read(file)), add_special_tokens=False)
    for part, begin in enumerate(range(0, len(tokens) - length + 1, length), 1):
        yield Document(f"{name}, part {part}", tokens[begin : begin + length])


def _articles(encoder: Encoder, length: int) -> Iterator[Document]:
    """The openings of the articles that are long enough."""
    for line in _read("quality/wikipedia.jsonl").splitlines():
        article = json.loads(line)
        tokens = encoder.encode(_one_line(article["text"]), add_special_tokens=False)
        if len(tokens) >= length:
            yield Document(f"Wikipedia, {article['title']}", tokens[:length])


def _read(file: str) -> str:
    return (resources.files("etserve.bench") / "data" / file).read_text(encoding="utf-8")


def _one_line(text: str) -> str:
    """Paragraph breaks tokenize differently across tokenizers."""
    return " ".join(text.split())
