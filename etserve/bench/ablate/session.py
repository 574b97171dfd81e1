"""One call of `etserve ablate`: what was asked, progress on a terminal, and the facts that a figure needs beside it."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from etserve import __version__
from etserve.bench.ablate import workloads as presets
from etserve.bench.ablate.arms import SKETCH_BITS, check_estimator, select
from etserve.bench.ablate.lab import Lab
from etserve.bench.ablate.progress import Shown
from etserve.bench.ablate.report import write_report
from etserve.bench.ablate.run import Comparison, manifest
from etserve.bench.ablate.settings import plain
from etserve.bench.ablate.store import Store
from etserve.bench.ablate.workloads import Preset, PresetName
from etserve.bench.errors import BenchError
from etserve.bench.host import describe_machine
from etserve.config import Config


def run_session(
    settings: Config,
    console: Console,
    *,
    preset: PresetName,
    out: Path,
    arms: str | None = None,
    workloads: str | None = None,
    rounds: int | None = None,
    seed: int = 0,
) -> Path:
    """Run what is missing in `out`, write the report and return its path. Raises BenchError, ModelError."""
    check_libraries()
    check_estimator(settings.control)
    chosen, base = presets.choose(preset, workloads, rounds), plain(settings.control)
    picked = select(arms)
    lab = Lab(settings.engine)
    store = Store(out, manifest(lab, chosen, picked, base, seed))
    begin = time.monotonic()
    with Shown(console) as shown:
        comparison = Comparison(lab, chosen, picked, store, base, seed, shown.add)
        shown.begin(comparison.total_weight(), comparison.num_pieces())
        found = comparison.run()
    return write_report(found, _facts(lab, chosen, seed, time.monotonic() - begin), out)


def check_libraries() -> None:
    """Raise BenchError unless what the report needs is installed: better now than after an hour."""
    try:
        import matplotlib  # noqa: F401
        import rouge_score  # noqa: F401
        import sacrebleu  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise BenchError(f"{error.name} is missing: pip install 'etserve[bench]'") from None


def _facts(lab: Lab, preset: Preset, seed: int, seconds: float) -> dict[str, object]:
    machine = describe_machine()
    loaded = lab.loaded()
    return {
        "model": f"{lab.model_name}, {loaded.num_parameters / 1e6:.1f} M parameters, {loaded.dtype}",
        "machine": f"{machine['cpu']}, {machine['cores']} cores",
        "backend": loaded.decoder.backend,
        "etserve": f"{__version__}, commit {commit()}",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "preset": f"{preset.name}, {preset.rounds} rounds ({preset.few_rounds} of placebos), seed {seed}, "
        f"{SKETCH_BITS}-bit key sketches",
        "run": f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, {seconds / 60:.0f} min (what was there aside)",
    }


def commit() -> str:
    """Of the source tree that runs, with a mark for changes; "unknown" outside a repository."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    found = subprocess.run(
        [git, "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
