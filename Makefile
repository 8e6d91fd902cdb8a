# A fresh machine needs Python >= 3.11 and a C compiler; the rest is installed into .venv on first use.
# `make` lists the targets.
#
#   RANKS=4                   ranks of `make train` (default: one for each GPU, or 2 on the CPU)
#   JOBS=4                    workers of `make test` (default: one for each core, 8 at most; none beside a GPU)
#   GPU_JOBS=16               of `make test-gpu` (default: one for each core, 8 at most)
#   ARGS="--epochs 5"         further arguments of the script or of pytest
#   PYTHON=python3            use this interpreter as it is: no environment is made and nothing is downloaded

ifdef PYTHON
PY := $(PYTHON)
ENVIRONMENT :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := .venv/bin/python
ENVIRONMENT := .venv/installed
export PATH := $(CURDIR)/.venv/bin:$(PATH)
endif
# Tests and ranks are hundreds of processes: images that forbid bytecode would let each compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

GPUS = $(filter-out 0,$(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU'))
RANKS ?= $(or $(GPUS),2)
CORES := $(shell cores=$$(nproc 2>/dev/null || echo 1); echo $$((cores < 8 ? cores : 8)))
JOBS ?= $(if $(GPUS),0,$(CORES))
GPU_JOBS ?= $(CORES)
ARGS ?=
BENCH ?= $(sort $(wildcard benchmarks/bench_*.py))
PIP := PYTHONWARNINGS=ignore .venv/bin/python -m pip --quiet --disable-pip-version-check
BUILT := build/built-for-$(subst /,-,$(PY))

define REQUIRE_GPU
import sys
from minidl import backend
try:
    backend.get_ops("cuda").require_device()
except (ImportError, RuntimeError) as error:
    print(f"make test-gpu: {error}", file=sys.stderr)
    sys.exit(2)
endef
export REQUIRE_GPU

define REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = (project["optional-dependencies"][name] for name in sys.argv[1].split(","))
print(*project["dependencies"], *sum(extras, []), sep="\n")
endef
export REQUIREMENTS

.PHONY: help env build train test test-gpu sanitize test-mpi lint format bench docs report clean distclean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

env: $(ENVIRONMENT) ## create .venv and install what minidl needs here

build: $(BUILT) ## compile the Cython core in place

train: $(BUILT) ## train ResNet-20 on the digits images, data-parallel over RANKS ranks
	@$(PY) -m minidl.launch -n $(RANKS) scripts/train.py --model resnet20 --data digits $(ARGS)

test: $(BUILT) ## every test; those that need a GPU or a peer skip themselves where there is none
	@workers=$$($(PY) -c 'import xdist' 2>/dev/null && echo "-n $(JOBS) --dist worksteal"); \
	$(PY) -m pytest $$workers $(ARGS)

test-gpu: $(BUILT) ## the tests that need a GPU: by several workers, then those that need it to themselves
	@$(PY) -c "$$REQUIRE_GPU"
	@workers=$$($(PY) -c 'import xdist' 2>/dev/null && echo "-n $(GPU_JOBS) --dist worksteal"); failed=0; none=0; \
	for laws in "gpu and not alone and not multi_gpu" "gpu and (alone or multi_gpu)"; do \
		MINIDL_SHARE_GPUS=1 $(PY) -m pytest $$workers -m "$$laws" $(ARGS); status=$$?; workers=; \
		case $$status in 0) ;; 5) none=$$((none + 1));; *) failed=1;; esac; \
	done; test $$failed = 0 -a $$none -lt 2

sanitize: $(BUILT) ## a few cases of each law of the kernels under compute-sanitizer's memcheck and racecheck
	@$(PY) scripts/sanitize.py $(ARGS)

test-mpi: $(BUILT) ## the tests that start several ranks
	@$(PY) -m pytest -m mpi $(ARGS)

lint: $(ENVIRONMENT) ## ruff and cython-lint
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@PATH="$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$$PATH" cython-lint minidl

format: $(ENVIRONMENT) ## let ruff put the sources into shape
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

bench: $(BUILT) ## run the benchmarks (BENCH=benchmarks/bench_conv.py for one; docs/benchmarks.md has a command per table)
	@for script in $(BENCH); do echo "$$script"; $(PY) "$$script" $(ARGS) || exit 1; done

docs: $(BUILT) ## the documentation as a site, in build/docs
	@$(PY) -m sphinx -W --keep-going -q -b html docs build/docs && echo build/docs/index.html

report: $(BUILT) ## make the tables and pictures of README.md and docs/ from benchmarks/results/
	@$(PY) benchmarks/report.py --pictures

clean: ## remove everything built, keep .venv
	@rm -rf build minidl/build dist ./*.egg-info .pytest_cache .ruff_cache .hypothesis
	@find $(wildcard minidl tests benchmarks scripts) \( -name '*.so' -o -name '*.pyc' \) -delete
	@rm -f minidl/*/_*.c

distclean: clean ## remove .venv too
	@rm -rf .venv

# The machine's own MPI is taken when it can be built against, else one from wheels; the CUDA wheels follow the driver.
# The extensions are compiled by the Cython and against the NumPy that stay, while pip fetches the other packages; those
# get no bytecode before they are imported, which would take 20 s.
.venv/installed: pyproject.toml
	@for python in python3 python3.14 python3.13 python3.12 python3.11 none; do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	done; \
	if [ "$$python" = none ]; then echo "minidl needs Python 3.11 or newer; none was found on the PATH" >&2; exit 1; fi; \
	echo "environment: .venv from $$("$$python" --version)"; \
	[ -x .venv/bin/python ] || "$$python" -m venv .venv
	@extras=cli,data,plot,tensorboard,dev; \
	if command -v mpicc >/dev/null && command -v mpiexec >/dev/null; then mpi=mpi; else mpi=mpi-wheel; fi; \
	case $$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA[A-Za-z ]*Version *: *([0-9]+)\..*/\1/p' | head -n 1) in \
		'' | [0-9] | 1[01]) cuda=nvrtc ;; \
		12) cuda=cuda12 ;; \
		*) cuda=cuda13 ;; \
	esac; \
	echo "environment: pip install --editable .[$$extras,$$mpi,$$cuda]"; \
	$(PIP) install --upgrade pip 'setuptools>=77' 'cython>=3.1' 'numpy>=2.0' && \
	.venv/bin/python -c "$$REQUIREMENTS" "$$extras,$$mpi,$$cuda" >.venv/requirements.txt || exit; \
	.venv/bin/python setup.py --quiet build_ext --inplace & \
	$(PIP) install --no-compile --requirement .venv/requirements.txt && wait $$! && \
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(BUILT): $(ENVIRONMENT) setup.py $(wildcard minidl/*/*.pyx minidl/*/*.pxd minidl/*/*.h)
	@mkdir -p build
	@echo "build: the Cython core, with $$($(PY) --version)"
	@$(PY) setup.py --quiet build_ext --inplace
	@touch $@
