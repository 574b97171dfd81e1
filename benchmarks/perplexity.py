"""Perplexity of each weight format beside llama.cpp's llama-perplexity: the same file, the same text, the same windows.

    ETSERVE_PEER_LLAMA_PERPLEXITY=.../llama-perplexity python benchmarks/perplexity.py --models build/demo

As llama-perplexity counts: windows of --context tokens, not overlapping; of each, the second half is scored.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from export_demo import FORMATS
from peer_servers import HERE, exported

from etserve.bench.prompts import shipped_corpus
from etserve.llm import LLM
from etserve.models.files import resolve_model
from etserve.sampling_params import SamplingParams

VARIABLE = "ETSERVE_PEER_LLAMA_PERPLEXITY"
AS_SHIPPED = "demo"  # the demo model's own file: Q4_1, the embedding Q8_0


def ours(model: Path, windows: list[list[int]], threads: int) -> float:
    """exp of the mean negative log-probability of each window's second half, given all that stands before it."""
    llm = LLM(str(model), threads=threads, max_model_len=len(windows[0]), num_kv_blocks=256, prefix_caching=False)
    total, count = 0.0, 0
    for window in windows:
        (found,) = llm.generate([window], SamplingParams(max_tokens=0, prompt_logprobs=0))
        scores = next(each.prompt_logprobs for each in found.choices if each.prompt_logprobs is not None)
        scored = [entry.logprob for entry in scores[len(window) // 2 + 1 :] if entry is not None]
        total, count = total + sum(scored), count + len(scored)
    return math.exp(-total / count)


def theirs(binary: str, model: Path, text: str, context: int, num_windows: int, threads: int) -> float:
    """What llama-perplexity says. Raises CalledProcessError, or ValueError if it says nothing."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = [binary, "-m", str(model), "-f", file.name, "-c", str(context), "-t", str(threads)]
        done = subprocess.run([*command, "--chunks", str(num_windows)], check=True, capture_output=True, text=True)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise ValueError("llama-perplexity gave no final estimate")
    return float(found.group(1))


def cut(model: Path, text: str, context: int, num_windows: int) -> list[list[int]]:
    """The text's first windows, as token ids; all formats share the vocabulary."""
    ids = LLM(str(model), num_kv_blocks=16, max_model_len=64).tokenizer.encode(text)
    return [ids[at : at + context] for at in range(0, len(ids) - context + 1, context)][:num_windows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--formats", default=",".join([*FORMATS, AS_SHIPPED]))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", type=Path, default=HERE.parent / "build" / "demo")
    options = parser.parse_args()
    binary = os.environ.get(VARIABLE)
    if binary is None or not Path(binary).exists():
        print(f"{VARIABLE} does not name llama.cpp's llama-perplexity", file=sys.stderr)
        return 2
    text = shipped_corpus()
    print("| file | llama.cpp | etserve | difference, % |\n| --- | ---: | ---: | ---: |", flush=True)
    windows: list[list[int]] = []
    for name in options.formats.split(","):
        model = resolve_model("demo").path if name == AS_SHIPPED else exported(options.models, name)
        windows = windows or cut(model, text, options.context, options.windows)
        reference = theirs(binary, model, text, options.context, len(windows), options.threads)
        measured = ours(model, windows, options.threads)
        print(f"| {name} | {reference:.4f} | {measured:.4f} | {(measured / reference - 1) * 100:+.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
