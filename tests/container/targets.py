"""The other targets of the Dockerfile: built, and asked the one thing that each is there for."""

import json
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.container.running import HARDENED, PODMAN
from tests.container.shell import capture, expect

Build = Callable[..., None]  # target, tag, further options of `buildah bud`
IN_THE_IMAGE = (
    "tests/unit/test_scheduler.py",
    "tests/kernels/test_row_pass.py",
)  # a taste of the suite: plan and kernels
SUITE = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *IN_THE_IMAGE)
CUDA_LIBRARY = "/app/lib/python3*/site-packages/etserve/libetserve_cuda.so"
GPUS = {80, 90, 100, 120}  # compute capabilities, times ten
FATBIN_MAGIC, MACHINE_CODE = b"\x50\xed\x55\xba", 2


def check_test(build: Build) -> None:
    """The suite runs in its image, against the installed package."""
    build("test", "localhost/etserve:test")
    command = [*PODMAN, "run", "--rm", *HARDENED, "localhost/etserve:test", *SUITE]
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    passed = re.search(r"\b(\d+) passed", done.stdout)
    expect(
        done.returncode == 0 and passed is not None,
        f"the test image runs its tests (exit code {done.returncode}, {passed[1] if passed else 0} passed)",
    )


def check_sbom(build: Build) -> None:
    """The list of components is CycloneDX and knows what the image is made of."""
    with tempfile.TemporaryDirectory() as folder:
        build("sbom", "localhost/etserve:sbom", "--output", f"type=local,dest={folder}")
        listed = json.loads((Path(folder) / "sbom.json").read_text(encoding="utf-8"))
    components = [listed["metadata"]["component"], *listed["components"]]  # what pyproject.toml describes is the root
    names = {component["name"] for component in components}
    expect(listed["bomFormat"] == "CycloneDX", "the list of components is CycloneDX")
    expect(
        {"torch", "transformers", "etserve"} <= names, f"it names torch, transformers and etserve ({len(names)} in all)"
    )


def check_cuda(build: Build) -> None:
    """The CUDA kernels are in the image, for every GPU that they are made for; it starts without one."""
    build("cuda", "localhost/etserve:cuda")
    inside = (*PODMAN, "run", "--rm", *HARDENED, "--entrypoint", "sh", "localhost/etserve:cuda", "-c")
    expect("etserve" in capture(*inside, "etserve version"), "the cuda image starts without a GPU")
    library = subprocess.run([*inside, f"cat {CUDA_LIBRARY}"], check=True, capture_output=True).stdout
    found = machine_codes(library)
    expect(found == GPUS, f"its kernels are built for {sorted(GPUS)} (are for {sorted(found)})")


def machine_codes(library: bytes) -> set[int]:
    """For which compute capabilities a library holds machine code: the entries of its fat binaries (fatbinary.h)."""
    found = set()
    begin = library.find(FATBIN_MAGIC)
    while begin >= 0:
        header_bytes, entries_bytes = struct.unpack_from("<HQ", library, begin + 6)
        at = begin + header_bytes
        while at < begin + header_bytes + entries_bytes:
            kind, _, entry_header_bytes, entry_bytes = struct.unpack_from("<HHIQ", library, at)
            if kind == MACHINE_CODE:
                found.add(struct.unpack_from("<I", library, at + 28)[0])
            at += entry_header_bytes + entry_bytes
        begin = library.find(FATBIN_MAGIC, begin + len(FATBIN_MAGIC))
    return found


CHECKS: dict[str, Callable[[Build], None]] = {"test": check_test, "sbom": check_sbom, "cuda": check_cuda}
