# Everything runs in .venv, which the first target that needs it makes.
#
#   make demo     train on real images in two processes; table and demo.png
#   make test     the test suite against the installed wheel
#   make lint     ruff, mypy, clang-format; zizmor for the workflows
#   make example  replicas in threads, on the CPU
#   make docs     the documentation as a site, in site/
#   make bench    CPU kernels, host time and import time against PyTorch's
#   make gpu-test build, tests and sanitizers on a machine with a GPU, in its own Python
#
#   make wheel        the wheel that `make test` tests, checked for release, in dist/
#   make check-wheel  it in fresh environments, one with each PyTorch of CHECK_TORCH
#   make wheels       the release wheels of one variant (CUDA=13 or 12), built in containers

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
# What `make test` runs on (with another one than before: `make clean` first), and what `make
# check-wheel` does.
TORCH ?= torch>=2.10
CHECK_TORCH ?= torch==2.13.0 torch==2.14.1
CUDA ?= 13
SOURCES := setup.py pyproject.toml MANIFEST.in README.md LICENSE \
  $(shell find csrc src/syncbn -type f -not -name '*.pyc' -not -name '*.so')
# Building twice gives the same wheel: the files in it are as old as the commit.
export SOURCE_DATE_EPOCH ?= $(or $(shell git log -1 --format=%ct 2>/dev/null),315532800)
CXX_SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.h' -o -name '*.cuh')

# Stamps of what has been installed into the environment. $(call group,test) installs a dependency group of pyproject.toml.
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
group = $(BIN)/pip install -q --group $(1)

.PHONY: demo test example lint format docs bench wheel sdist gpu-test clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade 'pip>=25.1'
	$(call group,test)
	$(call group,wheel)
	$(BIN)/pip install -q '$(TORCH)' ninja
	touch $@

# The wheel is built in the environment that it is installed into, against its PyTorch.
# Without --plat, auditwheel takes the oldest platform tag that the wheel qualifies for: that of this
# machine's glibc. Wheels for manylinux_2_28 come from its container (make wheels).
$(INSTALLED): $(READY) $(SOURCES)
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . > $(VENV)/build.log 2>&1 \
	  || { cat $(VENV)/build.log; exit 1; }
	grep -m1 '^syncbn:' $(VENV)/build.log
ifeq ($(shell uname),Linux)
	PATH="$(BIN):$$PATH" auditwheel repair --wheel-dir dist build/wheel/syncbn-*.whl
else
	mkdir -p dist && cp build/wheel/syncbn-*.whl dist
endif
	$(BIN)/pip install -q --force-reinstall --no-deps dist/syncbn-*.whl
	touch $@

$(VENV)/.demo: $(INSTALLED)
	$(call group,demo)
	touch $@

$(VENV)/.lint: $(READY)
	$(call group,lint)
	touch $@

$(VENV)/.docs: $(READY)
	$(call group,docs)
	touch $@

demo: $(VENV)/.demo
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/train.py --output demo.png

test: $(INSTALLED)
	SYNCBN_WHEEL="$$(ls dist/syncbn-*.whl)" $(BIN)/python -m pytest

example: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python examples/data_parallel.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/zizmor --offline --quiet .github

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

# Strict: a broken link or a name that is not there is an error. The API reference is made from the sources.
docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict --site-dir site

bench: $(INSTALLED)
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/host.py
	$(BIN)/python benchmarks/import_time.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/replicas.py

gpu-test:
	bash tests/gpu.sh

wheel: $(INSTALLED)
	PATH="$(BIN):$$PATH" .ci/check-dist dist/syncbn-*.whl

.PHONY: check-wheel wheels
check-wheel: $(INSTALLED)
	PYTHON=$(PYTHON) .ci/check-wheel dist/syncbn-*.whl $(foreach torch,$(CHECK_TORCH),'$(torch)')

# Needs Docker on Linux. cibuildwheel's version stands for those of the containers and interpreters.
wheels:
	$(PYTHON) -m venv build/cibuildwheel
	build/cibuildwheel/bin/pip install -q cibuildwheel==4.3.5
	CIBW_BEFORE_ALL_LINUX='bash .ci/cuda-toolkit $(CUDA)' build/cibuildwheel/bin/cibuildwheel --output-dir dist

sdist: $(READY)
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .

clean:
	rm -rf build dist site $(VENV) src/*.egg-info
