# Everything here works in .venv, which the first target that needs it makes.
PYTHON ?= python3

# bash, so that every line goes through a shell that looks commands up in the PATH below.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
# Commands, and the trials they start, use the virtual environment's python3, as in an activated shell.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Some containers set it. Each of the thousands of processes that tests start would then compile all it imports.
unexport PYTHONDONTWRITEBYTECODE
# Each process that computes would otherwise use all cores, and tests run more processes than there are cores.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1

# What .ci/run installs for some tests; without it they are skipped.
OPTIONAL_PROGRAMS := podman runc catatonit mmdebstrap gcc ip iptables fusermount3 nsenter chromium chromium-headless-shell nginx curl

# What warm trials are measured beside. Pinned, so that a change of the ratio is one of ours.
RAY_TUNE := ray[tune]==2.60.0
# What trials in processes of their own are measured beside. Without its extras, which bring CUDA.
SYNE_TUNE := syne-tune==0.16.0
OF_SYNE_TUNE := numpy pandas dill sortedcontainers typing-extensions psutil
# What callbacks are measured beside: those of Optuna and W&B, for XGBoost.
CALLBACKS := optuna-integration==5.0.0 wandb==0.31.0 xgboost-cpu==3.2.0

# What `Auto` is measured beside.
TUNING_PEERS := nevergrad scikit-optimize smac3 optuna-gp ax hebo vizier
OF_nevergrad := nevergrad==1.0.12
OF_scikit-optimize := scikit-optimize==0.10.2
OF_smac3 := smac==2.4.1
OF_optuna-gp = optuna==5.0.0 scipy $(TORCH)
OF_ax = ax-platform==1.3.1 $(TORCH)
# Later versions of JAX lack what Vizier's other libraries import.
OF_vizier := google-vizier[jax]==0.1.24 jax==0.4.34 jaxlib==0.4.34
# HEBO names old versions of its libraries, for which pip searches for hours; it works with these.
OF_hebo = $(TORCH) numpy<2 gpytorch pymoo==0.6.0.1 pandas scikit-learn scipy catboost disjoint-set
HEBO := HEBO==0.3.6

# The build for CPUs alone: without `+cpu`, PyPI has one with gigabytes of CUDA. Where no index has it, this fails, and tests are skipped.
TORCH := torch==2.13.0+cpu
# Frameworks on it.
ON_TORCH := keras>=3.15,<4 lightning>=2.6,<3 pytorch-lightning>=2.6,<3 transformers>=5.24,<6 accelerate>=1.15,<2 \
  pytorch-ignite>=0.5.5,<0.6
# fastai comes without what it needs for images and text (torchvision, spaCy), and so has what the rest needs listed here.
FASTAI := fastai>=2.8.12,<2.9
OF_FASTAI := fastcore fastprogress fastdownload fasttransform plum-dispatch<2.10 cloudpickle matplotlib pandas pillow pyyaml requests \
  scikit-learn scipy

# Draws the diagrams of the documentation site in the browser.
MERMAID := mermaid@12.3.0

.DEFAULT_GOAL := help
# Two pip processes in one virtual environment get in each other's way.
.NOTPARALLEL:
.PHONY: help demo docs quick test e2e smoke test-bare test-images test-k8s golden faults stress mutants hostile thorough page check fix proto bench peers frameworks quality quality-functions quality-peers images keeper-bundle lock

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "make %-10s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.installed-manager,examples ## run examples/digits to the end on the OpenPAI of this machine
	@nnictl openpai status >/dev/null && was_running=1 || was_running=; \
	nnictl create --config examples/digits/config_openpai.yml --foreground && code=0 || code=$$?; \
	[ "$$was_running" ] || nnictl openpai stop-service; \
	exit $$code

# Without Mermaid's file, a browser shows the text of a diagram.
docs: .venv/.installed-test build/docs/static/mermaid.min.js ## build the documentation site in build/docs/html, with offline search; a broken link is an error
	sphinx-build -q -W --keep-going -c docs/site -d build/docs/doctrees . build/docs/html
	@echo 'open build/docs/html/index.html in a browser'

quick: .venv/.installed-test ## the tests of single parts in a minute, without those that are marked slow
	pytest -n 2 --dist loadscope --hypothesis-profile=quick -m 'not slow' tests/unit

