# megatrain: the commands for developers and CI. `make` without a target lists them.
# Only ci-deps needs root, if a Debian package is missing.

PYTHON     ?= python3
VENV       := .venv
VENV_PY    := $(VENV)/bin/python
STAMP      := $(VENV)/.installed
PIP_FLAGS  := --quiet --quiet --disable-pip-version-check --no-input
DEMO_ARGS  ?=
BENCH_ARGS ?=
TEST_ARGS  ?=
SUITE_ARGS ?=
NIGHTLY_ALSO ?=
# Repeats at most three failed tests. Python always caches compiled files, because hundreds of processes run the same
# files.
PYTEST     := env -u PYTHONDONTWRITEBYTECODE $(VENV_PY) -m tests.run
# One process more than cores, because many tests wait for servers. SUITE begins with the tests that take longest.
SIDE_BY_SIDE := -n auto --dist loadscope --no-loadscope-reorder
SUITE      := tests/dist tests/docs tests/unit

.DEFAULT_GOAL := help
.PHONY: help gate smoke smoke-jobs smoke-kernels venv web dashboard-sample demo demo-fault test test-slow test-all test-kernels test-torch-cuda test-dali test-faults test-faults-hosts test-faults-programs test-faults-pace test-faults-short test-web test-mutations check check-mypy check-text check-types bench ci-nightly ci-deps clean

help:  ## list the targets with their descriptions
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | sort | awk -F '\t' '{ printf "make %-17s %s\n", $$1, $$2 }'

venv: $(STAMP)  ## create .venv and install megatrain with everything that tests and checks use

# The stamp is written last, so that the next make repeats an interrupted or failed installation.
$(STAMP): pyproject.toml setup.py install.py constraints.txt
	@if ! $(VENV_PY) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) on this machine; megatrain needs Python 3.11 or later" >&2; exit 1; }; \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: megatrain needs Python 3.11 or later, $(PYTHON) is $$($(PYTHON) --version 2>&1); name another one: make PYTHON=python3.12" >&2; exit 1; }; \
	  echo "make: creating $(VENV)"; \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	    echo "make: $(PYTHON) cannot create a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }; \
	fi
	@echo "make: installing into $(VENV) (with torch: minutes, the first time)"
	@$(VENV_PY) install.py
	@touch $@

web: venv  ## build the dashboard's page from diagnostics/web (only after a change: the built files are committed)
	@$(VENV_PY) diagnostics/web/generate_documents.py
	@$(VENV_PY) diagnostics/web/build.py

dashboard-sample: venv  ## open the dashboard of a recorded small job with many failures
	@$(VENV_PY) -m megatrain dashboard --replay tests/golden/dashboard-sample

demo: venv  ## train a small GPT on real text with 8 CPU processes, and sample from it (DEMO_ARGS=--vision: on pictures)
	@$(VENV_PY) -m megatrain.demo $(DEMO_ARGS)

demo-fault: venv  ## run the demo, kill a process during training, and show the recovery
	@$(VENV_PY) -m megatrain.demo_fault $(DEMO_ARGS)

test: venv  ## run the tests that cover each package, in minutes (needs no GPU, no root and no network)
	@$(PYTEST) -- $(SUITE) --slow=without $(SIDE_BY_SIDE) $(TEST_ARGS)

test-slow: venv  ## run the slow tests: every layout, every crash point, every example of the guides
	@$(PYTEST) -- $(SUITE) --slow=only $(SIDE_BY_SIDE) $(TEST_ARGS)

test-all: test test-slow  ## run test and test-slow

# Two targets side by side, because a launched job waits about as long as it computes.
smoke: venv  ## run one test of each expensive kind: a killed rank, a page in a browser, emulated CUDA, nvcc
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target smoke-jobs smoke-kernels

smoke-jobs:
	@$(PYTEST) -- tests/faults/ranks/test_killed_rank.py \
	  'tests/web/test_web_sample.py::test_view_of_the_sample_fits_every_screen[overview]' \
	  'tests/web/test_web_views.py::test_view_shows_its_content[overview]'

smoke-kernels:
	@$(PYTEST) -- tests/kernels/test_compiled.py::test_nvcc_compiles_a_kernel
	@$(PYTEST) --kernels=emulated -- tests/unit/ops/test_normalization.py

test-kernels: venv  ## test the CUDA kernels on the CPU, and compile them with nvcc (needs no GPU)
	@$(PYTEST) --kernels=emulated -- tests/unit/ops $(SIDE_BY_SIDE) $(TEST_ARGS)
	@$(PYTEST) -- tests/kernels $(TEST_ARGS)

# A separate environment, because torch for CUDA takes gigabytes and only this target needs it.
CUDA_TORCH ?= 2.13.0
CUDA_VENV  := .venv-cuda-$(CUDA_TORCH)
CUDA_TESTS := --rootdir . -c /dev/null -p no:cacheprovider -q -rfEs tests/kernels tests/unit/ops tests/gpu

