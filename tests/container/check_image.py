"""Build the cpu image and run it as an operator would: `make container-test` (Debian: buildah podman runc mmdebstrap).

No Docker engine and no image registry is needed: mmdebstrap makes the base image, buildah builds, podman runs. A folder
of wheels that PIP_FIND_LINKS names is handed to the build. Standard library only; exit code 0 when every check holds.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.container import running, targets
from tests.container.shell import capture, expect, run

ROOT = Path(__file__).parents[2]
BASE, IMAGE = "localhost/etserve-base:bookworm", "localhost/etserve:cpu"
TOOLS = ("buildah", "podman", "runc", "mmdebstrap")
BASE_PACKAGES = "python3,python3-venv,ca-certificates,tini"
CERTIFICATES = "/etc/ssl/certs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="A .gguf file to serve. Default: the demo model.")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--keep", action="store_true", help="Do not build: take the image of the last run.")
    parser.add_argument(
        "--targets", default="cpu", help=f"Comma separated: cpu, {', '.join(targets.CHECKS)}. Default: cpu."
    )
    options = parser.parse_args()
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        print(f"container-test: {', '.join(missing)} not found; apt-get install {' '.join(TOOLS)}", file=sys.stderr)
        return 2
    wanted = options.targets.split(",")
    if unknown := sorted({*wanted} - {"cpu", *targets.CHECKS}):
        parser.error(f"no such target: {', '.join(unknown)}")
    began = time.monotonic()
    if not options.keep:
        ensure_base()
    if "cpu" in wanted:
        check_cpu(options.model or demo_model(), options.port, is_built=options.keep)
    for name in wanted:
        if name in targets.CHECKS:
            targets.CHECKS[name](build)
    print(f"container-test: every check holds ({time.monotonic() - began:.0f} s)")
    return 0


def check_cpu(model: Path, port: int, *, is_built: bool) -> None:
    """The server's image, from the build to the drain."""
    if not is_built:
        build("cpu", IMAGE)
    check_metadata()
    running.check(IMAGE, model, port)


def ensure_base() -> None:
    """Debian bookworm with Python, as the image that the Dockerfile's BASE stands for here."""
    if subprocess.run(["buildah", "inspect", BASE], capture_output=True, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base.tar"
        run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(tree))
        (Path(folder) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n", encoding="utf-8")
        run("buildah", "bud", "--format", "docker", "--isolation", "chroot", "-t", BASE, folder)


def build(target: str, tag: str, *further: str) -> None:
    """`--format docker`: OCI's own format has no HEALTHCHECK. `--layers`: a second build takes what has not changed."""
    options = ["--format", "docker", "--isolation", "chroot", "--network", "host", "--layers", "--target", target]
    options += ["-v", f"{CERTIFICATES}:{CERTIFICATES}:ro", "--build-arg", f"BASE={BASE}"]
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if Path(wheels).is_dir() and wheels:
        options += ["-v", f"{wheels}:{wheels}:ro", "--build-arg", f"PIP_FIND_LINKS={wheels}"]
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    options += ["--build-arg", f"REVISION={revision.stdout.strip() or 'unknown'}"]
    run("buildah", "bud", *options, *further, "-t", tag, "-f", str(ROOT / "docker" / "Dockerfile"), str(ROOT))


def check_metadata() -> None:
    """What the image says of itself."""
    form = "{{.Config.User}}|{{.Config.StopSignal}}|{{.Config.Healthcheck.Test}}|{{json .Config.Labels}}"
    said = capture("podman", "image", "inspect", "--format", form, IMAGE)
    user, signal, health, labels = said.split("|", 3)
    expect(user == "10001:10001", f"runs as 10001:10001 (says {user})")
    expect(signal in ("SIGTERM", "15"), f"stops by SIGTERM (says {signal})")
    expect("etserve healthcheck" in health, f"has a health check (says {health})")
    expect('"org.opencontainers.image.licenses":"Apache-2.0"' in labels, "carries OCI labels")


def demo_model() -> Path:
    """The demo model's file in the environment that runs this script."""
    from etserve.models.files import resolve_model

    return resolve_model("demo").path


if __name__ == "__main__":
    sys.exit(main())
