# megatrain: every command a developer or a CI machine needs. `make` alone lists them.
# Nothing here needs root, except ci-deps when a part under test needs a Debian package.

PYTHON     ?= python3
VENV       := .venv
VENV_PY    := $(VENV)/bin/python
STAMP      := $(VENV)/.installed
PIP_FLAGS  := --quiet --quiet --disable-pip-version-check --no-input
DEMO_ARGS  ?=
BENCH_ARGS ?=
TEST_ARGS  ?=
SUITE_ARGS ?=
# Repeats at most three failures. Python keeps what it compiled, also where the environment says otherwise: hundreds of
# processes run the same files.
PYTEST     := env -u PYTHONDONTWRITEBYTECODE $(VENV_PY) -m tests.run
# The longest first: the pool of ranks, and the README's examples. A process more than cores, because many tests wait for
# servers.
SIDE_BY_SIDE := -n auto --dist loadscope --no-loadscope-reorder
SUITE      := tests/dist tests/docs tests/unit

.DEFAULT_GOAL := help
.PHONY: help gate smoke venv web dashboard-sample demo demo-fault test test-slow test-all test-kernels test-torch-cuda test-faults test-faults-ranks test-faults-hosts test-faults-outages test-faults-programs test-faults-pace test-faults-short test-web test-mutations check bench ci-nightly ci-deps clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | sort | awk -F '\t' '{ printf "make %-16s %s\n", $$1, $$2 }'

venv: $(STAMP)  ## create .venv and install megatrain with everything that tests and checks use

# The stamp is written last: an interrupted or failed installation is taken up again by the next make.
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

web: venv  ## build the dashboard's page from diagnostics/web (only for those who change it: the files are committed)
	@$(VENV_PY) diagnostics/web/generate_documents.py
	@$(VENV_PY) diagnostics/web/build.py

dashboard-sample: venv  ## the dashboard, full: the history of a small job in which things went wrong
	@$(VENV_PY) -m megatrain dashboard --replay tests/golden/dashboard-sample

demo: venv  ## train a small GPT on real text with 8 CPU processes, evaluate it and sample from it
	@$(VENV_PY) -m megatrain.demo $(DEMO_ARGS)

demo-fault: venv  ## the same training, with a process killed in the middle; shows the recovery
	@$(VENV_PY) -m megatrain.demo_fault $(DEMO_ARGS)

test: venv  ## run the tests that cover each package, in minutes (no GPU, no root, no network)
	@$(PYTEST) -- $(SUITE) --slow=without $(SIDE_BY_SIDE) $(TEST_ARGS)

test-slow: venv  ## run the slow ones: every layout, every crash point, every example of the guides
	@$(PYTEST) -- $(SUITE) --slow=only $(SIDE_BY_SIDE) $(TEST_ARGS)

test-all: test test-slow  ## run both

smoke: venv  ## one test of each expensive kind: a killed rank, a page in a browser, emulated CUDA, nvcc
	@$(PYTEST) -- tests/faults/ranks/test_killed_rank.py \
	  'tests/web/test_web_sample.py::test_view_of_the_sample_fits_every_screen[overview]' \
	  'tests/web/test_web_views.py::test_view_shows_what_it_is_for[overview]' \
	  tests/kernels/test_compiled.py::test_nvcc_compiles_a_kernel
	@$(PYTEST) --kernels=emulated -- tests/unit/ops/test_normalization.py

test-kernels: venv  ## carry out the CUDA kernels on the processor, and compile them with nvcc (no GPU)
	@$(PYTEST) --kernels=emulated -- tests/unit/ops $(SIDE_BY_SIDE) $(TEST_ARGS)
	@$(PYTEST) -- tests/kernels $(TEST_ARGS)

# An environment of its own: a torch for CUDA takes gigabytes, and only this target needs one.
CUDA_TORCH ?= 2.13.0
CUDA_VENV  := .venv-cuda-$(CUDA_TORCH)
CUDA_TESTS := --rootdir . -c /dev/null -p no:cacheprovider -q -rfEs tests/kernels tests/unit/ops tests/gpu