test-torch-cuda:  ## test kernels and operators with torch built for CUDA (needs no GPU; downloads gigabytes; CUDA_TORCH=2.11.0)
	@test -x $(CUDA_VENV)/bin/pytest || { $(PYTHON) -m venv --clear $(CUDA_VENV) && \
	  $(CUDA_VENV)/bin/python -m pip install $(PIP_FLAGS) 'torch===$(CUDA_TORCH)' && \
	  $(CUDA_VENV)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt \
	    numpy safetensors h11 setuptools nvidia-cuda-crt nvidia-cuda-nvcc nvidia-nvvm pytest hypothesis; }
	@PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(CUDA_VENV)/bin/python -m pytest $(CUDA_TESTS) $(TEST_ARGS)

# DALI has a directory of its own, because it is large and only this target and its benchmark need it.
DALI_SITE := $(CURDIR)/$(VENV)/dali
DALI_TESTS := tests/unit/data/test_picture_decoder.py tests/unit/benchmarks/test_pictures.py

test-dali: venv  ## test the decoding of pictures with NVIDIA DALI (needs no GPU; downloads 270 MB)
	@test -d $(DALI_SITE)/nvidia/dali || $(VENV_PY) -m pip install $(PIP_FLAGS) --target $(DALI_SITE) \
	  --constraint constraints.txt nvidia-dali-cuda130
	@PYTHONPATH=$(DALI_SITE) MEGATRAIN_REQUIRE=dali $(PYTEST) -- $(DALI_TESTS) $(TEST_ARGS)

# Launched jobs wait about as long as they compute, so a job more than there are cores runs at a time: a further one
# would only make the steps of all slower. The short tests are at the end. Tests that depend on step times run alone.
FAULTS := test-faults-hosts test-faults-programs
FAULTS_OF_hosts    := tests/faults/hosts tests/faults/ranks
FAULTS_OF_programs := tests/faults/programs tests/faults/outages

test-faults: $(FAULTS) test-faults-pace  ## test launched jobs with every fault (as root also with network partitions)

$(FAULTS): test-faults-%: venv
	@$(PYTEST) -- $(FAULTS_OF_$*) -n auto --dist loadscope $(TEST_ARGS)

test-faults-pace: venv
	@$(PYTEST) -- tests/faults/pace $(TEST_ARGS)

test-faults-short: venv  ## test launched jobs with the most frequent faults
	@$(PYTEST) -- tests/faults --slow=without -n auto --dist loadscope $(TEST_ARGS)

test-web: venv  ## test the dashboard in a real browser (the system's chromium)
	@$(PYTEST) -- tests/web $(SIDE_BY_SIDE) -n 2 $(TEST_ARGS)

test-mutations: venv  ## inject small faults into the code, other ones each day, and show which of them the tests detect
	@$(VENV_PY) -m tests.mutate $(or $(MUTATE_ARGS),--part today)

# Two targets side by side, because mypy takes about as long as all others.
check: venv  ## check format, lint, types, layers and spelling
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-mypy check-text
	@echo "make: check passed"

check-mypy:
	@$(VENV)/bin/mypy --no-error-summary

check-text:
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/lint-imports --no-cache >$(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log >&2; exit 1; }
	@$(VENV)/bin/codespell

check-types: venv  ## check all types, of tests too, with those of torch (minutes)
	@$(VENV)/bin/mypy --config-file .ci/types.toml

bench: venv  ## run the benchmarks (BENCH_ARGS=--write: results go to docs/benchmarks)
	@$(VENV_PY) -m benchmarks $(BENCH_ARGS)

# With this, a test that would be skipped because a part is missing fails.
gate ci-nightly: export MEGATRAIN_REQUIRE = all

gate:  ## run what CI runs for each change, in minutes (SUITE_ARGS=--write: times go to docs/benchmarks; --busy 2: beside two busy processes)
	@$(PYTHON) -m tests.stages gate $(SUITE_ARGS) ci-deps venv check test smoke

ci-nightly:  ## run all tests that need no GPU, except test-torch-cuda and test-dali (NIGHTLY_ALSO=test-dali adds one)
	@$(PYTHON) -m tests.stages nightly --keep-going $(SUITE_ARGS) ci-deps venv check check-types test test-slow test-kernels \
	  test-web $(FAULTS) test-faults-pace test-mutations $(NIGHTLY_ALSO)

ci-deps:  ## install the Debian packages that tests use (prometheus, alertmanager, chromium)
	@missing=""; \
	command -v prometheus >/dev/null && command -v promtool >/dev/null || missing="$$missing prometheus"; \
	command -v prometheus-alertmanager >/dev/null || missing="$$missing prometheus-alertmanager"; \
	command -v chromium >/dev/null || missing="$$missing chromium fonts-inter"; \
	if [ -z "$$missing" ]; then \
	  echo "make: the programs that tests use are installed"; \
	else \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	  echo "make: installing$$missing (Debian and Ubuntu)"; \
	  $$sudo apt-get update -qq && \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null || { \
	    echo "make: these cannot be installed:$$missing; their tests are skipped, or fail under MEGATRAIN_REQUIRE=all" >&2; exit 1; }; \
	fi

clean:  ## remove caches and build files (keeps .venv, runs and data)
	@rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
