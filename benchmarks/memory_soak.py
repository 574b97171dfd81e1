"""Does memory stay flat? Thousands of short requests against a server of its own; resident sizes and their slope.

    python benchmarks/memory_soak.py --num-requests 10000

A mix: whole and streamed, chat and completions, sampled and greedy, with logprobs, some cut by their client, some
malformed. Exit code 1 if a well-formed request fails or the engine process was replaced.

Prompts come from a pool: the tokenizers library remembers up to 10,000 words, a whole prompt being one for the unit
model, and would fill that memory (4 KiB each, then flat) for as long as every prompt is new.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "tests" / "data" / "unit_model"
START_SECONDS = 120.0
NUM_PROMPTS = 500
WORDS = "the sea was calm and a small boat went out to find what the wind had left behind".split()  # noqa: SIM905


@dataclass
class Soak:
    """Counts of one run, and resident sizes in MiB after each batch of requests: (requests, front end, engine)."""

    url: str
    front_pid: int
    rng: random.Random
    texts: list[str]
    num_failed: int = 0
    sizes: list[tuple[int, float, float]] = field(default_factory=list)

    async def run(self, num_requests: int, num_at_once: int, num_samples: int) -> None:
        engine_pid = engine_of(self.front_pid)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=num_at_once)) as session:
            for batch in range(num_samples):
                todo = iter(range(num_requests // num_samples))
                await asyncio.gather(*(self._client(session, todo) for _ in range(num_at_once)))
                done = (batch + 1) * (num_requests // num_samples)
                self.sizes.append((done, resident_mib(self.front_pid), resident_mib(engine_pid)))
                print("{:6d} requests: front end {:.1f} MiB, engine {:.1f} MiB".format(*self.sizes[-1]), flush=True)
        if engine_of(self.front_pid) != engine_pid:
            raise SystemExit("memory_soak: the engine process was replaced")

    async def _client(self, session: aiohttp.ClientSession, todo: Any) -> None:
        for _ in todo:
            await self._one(session)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        kind = self.rng.random()
        route, body = self._body()
        if kind < 0.05:
            body["temperature"] = "hot"
        async with session.post(self.url + route, json=body) as response:
            if kind < 0.05:
                self.num_failed += response.status != 400
                return
            self.num_failed += response.status != 200
            if body["stream"] and kind > 0.9:  # this client leaves after the first bytes
                await response.content.readany()
                response.close()
                return
            await response.read()

    def _body(self) -> tuple[str, dict[str, Any]]:
        text = self.rng.choice(self.texts)
        common = {
            "max_tokens": self.rng.randint(1, 12),
            "temperature": self.rng.choice([0, 0.8]),
            "stream": self.rng.random() < 0.5,
        }
        if self.rng.random() < 0.5:
            return "/v1/completions", {"prompt": text, "logprobs": self.rng.choice([None, 2]), **common}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **common}


def engine_of(front_pid: int) -> int:
    """The front end's only child."""
    (child,) = Path(f"/proc/{front_pid}/task/{front_pid}/children").read_text().split()
    return int(child)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def slope(sizes: list[tuple[int, float, float]], column: int) -> float:
    """KiB per 1,000 requests over the second half of the run: what the first half allocates once is not a leak."""
    half = sizes[len(sizes) // 2 :]
    return float(np.polyfit([row[0] for row in half], [row[column] for row in half], 1)[0]) * 1000 * 1024


async def soak(options: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "etserve", "serve", str(options.model), "--port", str(options.port)]
    command += ["--log-level", "error", "--num-kv-blocks", "512", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_SECONDS)
        rng = random.Random(options.seed)
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(3, 40))) for _ in range(NUM_PROMPTS)]
        run = Soak(f"http://127.0.0.1:{options.port}", process.pid, rng, texts)
        await run.run(options.num_requests, options.at_once, options.samples)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    front, engine = slope(run.sizes, 1), slope(run.sizes, 2)
    print(f"slope over the second half, KiB per 1,000 requests: front end {front:+.0f}, engine {engine:+.0f}")
    print(f"{run.num_failed} of {options.num_requests} not answered as they should")
    return 1 if run.num_failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--samples", type=int, default=20, help="how often sizes are read")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--port", type=int, default=18_640)
    parser.add_argument("--seed", type=int, default=1)
    return asyncio.run(soak(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
