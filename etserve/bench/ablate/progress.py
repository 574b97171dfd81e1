"""How far a comparison is, and how long the rest will take. Knows no engine."""

import time
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Piece(NamedTuple):
    """One round of one arm, or one arm's quality."""

    what: str
    weight: float  # about how long it takes, by the other pieces
    is_fresh: bool  # run now; False: taken from the folder


class Estimate:
    """Seconds that are left, by the pace of the pieces that were run now."""

    def __init__(self, total_weight: float, now: Callable[[], float] = time.monotonic) -> None:
        self._left, self._now = total_weight, now
        self._last = now()
        self._seconds = self._weight = 0.0

    def add(self, piece: Piece) -> float | None:
        """Count a piece; None while no fresh one shows the pace."""
        at = self._now()
        if piece.is_fresh:
            self._seconds += at - self._last
            self._weight += piece.weight
        self._last = at
        self._left = max(0.0, self._left - piece.weight)
        return self._seconds / self._weight * self._left if self._weight > 0.0 else None


class Shown:
    """A bar on a terminal; a line a piece elsewhere, as in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("loading", total=None, left="")
        self._estimate: Estimate | None = None
        self._done = self._count = 0

    def __enter__(self) -> "Shown":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, total_weight: float, num_pieces: int) -> None:
        self._estimate, self._count = Estimate(total_weight), num_pieces
        self._bar.update(self._task, total=total_weight, description="running")

    def add(self, piece: Piece) -> None:
        seconds = None if self._estimate is None else self._estimate.add(piece)
        self._done += 1
        left = "" if seconds is None else f"about {seconds / 60:.0f} min left"
        self._bar.update(self._task, advance=piece.weight, description=piece.what, left=left)
        if not self._console.is_terminal:
            self._console.print(f"{self._done}/{self._count} {piece.what}{', ' if left else ''}{left}", highlight=False)
