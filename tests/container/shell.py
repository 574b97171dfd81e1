"""Commands and checks of the container test."""

import subprocess


def run(*command: str) -> None:
    """Run a command in the open; CalledProcessError if it fails."""
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True)


def capture(*command: str) -> str:
    """What a command prints, stripped; CalledProcessError if it fails."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def expect(holds: bool, what: str) -> None:
    """Print a check that holds, end the run at one that does not."""
    print(("ok    " if holds else "FAIL  ") + what, flush=True)
    if not holds:
        raise SystemExit(1)
