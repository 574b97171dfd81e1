"""A little of everything a server can be asked, again and again, so that every series moves."""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any

LONG = "The lighthouse keeper wrote down every ship that passed, its flag, its heading and the hour of the day. "


class Load:
    """Threads that ask until the block ends."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        jobs = (self._long_prompts, self._choices, self._streams, self._mistakes)
        self._threads = [threading.Thread(target=self._again, args=(job,), daemon=True) for job in jobs]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _again(self, job: Any) -> None:
        number = 0
        while not self._is_over.is_set():
            job(number)
            number += 1

    def _ask(self, path: str, **fields: Any) -> bytes:
        body = json.dumps(fields).encode()
        request = urllib.request.Request(self._url + path, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as reply:
            return bytes(reply.read())

    def _long_prompts(self, number: int) -> None:
        """Over 512 tokens, so that skipping may begin; the same beginning, so that the prefix cache helps."""
        prompt = LONG * 9 + str(number)
        self._ask("/v1/completions", prompt=prompt, max_tokens=48, ignore_eos=True, entropic={"trace": "summary"})

    def _choices(self, number: int) -> None:
        self._ask("/v1/completions", prompt=f"{number} ships", max_tokens=24, n=2, entropic={"trace": "summary"})

    def _streams(self, number: int) -> None:
        messages = [{"role": "user", "content": f"Count from {number}."}]
        temperature = 0.5 + 0.25 * (number % 3)
        self._ask("/v1/chat/completions", messages=messages, max_tokens=32, stream=True, temperature=temperature)

    def _mistakes(self, number: int) -> None:
        with contextlib.suppress(urllib.error.HTTPError):
            self._ask("/v1/completions", prompt=str(number), n=99)  # too many choices: 400
        self._is_over.wait(0.5)