test: .venv/.installed-test ## the tests of single parts, and of parts together; the environment variable TEST names a single one
	if [ "$${TEST:-}" ]; then pytest "$$TEST"; else \
	  pytest -n 6 --dist loadscope --durations 40 tests/contract tests/integration tests/unit; fi

e2e: .venv/.installed-test ## whole experiments as users run them, also under faults: nnictl, the page in Chromium, images in podman, and real packages of others
	if [ "$${TEST:-}" ]; then pytest "$$TEST"; else \
	  $(MAKE) test-images || true; pytest -n 8 --dist loadscope --durations 40 $(MARKED) tests/e2e tests/faults; fi

smoke: MARKED = -m smoke
smoke: e2e ## make e2e in short, for CI: the tests of the main path of each feature, which are marked smoke

# A test that builds an image takes longer than its timeout on a busy machine. Where a build fails, the tests that need it report why.
test-images: .venv/.installed-test ## build the images that tests run in podman
	python tests/fakes/real_containers.py

# The programs of the PATH without the optional ones, and no libfuse.
test-bare: .venv/.installed-test ## the tests that depend on the machine, as on one without the programs that .ci/run installs
	@programs=$$(mktemp -d); trap 'rm -r "$$programs"' EXIT; chmod 755 "$$programs"; \
	IFS=:; for folder in $${PATH#*:}; do ln -s "$$folder"/* "$$programs" 2>/dev/null || true; done; unset IFS; \
	cd "$$programs" && rm -f $(OPTIONAL_PROGRAMS) && cd - >/dev/null; \
	if [ "$${TEST:-}" ]; then chosen=("$$TEST"); else mapfile -t chosen < <(grep -rl --include='test_*.py' mark.any_machine tests); fi; \
	PATH="$(CURDIR)/.venv/bin:$$programs" FUSE_LIBRARY_PATH=/nonexistent/libfuse.so pytest -n 2 -m any_machine "$${chosen[@]}"

# Their files are named, because to collect all tests takes longer than some of these.
test-k8s: .venv/.installed-test ## the tests that run on any Kubernetes cluster, on that of KUBECONFIG; see CONTRIBUTING.md
	TEST_KUBECONFIG="$${KUBECONFIG:-$$HOME/.kube/config}" pytest -m any_cluster $$(grep -rl --include='test_*.py' mark.any_cluster tests)

golden: .venv/.installed-test ## write tests/golden anew (what nnictl prints, verdicts on experiment files), and what docs/ and the Python API have from declarations and tables
	GOLDEN=write pytest -q tests/unit/test_cli_golden.py tests/unit/test_cli_errors.py tests/unit/test_internals_page.py tests/unit/test_key_tables.py tests/unit/test_python_sections.py tests/unit/test_algorithm_pages.py
	python tests/fakes/config_corpus.py

hostile: .venv/.installed-test ## the tests of hostile peers, with 10,000 connections at once
	HOSTILE_CONNECTIONS=10000 pytest tests/integration -k hostile

faults: .venv/.installed-test ## experiments under fault plans; SEEDS=200 for a night, SEED=17 for one of them, KINDS=forged,torn for some kinds
	PYTHONPATH=tests/fakes python tests/faults/fault_run.py $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),20)) $(if $(KINDS),--kinds '$(KINDS)')

stress: .venv/.installed-test ## the tests with processes, five times beside three busy loops; TESTS= chooses files or tests, ROUNDS=20 how often; PAUSES=1 suspends workers for up to a second
	python tests/stress/stress.py --rounds $(or $(ROUNDS),5) --pauses $(or $(PAUSES),0) $(TESTS)

thorough: .venv/.installed-test ## suites that make test and make e2e run in short: 300 killed keepers, 50 trials beside a forger, each state file torn both ways, 500 jobs at once, each behaviour on every platform, properties with 400 new examples, full amounts
	THOROUGH=1 pytest -s $$(grep -rl --include='test_*.py' 'from amounts import' tests/faults tests/e2e)
	THOROUGH=1 pytest -n 2 --dist loadscope --hypothesis-profile=thorough tests/unit tests/contract \
	  $$(grep -rl --include='test_*.py' 'from amounts import' tests/integration)

