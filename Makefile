# Each target sets itself up: the first one makes .venv and installs the pinned versions, later ones find it ready.
#   make demo    train a small language model on this machine, on two local processes
#   make tune    tune a small model by one recipe after the other, on two local processes, and a page of what each did
#   make test    the tests          make lint    style, types, import directions
#   make soak    the long tests, hours of them: PART=3/12 is the third of twelve parts
#   make clean   remove everything that make and the tools made
#   make docs    the documentation as a site, build/site/index.html
#   make numerics   the numerical tests with each set of kernels that this CPU has
#   make mutants    listed faults, each in a copy of the package: tests have to notice all; PART=3/12, too
#   make matrix  a part of the tests under other versions of PyTorch and Python (MATRIX="--torch 2.11.0")
#   make dist    sdist and wheel of the last commit, checked, the same bytes each time
#   make gpu     what only a GPU can show, and one report of it, in 10 minutes at most (DEVICE=sim RANKS=2: a rehearsal)
#   make gpu-bench   how fast it is there, beside PyTorch's own: the same, and without a GPU a rehearsal
# The demo needs the command line only; what the tests need besides is installed into the same .venv by the first of them.
# Options: PYTHON=python3.12 (which interpreter), PIP_ARGS="..." (passed to pip install),
# JOBS=1 (how many tests at a time).

PYTHON ?= python3
PIP_ARGS ?=
# Ranks wait for each other more than they compute: three tests at a time fill two cores.
JOBS ?= 3
# Of `make gpu`: cuda, sim, cpu, ...; ranks, 0: one per device; the report's folder; GPU_PYTHON=python3: an interpreter
# that has all it needs already, as where there is no network, in place of .venv's.
DEVICE ?= auto
RANKS ?= 0
MINUTES ?= 10
REPORT ?= build/$@
GPU_PYTHON ?= $(BIN)/python
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.ready-dev
SITE := $(VENV)/.ready-docs
PACKER := $(VENV)/.ready-dist
LOG := $(VENV)/setup.log
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=10

# Where this is set, as in images of Python for containers, each of the many processes of a run would compile the package.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo tune test lint docs dist soak numerics mutants matrix gpu gpu-bench clean
.DEFAULT_GOAL := test

demo: $(READY)
	@$(BIN)/shardfold demo

tune: $(READY)
	@$(BIN)/shardfold tune demo

test: $(TOOLS)
	@$(PYTEST)

soak: $(TOOLS)
	@$(PYTEST) -m soak $(if $(PART),--part $(PART))

numerics: $(TOOLS)
	@JOBS=$(JOBS) $(BIN)/python tests/support/numerics.py

mutants: $(TOOLS)
	@JOBS=$(JOBS) $(BIN)/python -m tests.support.mutants $(if $(PART),--part $(PART))
	@$(BIN)/python -m tests.support.synchronizations

matrix: $(TOOLS)
	@$(BIN)/python tests/support/matrix.py $(MATRIX)

gpu gpu-bench: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(TOOLS))
	@$(GPU_PYTHON) -m tests.support.gpu $(if $(filter gpu-bench,$@),--speed) --device $(DEVICE) --ranks $(RANKS) --minutes $(MINUTES) --out $(REPORT)

lint: $(TOOLS)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports --no-logo

docs: $(SITE)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

dist: $(PACKER)
	@$(BIN)/python -m tests.support.release

# The editable install follows the sources by itself: only dependencies and the version, which it notes, make it stale.
$(READY): pyproject.toml constraints.txt src/shardfold/plan/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "'$(PYTHON)' is missing or older than Python 3.10: name another, for example: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@mkdir -p $(VENV)
	@echo "Setting up $(VENV): PyTorch and the command line, a few minutes once (log: $(LOG))"
	@$(PYTHON) -m venv $(VENV) >$(LOG) 2>&1 || { cat $(LOG) >&2; \
		echo "'$(PYTHON) -m venv' failed: install the venv module (Debian, Ubuntu: apt install python3-venv) and run make again" >&2; exit 1; }
	@$(call install,.[all])
	@touch $@

$(TOOLS): $(READY)
	@echo "Adding what the tests need, a few minutes once (log: $(LOG))"
	@$(call install,.[dev])
	@touch $@

$(SITE): $(READY)
	@echo "Adding what the documentation needs (log: $(LOG))"
	@$(call install,.[docs])
	@touch $@

$(PACKER): $(READY)
	@echo "Adding what a release needs (log: $(LOG))"
	@$(call install,.[release])
	@touch $@

install = PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '$(1)' \
	>>$(LOG) 2>&1 || { cat $(LOG) >&2; echo "pip could not install the dependencies: the log above ($(LOG)) says which" >&2; exit 1; }

clean:
	@rm -rf $(VENV) .matrix build dist src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
