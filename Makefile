# featstore: everything a developer runs. `make help` lists the targets.
#
# All of it happens in a virtual environment of the clone's own, made from $(PYTHON). The package is installed there in editable
# form, so tests, examples and benchmarks run the tree that you edit with the compiled modules beside their stubs; that a wheel
# built in isolation holds the same is what tests/system/test_packaging.py shows, whole in make stress. Each step leaves a stamp: a
# second call does nothing.

PYTHON     ?= python3
VENV       ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=
DEMO_ARGS  ?=
FUZZ_SECONDS ?= 600
# Where PyPI's torch would bring a CUDA build, point pip at the CPU one: make PIP_ARGS='--extra-index-url URL' install
PIP_ARGS   ?=

PY     := $(VENV)/bin/python
ROOT   := $(CURDIR)
SOURCES := $(shell find src_cython -type f 2>/dev/null) setup.py
ASAN   := build/asan-tree
# Not those that build, read or preload something themselves.
NOT_ASAN := $(patsubst %,tests/system/test_%.py,benchmarks docs faults layers packaging site) tests/testing/test_faults.py
ASAN_TESTS ?= $(filter-out $(NOT_ASAN) tests/memory/% tests/digests/%,$(wildcard tests/*/test_*.py))
TSAN   := build/tsan-tree
# Those with threads; a process that forks them, or is watched by the tests, is another matter.
TSAN_TESTS ?= tests/core tests/gather tests/cache/test_table.py tests/load/test_pipeline.py tests/load/test_loaders_at_once.py \
	tests/load/test_loader.py tests/load/test_edges.py tests/load/test_overlap.py \
	$(patsubst %,tests/storage/test_%.py,extents interrupted_reads queues reader scan sections writer) \
	$(patsubst %,tests/strategies/test_%.py,packed streamed superbatch)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests are compiled once, and not by each of some hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install lint format test graphbolt docs stress fuzz demo bench asan tsan clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing into $(VENV): a few minutes, most of them for torch and the compiler"
	@$(PY) -m pip install -qq $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

# pip says what went wrong, and nothing else (-qq). Installing has compiled what there was then.
$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	@if [ -n "$$(find $(SOURCES) -newer $(VENV)/.installed)" ]; then \
		echo "$(PY) setup.py build_ext --inplace"; $(PY) setup.py --quiet build_ext --inplace; fi
	@touch $@

install: $(VENV)/.built ## make the environment, install what is needed, compile

lint: $(VENV)/.built ## ruff, cython-lint, mypy --strict, stubtest
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PATH="$(abspath $(VENV)/bin):$$PATH" cython-lint src_cython
	$(PY) -m mypy
	$(PY) -m mypy tests/system/typed_use.py
	$(PY) -m mypy.stubtest featstore._core --mypy-config-file pyproject.toml --ignore-disjoint-bases \
		--ignore-unused-allowlist --allowlist .stubtest-allowlist

format: $(VENV)/.installed ## let ruff format and mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# Three processes for two cores (tests/conftest.py), each with torch; PYTEST_ARGS="-n 0" runs them one after the other.
test: $(VENV)/.built ## the test suite, with samples of the long campaigns
	$(PY) -m pytest -n logical --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

# PyPI's last DGL, for Python 3.10 to 3.12, twice: its Python with the environment's torch, and all of it, in an environment of its own,
# with the last torch that its compiled library is for.
OF_GRAPHBOLT := dgl==2.1.0 torchdata==0.7.1
BESIDE_GRAPHBOLT := torch==2.2.1 'numpy<2' lmdb xxhash psutil tqdm hypothesis pandas pydantic pyyaml pytest pytest-timeout \
	pytest-xdist

build/graphbolt/.installed: $(VENV)/.created
	$(PY) -m pip install -qq --no-deps --target build/graphbolt/python $(OF_GRAPHBOLT)
	$(PY) -m venv build/graphbolt/venv
	build/graphbolt/venv/bin/python -m pip install -qq $(PIP_ARGS) $(OF_GRAPHBOLT) $(BESIDE_GRAPHBOLT)
	@touch $@

graphbolt: $(VENV)/.built build/graphbolt/.installed ## the tests of the adapter to GraphBolt, with GraphBolt itself
	PYTHONPATH=build/graphbolt/python $(PY) -m pytest -n 0 tests/adapters/test_graphbolt_feature.py -k python
	PYTHONPATH=. build/graphbolt/venv/bin/python -m pytest -n 0 -W default tests/adapters/test_graphbolt_feature.py -k compiled

docs: $(VENV)/.built ## build the documentation site into build/site; a warning is an error
	$(PY) -m sphinx -W --keep-going -q -d build/doctrees docs build/site
	@echo build/site/index.html

stress: $(VENV)/.built ## the long campaigns, whole: faults, kills, bit flips, races, mutations; and the demo
	$(PY) -m pytest -m stress --timeout 3600 -o faulthandler_timeout=0 $(PYTEST_ARGS)
	$(PY) examples/demo.py

# Needs atheris, and clang for the kernels. What fails is left as build/fuzz/crash-…
KERNELS := src_cython/featstore/_core/kernels
FUZZ_C := tests/campaigns/fuzz_kernels.c $(patsubst %,$(KERNELS)/%.c,draws nearby neighbors pairs vectors weighted xxh3)
FUZZ_TARGETS ?= $(shell ls tests/campaigns/corpus)
FUZZ_CFLAGS := -w -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined

fuzz: $(VENV)/.built ## coverage-guided fuzzing of each parser and of the kernels, FUZZ_SECONDS each
	$(PY) -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[fuzz]'
	@mkdir -p build/fuzz/kernels
	clang $(FUZZ_CFLAGS) -I$(KERNELS) -o build/fuzz/fuzz_kernels $(FUZZ_C) -lm
	build/fuzz/fuzz_kernels -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -artifact_prefix=build/fuzz/crash-kernels- \
		build/fuzz/kernels tests/campaigns/corpus/kernels
	for name in $(filter-out kernels,$(FUZZ_TARGETS)); do \
		$(PY) -W ignore -m tests.campaigns.fuzz $$name -max_total_time=$(FUZZ_SECONDS) || exit 1; done

demo: $(VENV)/.built ## train within a quarter of a graph's size, beside a memory map; ends with one picture
	@$(PY) examples/demo.py $(DEMO_ARGS)

bench: $(VENV)/.built ## every benchmark; one JSON line a figure, also in build/bench.jsonl
	@mkdir -p build
	$(PY) -m benchmarks --out build/bench.jsonl $(BENCH_ARGS)

# A sanitizer build lives in a copy of the tree, so that it never mixes with the modules in use.
define sanitized_copy
@mkdir -p $(2)
git ls-files -z -co --exclude-standard | xargs -0 cp --parents -u -t $(2)
cd $(2) && FEATSTORE_BUILD=$(1) $(abspath $(PY)) setup.py --quiet build_ext --inplace
endef

# A child that is forked beside a thread that allocates may hang in gcc's library: that test alone then fails.
asan: $(VENV)/.installed ## the tests of the compiled modules under AddressSanitizer and UBSan
	$(call sanitized_copy,asan,$(ASAN))
	cd $(ASAN) && FEATSTORE_BUILD=asan PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	$(abspath $(PY)) -m pytest --timeout 900 --timeout-method signal $(ASAN_TESTS) $(PYTEST_ARGS)

# Addresses are not randomised: gcc's library finds its shadow memory where it expects it.
tsan: $(VENV)/.installed ## the tests with threads under ThreadSanitizer
	$(call sanitized_copy,tsan,$(TSAN))
	cd $(TSAN) && FEATSTORE_BUILD=tsan LD_PRELOAD="$$(gcc -print-file-name=libtsan.so)" \
	TSAN_OPTIONS=die_after_fork=0:suppressions=$(abspath $(TSAN))/tests/support/tsan.supp \
	setarch -R $(abspath $(PY)) -m pytest --timeout 1800 $(TSAN_TESTS) $(PYTEST_ARGS)

clean: ## remove the environment and all that was built
	rm -rf $(VENV) build dist demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find featstore -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