mutants: .venv/.installed-test ## plant small bugs in a copy of the tree and list those that no test detects; MUTANTS=100 SEED=1 or MUTANTS=all, ONLY=store for some files, QUICK=1
	python tests/mutants/mutate.py --mutants $(or $(MUTANTS),100) --seed $(or $(SEED),1) $(if $(ONLY),--only '$(ONLY)') $(if $(QUICK),--quick)

page: .venv/.installed-test ## the web page in Chromium, with ten minutes of updates and 100,000 trials; PAGE_SCREENSHOTS names where to keep screenshots
	THOROUGH=1 pytest -rP tests/e2e/test_page.py tests/e2e/test_page_many_trials.py

check: .venv/.installed-check node_modules/.installed ## format, lint, types, layers, protocol, the page's code: all that CI checks besides tests
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	buf lint proto
	proto/breaking.sh
	proto/generate.sh --check
	python tests/prose/check_prose.py
	python tests/prose/check_platforms.py
	node_modules/.bin/tsc
	node --test tests/page/*.test.js

fix: .venv/.installed-check ## format the code and fix what the linter can fix
	ruff format .
	ruff check --fix .

proto: .venv/.installed-check ## generate trial_keeper/wire/v1 from proto/
	proto/generate.sh

bench: .venv/.installed-test ## measure the budgets and print the table; ROWS="decode_cost ingest" for some, ROUNDS=3, JSON=FILE; BEFORE=FILE AFTER=FILE compares two; ROWS=--help
	python tests/benchmarks/run.py $(ROWS) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(JSON),--json '$(JSON)') \
	  $(if $(BEFORE),--compare '$(BEFORE)' '$(AFTER)')

peers: .venv/peers/ray/.installed .venv/peers/syne-tune/.installed .venv/peers/callbacks/.installed ## install what make bench compares with: Ray Tune, 630 MB; Syne Tune, 140 MB; callbacks, 350 MB

frameworks: .venv/frameworks/.installed ## install the frameworks on PyTorch that nni_sdk.integrations is tested with, 1.3 GB

quality: .venv/.installed-test ## the models that tuners find on twelve problems of scikit-learn, beside Optuna's TPE; TUNERS="Auto GPTuner" for these
	python tests/benchmarks/tuner_problems.py $(TUNERS)

quality-peers: .venv/.installed-test $(foreach each,$(TUNING_PEERS),.venv/peers/$(each)/.installed) ## Auto beside HEBO, SMAC3, Vizier, Ax, Nevergrad, Optuna's GPSampler and scikit-optimize; hours, but finished searches are stored and not repeated; PEERS="smac3 ax" for these
	python tests/benchmarks/peer_quality.py --seeds $(or $(SEEDS),10) $(PEERS)

quality-functions: .venv/.installed-test ## what tuners find on six functions, beside Optuna's own samplers; TUNERS="TPE QMC" for these
	python tests/benchmarks/tuner_quality.py $(TUNERS)

images: .venv/.installed-release ## build both images and their bills of materials in build/; BASE_IMAGE=... names what they are made from
	@mkdir -p build; version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' trial_keeper/__init__.py); \
	SBOM=build/keeper.cdx.json images/build.sh keeper trial-keeper:$$version $(BASE_IMAGE); \
	SBOM=build/manager.cdx.json images/build.sh manager trial-keeper-manager:$$version $(BASE_IMAGE)

keeper-bundle: .venv/.installed-check ## build the package that brings the keeper into images without one, in build/
	python images/keeper_bundle.py

# One file for each image and for each value of EXTRAS. All have the versions of the manager's.
lock: .venv/.installed-release ## choose the versions of what the images contain again, and write images/requirements
	@compile() { \
	  echo pip | uv pip compile --quiet --upgrade --universal --python-version 3.10 --generate-hashes --no-header \
	    --output-file "images/requirements/$$1.txt" pyproject.toml - "$${@:2}"; \
	}; \
	compile manager --extra manager --extra kubernetes; \
	compile keeper --constraint images/requirements/manager.txt; \
	for extra in azure gp gpu tuners; do \
	  compile "$$extra" --extra "$$extra" --constraint images/requirements/manager.txt; \
	done

# What checks the page's own code. The page is served as it is written: neither users nor packages need this.
node_modules/.installed: package-lock.json
	@hash npm node 2>/dev/null || { echo "cannot check the web page: npm is missing; install Node.js 20 or later" >&2; exit 1; }
	@npm ci --silent --no-audit --no-fund --ignore-scripts
	@touch '$@'

# One file of a package whose dependencies it contains, so that no package is installed.
build/docs/static/mermaid.min.js: Makefile
	@mkdir -p build/docs/package $(@D)
	@npm pack --silent --pack-destination build/docs/package $(MERMAID) >/dev/null
	@tar -xzf build/docs/package/mermaid-*.tgz -C build/docs package/dist/mermaid.min.js
	@mv build/docs/package/dist/mermaid.min.js '$@' && rm -r build/docs/package && touch '$@'

# Installs into the virtual environment $(1), with the pip of .venv. To compile all of it takes a minute. What is used is compiled when
# it is used.
pip_install = .venv/bin/python -m pip --python $(1) install --quiet --disable-pip-version-check --no-compile

# pip comes last into a virtual environment: one that failed half-way is made again. The newest pip takes half the time of the one that
# Python 3.11 brings.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "cannot use PYTHON=$(PYTHON): Python 3.10 or later is needed; install one and run make PYTHON=/path/to/python3" >&2; \
	  exit 1; }
	@echo "making .venv"
	@$(PYTHON) -m venv --upgrade-deps .venv

.venv/.installed-%: pyproject.toml | .venv/bin/pip
	@echo "installing trial-keeper[$*] into .venv"
	@$(call pip_install,.venv) --editable '.[$*]'
	@# The import hook of setuptools costs each process of ours 35 ms; the folders that it stands for cost nothing. The last one is
	@# what setup.py adds to a wheel.
	@for pth in .venv/lib/python*/site-packages/__editable__.trial_keeper-*.pth; do \
	  [ ! -e "$$pth" ] || printf '%s\n' '$(CURDIR)' '$(CURDIR)/manager' '$(CURDIR)/nni_sdk/fallback' >"$$pth"; \
	done
	@# The extra `check` contains `test`.
	@touch '$@' $(if $(filter check,$*),.venv/.installed-test)

