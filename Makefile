# Everything is installed into .venv once, and again when a file listed at $(READY) changes.
# Two choices take effect when .venv is created:
#   make PYTHON=python3.12 ...   the interpreter (3.10 to 3.13; default: the first one found)
#   make DALI=cuda12 ...         the CUDA version of DALI (without a GPU either works)
# Choose where measurements are written: make bench OUTPUT=FOLDER

PYTHON ?=
DALI ?= cuda13
SHELL := /bin/bash
BIN := .venv/bin
OUTPUT ?= bench-results
READY := .venv/ready
DOCS := .venv/ready-for-docs

.PHONY: help quickstart test test-quick coverage test-slow test-processors bench bench-compare lint docs
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   draw images, pretrain an encoder on them, evaluate it"
	@echo "make test         run all tests except the slow ones; TESTS=FILES runs only those"
	@echo "make test-quick   run only tests that start no processes (some minutes)"
	@echo "make test-slow    run the slow tests, or TESTS=FILE::TEST; writes tests/slow-results.md"
	@echo "make test-processors    run numerical tests with other processors' kernels; TESTS=FILES runs only those"
	@echo "make coverage     print which lines the tests reach"
	@echo "make bench        run micro-benchmarks; writes to bench-results, or to OUTPUT=FOLDER"
	@echo "make bench-compare BASE=COMMIT    the same, interleaved with another commit; prints ratios"
	@echo "make lint         Ruff, and mypy on the public interface"
	@echo "make docs         build the documentation site in build/site; a broken link fails"

quickstart: $(READY)
	@$(BIN)/unigrad-fast data synth data/quickstart
	@run=runs/quickstart; number=1; \
	while [ -e "$$run" ]; do number=$$((number + 1)); run=runs/quickstart-$$number; done; \
	[ $$number = 1 ] || echo "runs/quickstart exists; this run goes to $$run"; \
	$(BIN)/unigrad-fast pretrain --recipe quickstart --output "$$run" && \
	$(BIN)/unigrad-fast evaluate knn "$$run" --baselines true

# Two processes, each takes whole files; TESTS=tests/objectives runs only that folder.
TESTS ?=
# Passive: waiting threads do not spin, and leave the cores to the other process.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest
TWO := -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	@$(PYTEST) $(TWO) $(TESTS)

test-quick: $(READY)
	@$(PYTEST) $(TWO) --quick -q $(or $(TESTS),tests)

# Includes the processes that tests start; takes some minutes longer than the tests alone.
coverage: $(READY)
	@$(PYTEST) $(TWO) --cov --cov-report term:skip-covered $(TESTS)

test-slow: $(READY)
	@$(PYTEST) -m slow --slow-results tests/slow-results.md $(TESTS)

test-processors: $(READY)
	@tests/other_processors.sh $(TESTS)

bench: $(READY)
	@mkdir -p "$(OUTPUT)"
	@$(PYTEST) benchmarks --benchmark-enable --benchmark-disable-gc --benchmark-min-time 0.005 \
	    --benchmark-sort name --benchmark-columns median,iqr,min,max,rounds \
	    --benchmark-json "$(OUTPUT)/micro-$$(date -u +%Y%m%dT%H%M%SZ).json"

bench-compare: $(READY)
	@$(BIN)/python -m unigrad_fast.benchmarks.micro.compare --base "$(BASE)" --output "$(OUTPUT)"

# mypy sees the installed package, which includes kernels, pipelines and benchmarks.
lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@rm -rf build/lint && $(BIN)/python setup.py -q build_py --build-lib build/lint 2>/dev/null
	@cp tests/typing/public_interface.py build/lint
	@cd build/lint && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache --no-error-summary

# The reference is generated from the installed package, which includes kernels, pipelines and benchmarks.
docs: $(DOCS)
	@rm -rf build/docs && $(BIN)/python setup.py -q build_py --build-lib build/docs 2>/dev/null
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "build/site/index.html"

$(DOCS): $(READY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --use-pep517 \
	    --constraint constraints.txt --editable '.[$(DALI),docs]'
	@touch $@

$(READY): setup.py pyproject.toml constraints.txt
	@python=""; \
	for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
	    if "$$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	    then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "error: no Python 3.10 to 3.13 found as $(or $(PYTHON),python3); install one, or name it: make PYTHON=/path/to/python3" >&2; \
	    exit 2; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	    echo "error: $$python cannot make environments; type: sudo apt install python3-venv" >&2; \
	    exit 2; \
	fi; \
	echo "Installing into .venv (once; some minutes, about 6 GB)"; \
	[ -x $(BIN)/python ] || "$$python" -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --use-pep517 \
	    --constraint constraints.txt --editable '.[$(DALI),test]'
	@touch $@