test-torch-cuda:  ## test the kernels and operators beside a torch built for CUDA (no GPU; downloads gigabytes; CUDA_TORCH=2.11.0)
	@test -x $(CUDA_VENV)/bin/pytest || { $(PYTHON) -m venv --clear $(CUDA_VENV) && \
	  $(CUDA_VENV)/bin/python -m pip install $(PIP_FLAGS) 'torch===$(CUDA_TORCH)' && \
	  $(CUDA_VENV)/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt \
	    numpy safetensors h11 setuptools nvidia-cuda-crt nvidia-cuda-nvcc nvidia-nvvm pytest; }
	@PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(CUDA_VENV)/bin/python -m pytest $(CUDA_TESTS) $(TEST_ARGS)

# Launched jobs wait more than they compute. Those that are judged by how long their steps take run alone.
FAULTS := test-faults-ranks test-faults-hosts test-faults-outages test-faults-programs

test-faults: $(FAULTS) test-faults-pace  ## break launched jobs in every way (as root also with networks that are cut)

$(FAULTS): test-faults-%: venv
	@$(PYTEST) -- tests/faults/$* -n auto --dist worksteal $(TEST_ARGS)

test-faults-pace: venv
	@$(PYTEST) -- tests/faults/pace $(TEST_ARGS)

test-faults-short: venv  ## break launched jobs in the ways that happen most
	@$(PYTEST) -- tests/faults --slow=without -n auto --dist worksteal $(TEST_ARGS)

test-web: venv  ## open the dashboard in a real browser (chromium of the system)
	@$(PYTEST) -- tests/web $(SIDE_BY_SIDE) -n 2 $(TEST_ARGS)

test-mutations: venv  ## put small faults into the product, other ones each day, and see which the quick tests find
	@$(VENV_PY) -m tests.mutate $(or $(MUTATE_ARGS),--part today)

check: venv  ## format, lint, types, layers and spelling
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy --no-error-summary
	@$(VENV)/bin/lint-imports --no-cache >$(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log >&2; exit 1; }
	@$(VENV)/bin/codespell
	@echo "make: check passed"

bench: venv  ## measure side by side; results go to docs/benchmarks
	@$(VENV_PY) -m benchmarks $(BENCH_ARGS)

# A test that would skip because a part is missing fails.
gate ci-nightly: export MEGATRAIN_REQUIRE = all

gate:  ## what each change must pass, in minutes; .ci/run (SUITE_ARGS=--write: figures go to docs/benchmarks/suite.md)
	@$(PYTHON) -m tests.stages gate $(SUITE_ARGS) ci-deps venv check test smoke

ci-nightly:  ## everything that needs no GPU, once a night
	@$(PYTHON) -m tests.stages nightly --keep-going $(SUITE_ARGS) ci-deps venv check test test-slow test-kernels test-web \
	  $(FAULTS) test-faults-pace

ci-deps:  ## install the Debian packages that tests use (prometheus, alertmanager, chromium)
	@missing=""; \
	command -v prometheus >/dev/null && command -v promtool >/dev/null || missing="$$missing prometheus"; \
	command -v prometheus-alertmanager >/dev/null || missing="$$missing prometheus-alertmanager"; \
	command -v chromium >/dev/null || missing="$$missing chromium fonts-inter"; \
	if [ -z "$$missing" ]; then \
	  echo "make: the programs that tests use are here"; \
	else \
	  sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; \
	  echo "make: installing$$missing (Debian and Ubuntu)"; \
	  $$sudo apt-get update -qq && \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null || { \
	    echo "make: these cannot be installed:$$missing; their tests are skipped, or fail under MEGATRAIN_REQUIRE=all" >&2; exit 1; }; \
	fi

clean:  ## remove caches and build leftovers (keeps .venv, runs and data)
	@rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