# A virtual environment of its own: it wants its own versions of what is used here too, such as protobuf.
.venv/peers/ray/.installed: Makefile | .venv/bin/pip
	@echo "installing $(RAY_TUNE) into .venv/peers/ray"
	@python -m venv --without-pip $(@D)
	@$(call pip_install,$(@D)) '$(RAY_TUNE)'
	@touch '$@'

.venv/peers/syne-tune/.installed: Makefile | .venv/bin/pip
	@echo "installing $(SYNE_TUNE) into .venv/peers/syne-tune"
	@python -m venv --without-pip $(@D)
	@$(call pip_install,$(@D)) $(OF_SYNE_TUNE)
	@$(call pip_install,$(@D)) --no-deps '$(SYNE_TUNE)'
	@touch '$@'

$(foreach each,$(TUNING_PEERS),.venv/peers/$(each)/.installed): .venv/peers/%/.installed: Makefile | .venv/bin/pip
	@echo "installing $(OF_$*) into .venv/peers/$*"
	@python -m venv --without-pip $(@D)
	@if $(call pip_install,$(@D)) $(foreach each,$(OF_$*),'$(each)') && \
	  { [ "$*" != hebo ] || $(call pip_install,$(@D)) --no-deps '$(HEBO)'; }; then touch '$@'; \
	else echo "cannot install $*: pip finds no version of it here; make quality-peers leaves it out"; fi

.venv/peers/callbacks/.installed: Makefile | .venv/bin/pip
	@echo "installing $(CALLBACKS) into .venv/peers/callbacks"
	@python -m venv --without-pip $(@D)
	@$(call pip_install,$(@D)) $(CALLBACKS)
	@touch '$@'

# One of its own, too: what pip finds here must not decide how trial-keeper is tested.
.venv/frameworks/.installed: Makefile | .venv/bin/pip
	@echo "installing $(TORCH) and frameworks on it into .venv/frameworks"
	@python -m venv --without-pip $(@D)
	@$(call pip_install,$(@D)) $(TORCH)
	@$(call pip_install,$(@D)) $(foreach each,$(ON_TORCH) $(OF_FASTAI),'$(each)')
	@$(call pip_install,$(@D)) --no-deps '$(FASTAI)'
	@touch '$@'
