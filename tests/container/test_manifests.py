"""What is shipped for containers and clusters: well-formed, hardened, and true to the server's own settings."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from etserve.config import load_config

ROOT = Path(__file__).parents[2]
K8S = ROOT / "configs" / "k8s"
MANIFESTS = ("deployment", "service", "pdb", "hpa", "networkpolicy")
DOCKERFILE = ROOT / "docker" / "Dockerfile"
SCRIPTS = Path(sys.executable).parent


def tool(name: str) -> str:
    """A command of this environment or of the system; skips the test where it is not installed."""
    found = shutil.which(name, path=str(SCRIPTS)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def manifest(name: str) -> Any:
    return yaml.safe_load((K8S / f"{name}.yaml").read_text(encoding="utf-8"))


def compose() -> Any:
    done = run(tool("podman-compose"), "-f", "docker/compose.yaml", "--profile", "router", "--profile", "gpu", "config")
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def container_of(deployment: Any) -> Any:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def environment_of(container: Any) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


def test_the_dockerfile_lints_clean() -> None:
    done = run(tool("hadolint"), str(DOCKERFILE))
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_has_its_targets_and_ends_unprivileged() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    assert {"cpu", "cuda", "test", "sbom"} <= {name for _, name in stages}
    parents = {name: parent for parent, name in stages}
    assert parents["cpu"] == parents["cuda"] == "runtime"
    for stage in ("runtime", "test"):
        body = text.split(f" AS {stage}\n")[1].split("\nFROM ")[0]
        assert re.findall(r"^USER (\S+)$", body, re.MULTILINE)[-1] == "10001:10001"


def test_what_the_image_is_built_from_is_named_and_exists() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [name for name in kept if not (ROOT / name).exists()] == []
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    sources = {source.split("/")[0] for line in copied for source in line.split()} - {"."}
    assert sources <= set(kept)


def test_the_layer_that_compiles_the_kernels_does_not_see_the_readme() -> None:
    stages = DOCKERFILE.read_text(encoding="utf-8").split("\nFROM ")
    for name in ("kernels", "wheel", "wheel-cuda"):
        (stage,) = [stage for stage in stages if stage.split("\n", 1)[0].endswith(f" AS {name}")]
        before_compiled, _, after = stage.partition(" -w /tmp/first ")
        assert re.search(r"^COPY .*\bREADME\.md", before_compiled, re.MULTILINE) is None
        assert ("COPY README.md ./" in after) is (name != "kernels")  # the wheel that is installed has it


def test_the_manifests_satisfy_the_strict_schema() -> None:
    done = run(tool("kubernetes-validate"), "--strict", *(str(K8S / f"{name}.yaml") for name in MANIFESTS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") + done.stderr.count("passed") == len(MANIFESTS)


def test_kustomize_names_every_manifest() -> None:
    assert manifest("kustomization")["resources"] == [f"{name}.yaml" for name in MANIFESTS]
    assert {path.stem for path in K8S.glob("*.yaml")} == {*MANIFESTS, "kustomization"}


def test_kubernetes_waits_longer_than_the_drain_takes() -> None:
    pod = manifest("deployment")["spec"]["template"]["spec"]
    container = container_of(manifest("deployment"))
    server = load_config(environment=environment_of(container)).server
    sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    taken = sleep + server.drain_delay_seconds + server.drain_timeout_seconds
    assert pod["terminationGracePeriodSeconds"] >= taken + 5
    unready = container["readinessProbe"]["periodSeconds"] * container["readinessProbe"]["failureThreshold"]
    assert server.drain_delay_seconds >= unready  # seen as not ready before the first refusal


def test_the_pod_is_restricted_and_reads_its_settings_from_nowhere_else() -> None:
    pod = manifest("deployment")["spec"]["template"]["spec"]
    container = container_of(manifest("deployment"))
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all(mount.get("readOnly") for mount in container["volumeMounts"] if mount["mountPath"] != "/tmp")
    assert pod["automountServiceAccountToken"] is False
    # A service called etserve would set ETSERVE_PORT=tcp://…, which is a setting of ours.
    assert pod["enableServiceLinks"] is False


def test_probes_ask_routes_that_need_no_key() -> None:
    from etserve.server.edge import OPEN_PATHS

    container = container_of(manifest("deployment"))
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == ["/health/ready", "/health/live", "/health/ready"]
    assert set(probes) <= OPEN_PATHS


def test_the_autoscaler_asks_for_a_series_that_the_server_exports() -> None:
    from prometheus_client import CollectorRegistry

    from etserve.metrics.recorder import Metrics
    from tests.fakes import FakeEngine

    (metric,) = manifest("hpa")["spec"]["metrics"]
    metrics = Metrics(CollectorRegistry())
    metrics.watch(FakeEngine())
    assert f"\n{metric['pods']['metric']['name']} ".encode() in metrics.exposition()


def selectors() -> Iterator[dict[str, str]]:
    yield manifest("deployment")["spec"]["selector"]["matchLabels"]
    yield manifest("service")["spec"]["selector"]
    yield manifest("pdb")["spec"]["selector"]["matchLabels"]
    yield manifest("networkpolicy")["spec"]["podSelector"]["matchLabels"]


def test_every_selector_finds_the_pods() -> None:
    labels = manifest("deployment")["spec"]["template"]["metadata"]["labels"]
    for selector in selectors():
        assert selector.items() <= labels.items()


def test_compose_is_well_formed_hardened_and_on_loopback_only() -> None:
    services = compose()["services"]
    assert set(services) == {"etserve", "etserve-2", "router", "etserve-gpu", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_compose_starts_a_server_that_prometheus_and_the_proxy_may_ask() -> None:
    service = compose()["services"]["etserve"]
    environment = {"ETSERVE_HOST": "0.0.0.0", **service["environment"]}  # the image's own
    server = load_config(environment=environment).server
    scraped = (ROOT / "configs" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    (target,) = re.findall(r'targets: \["(etserve[^"]*)"\]', scraped)
    assert target.split(":")[0] in server.allowed_hosts
    assert server.insecure
    grace = int(service["stop_grace_period"].removesuffix("s"))
    assert grace > server.drain_delay_seconds + server.drain_timeout_seconds + 5


def test_compose_serves_on_the_gpu_where_the_profile_says_so_and_on_the_cpu_elsewhere() -> None:
    services = compose()["services"]
    devices = {
        name: load_config(environment=services[name]["environment"]).engine.device
        for name in ("etserve", "etserve-2", "etserve-gpu")
    }
    assert devices == {"etserve": "cpu", "etserve-2": "cpu", "etserve-gpu": "cuda"}
    assert services["etserve-gpu"]["environment"].items() >= services["etserve"]["environment"].items()


def test_compose_mounts_files_that_exist() -> None:
    for name, service in compose()["services"].items():
        for volume in service.get("volumes", ()):
            source = str(volume).split(":", 1)[0]
            if source.startswith("../"):
                assert (ROOT / "docker" / source).exists(), (name, source)


def test_nginx_takes_the_shipped_proxy_configuration(tmp_path: Path) -> None:
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    site = (ROOT / "configs" / "nginx" / "etserve.conf").read_text(encoding="utf-8")
    (tmp_path / "site.conf").write_text(re.sub(r"etserve-\d:", "127.0.0.1:", site), encoding="utf-8")
    config = f"pid {tmp_path}/pid; events {{}} http {{ access_log off; include {tmp_path}/site.conf; }}"
    (tmp_path / "nginx.conf").write_text(config, encoding="utf-8")
    done = run(nginx, "-t", "-q", "-e", f"{tmp_path}/error.log", "-c", f"{tmp_path}/nginx.conf")
    assert done.returncode == 0, done.stderr
