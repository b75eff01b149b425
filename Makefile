# Sets up and runs everything. Requirements: Python 3.11+, make and access to the package registries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Tests of whole systems mostly wait: more workers than cores, one file per worker, whole systems not last.
WORKERS ?= 5
TIMES ?= 20
# Some images forbid compiled files. Tests start hundreds of processes, each of which would compile all code again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo up test page-test sweep flaky check docs format schemas secrets bench soak peers controlplane chart sim score sim-mutants lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is required, $(PYTHON) is $$($(PYTHON) -V); set PYTHON, for example PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per lock file: packages are reinstalled only after the lock file changes.
$(VENV)/.local: requirements/local.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/local.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.local
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	@touch $@

demo: $(VENV)/$(if $(CLOUD),.dev,.local) ## Run the demo on this machine and report (KEEP=1 keeps it running; CLOUD=aws, azure or gcp launches on an emulated cloud)
	@$(BIN)/gpu-autoscaler demo $(if $(KEEP),--keep) $(if $(CLOUD),--cloud $(CLOUD)) $(ARGS)

up: $(VENV)/.local ## Start every service as a process and keep running
	@$(BIN)/gpu-autoscaler up $(ARGS)

test: $(VENV)/.dev ## Run every test but the sweeps and those of `make check`, as far as this machine supports it; list the skipped ones
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --ignore tests/tidy -m "not sweep" $(ARGS)

page-test: $(VENV)/.dev ## Open the live page in a real Chromium (needs Chromium and npm); screenshots are in out/page
	$(BIN)/pytest -q tests/page $(ARGS)

sweep: $(VENV)/.dev ## Run the tests that `make test` leaves out: stories on every cloud and with every process killed, seeds, planted bugs
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal -m sweep $(ARGS)

flaky: $(VENV)/.dev ## Repeat TEST=file::name TIMES times with several at once, and report how often it failed
	$(BIN)/python -m tests.support.repeating --times $(TIMES) $(TEST)

check: $(VENV)/.dev ## Check format, lint, spelling, types, layers, generated files, project rules and the site of the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m gpu_autoscaler_services.contracts --check
	$(BIN)/pytest -q tests/tidy
	@$(MAKE) --no-print-directory docs

docs: $(VENV)/.dev ## Build the pages as a site with search into out/site; warnings, broken links and pages outside of the navigation fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.dev ## Format the code and apply lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: $(VENV)/.dev ## Generate schemas/, the types of the SDK, the default policy, the CRD, the pages of reasons, metrics and problems, NATS users and chart files from the code
	$(BIN)/python -m gpu_autoscaler_services.contracts
	$(BIN)/python -m gpu_autoscaler_services.sdk_models > libs/gpu_manager_sdk/models.py
	$(BIN)/python -m gpu_autoscaler_services.sdk_models filters > libs/gpu_manager_sdk/filters.py
	$(BIN)/python -m gpu_autoscaler.contracts.policy_file > deploy/policies/default.toml
	$(BIN)/python -m gpu_autoscaler.contracts.policy_crd > deploy/charts/gpu-autoscaler/crds/autoscalingpolicies.yaml
	$(BIN)/python -m gpu_autoscaler.contracts.reasons_page > docs/reference/reasons.md
	$(BIN)/python -m gpu_autoscaler.contracts.metrics_page > docs/reference/metrics.md
	$(BIN)/python -m gpu_autoscaler_services.gateway.problems_page > docs/reference/problems.md
	$(BIN)/python -m gpu_autoscaler_services.permissions > deploy/nats/users.conf
	$(BIN)/python -m gpu_autoscaler_services.chart_files deploy/charts/gpu-autoscaler

secrets: $(VENV)/.local ## Write .env: the gateway token and a password for each NATS user
	$(BIN)/python -m gpu_autoscaler_services.permissions --secrets .env

bench: $(VENV)/.dev ## Run the benchmarks as ratios in one run (CASE=name for one)
	$(BIN)/python -m tests.bench $(if $(CASE),--case $(CASE))

soak: $(VENV)/.dev ## Kill services, a broker and PostgreSQL at random at 1,000 nodes for MINUTES=n (10); compare with an oracle (SEED=x repeats)
	$(BIN)/python -m tests.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

peers: $(VENV)/.dev ## Build Karpenter (needs Go; cached outside this folder) and compare it with ours on a real control plane
	@$(BIN)/python -m tests.controlplane.programs
	@$(BIN)/python -m tests.bench.peers.scheduler
	@$(BIN)/python -m tests.bench.peers.real
	$(BIN)/python -m tests.bench --case P1 --out out/peers.json

controlplane: $(VENV)/.dev ## Build a real Kubernetes control plane, Karpenter and controllers for tests (needs Go; cached outside this folder)
	@$(BIN)/python -m tests.controlplane.programs
	@$(BIN)/python -m tests.controlplane.definitions
	@$(BIN)/python -m tests.controlplane.jobset_controller
	@$(BIN)/python -m tests.controlplane.volcano_controller
	@$(BIN)/python -m tests.controlplane.training_controller
	@$(BIN)/python -m tests.controlplane.ray_controller
	@$(BIN)/python -m tests.controlplane.kueue_controller
	@$(BIN)/python -m tests.bench.peers.real

chart: $(VENV)/.dev ## Build Helm and promtool (needs Go); lint, render and install the chart on a real API server; check its alerts, the Dockerfile and the compose file
	@$(BIN)/python -m tests.chart.programs
	@$(BIN)/python -m tests.containers.programs
	@$(BIN)/python -m tests.alerts.programs
	$(BIN)/pytest -q tests/chart tests/alerts tests/containers $(ARGS)

sim: $(VENV)/.dev ## Simulate SEEDS=n runs (or only SEED=n) with faults; fail on a violated invariant
	$(BIN)/python -m gpu_autoscaler_services.simulate $(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

score: $(VENV)/.dev ## Score this autoscaler and the baselines in the same simulations (SEEDS=5, ARGS="--world openb --hours 24")
	$(BIN)/python -m gpu_autoscaler_services.score $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

sim-mutants: $(VENV)/.dev ## Insert known bugs one at a time and verify that the simulator finds each
	$(BIN)/python -m tests.sim.mutants $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

lock: $(VENV)/.dev ## Update the lock files (needs uv on the PATH)
	uv pip compile requirements/build.in --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --quiet --output-file requirements/build.txt
	uv pip compile pyproject.toml --extra aws --extra azure --extra gcp --extra nvml --extra postgres --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --quiet --output-file requirements/runtime.txt
	uv pip compile pyproject.toml requirements/build.in --extra local --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --quiet --output-file requirements/local.txt
	uv pip compile pyproject.toml requirements/build.in --extra dev --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --quiet --output-file requirements/dev.txt

clean: ## Remove generated output and caches, except the virtual environment
	rm -rf out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
