# Everything here works in .venv, which the first target that needs it makes.
PYTHON ?= python3

# bash, so that every line goes through a shell that looks commands up in the PATH below.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
# Commands, and the trials they start, use the virtual environment's python3, as in an activated shell.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Some containers set it. Each of the thousands of processes that tests start would then compile all it imports.
unexport PYTHONDONTWRITEBYTECODE

# What warm trials are measured beside. Pinned, so that a change of the ratio is one of ours.
RAY_TUNE := ray[tune]==2.60.0

.DEFAULT_GOAL := help
# Two pip processes in one virtual environment get in each other's way.
.NOTPARALLEL:
.PHONY: help demo test test-k8s golden faults hostile page check fix proto bench peers quality images

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "make %-9s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed-manager,examples ## run examples/digits to the end on the OpenPAI of this machine
	@nnictl openpai status >/dev/null && was_running=1 || was_running=; \
	nnictl create --config examples/digits/config_openpai.yml --foreground && code=0 || code=$$?; \
	[ "$$was_running" ] || nnictl openpai stop-service; \
	exit $$code

test: .venv/.installed-test ## run all tests
	pytest -n 4 --dist loadscope --durations 40

# Their files are named, because to collect all tests takes longer than some of these.
test-k8s: .venv/.installed-test ## the tests that run on any Kubernetes cluster, on that of KUBECONFIG; see CONTRIBUTING.md
	TEST_KUBECONFIG="$${KUBECONFIG:-$$HOME/.kube/config}" pytest -m any_cluster $$(grep -rl --include='test_*.py' mark.any_cluster tests)

golden: .venv/.installed-test ## write tests/golden/nnictl anew: what nnictl says, word by word
	GOLDEN=write pytest -q tests/unit/test_cli_golden.py

hostile: .venv/.installed-test ## the tests of hostile peers, with 10,000 connections at once
	HOSTILE_CONNECTIONS=10000 pytest tests/integration -k hostile

faults: .venv/.installed-test ## experiments under fault plans; SEEDS=200 for a night, SEED=17 for one of them
	PYTHONPATH=tests/fakes python tests/faults/fault_run.py $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),20))

page: .venv/.installed-test ## the web page in Chromium, with ten minutes of updates; PAGE_SCREENSHOTS names where to keep screenshots
	PAGE_UPDATES=$(or $(PAGE_UPDATES),1200) pytest tests/e2e/test_page.py

check: .venv/.installed-check node_modules/.installed ## format, lint, types, layers, protocol, the page's code: all that CI checks besides tests
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	buf lint proto
	proto/breaking.sh
	proto/generate.sh --check
	node_modules/.bin/tsc
	node --test tests/page/*.test.js

fix: .venv/.installed-check ## format the code and mend what the linter can mend
	ruff format .
	ruff check --fix .

proto: .venv/.installed-check ## generate trial_keeper/wire/v1 from proto/
	proto/generate.sh

bench: .venv/.installed-test ## measure the budgets and print the table
	python tests/benchmarks/run.py

peers: .venv/peers/ray/.installed ## install what make bench compares with: Ray Tune, 630 MB

quality: .venv/.installed-test ## what tuners find on six functions, beside Optuna's own samplers; TUNERS="TPE QMC" for these
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python tests/benchmarks/tuner_quality.py $(TUNERS)

images: .venv/bin/pip ## build both images; BASE_IMAGE=... names what they are made from
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' trial_keeper/__init__.py); \
	images/build.sh keeper trial-keeper:$$version $(BASE_IMAGE); \
	images/build.sh manager trial-keeper-manager:$$version $(BASE_IMAGE)

# What checks the page's own code. The page is served as it is written: neither users nor packages need this.
node_modules/.installed: package-lock.json
	@hash npm node 2>/dev/null || { echo "cannot check the web page: npm is missing; install Node.js 20 or later" >&2; exit 1; }
	@npm ci --silent --no-audit --no-fund --ignore-scripts
	@touch '$@'

# pip comes last into a virtual environment: one that failed half-way is made again.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "cannot use PYTHON=$(PYTHON): Python 3.10 or later is needed; install one and run make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@echo "making .venv"
	@$(PYTHON) -m venv .venv

.venv/.installed-%: pyproject.toml | .venv/bin/pip
	@echo "installing trial-keeper[$*] into .venv"
	@python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch '$@'

# A virtual environment of its own: it wants its own versions of what is used here too, such as protobuf.
.venv/peers/ray/.installed: Makefile | .venv/bin/pip
	@echo "installing $(RAY_TUNE) into .venv/peers/ray"
	@python -m venv .venv/peers/ray
	@.venv/peers/ray/bin/python -m pip install --quiet --disable-pip-version-check '$(RAY_TUNE)'
	@touch '$@'
