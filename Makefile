# Everything a fresh machine needs to train, test and check this project. It asks for Python 3.11
# or later, make, git and a C++ compiler, and installs all else into $(VENV), in this folder.

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
ARGS ?=
export MAX_JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
unexport PYTHONDONTWRITEBYTECODE  # see INSTALL
SHELL = bash
.SHELLFLAGS = -o pipefail -c

BIN = $(VENV)/bin
CXX_SOURCES = $(wildcard $(foreach kind,cpp h cu cuh,csrc/*.$(kind) csrc/*/*.$(kind) csrc/*/*/*.$(kind)))
CXX_TESTS = $(wildcard tests/*/*.cpp tests/*/*/*.cpp tests/*/*/*.h)
BUILD_SOURCES = setup.py pyproject.toml $(CXX_SOURCES)
PACKAGE_SOURCES = $(wildcard $(addprefix deepcompile_zero3/,*.py */*.py */*/*.py */*.html))

.PHONY: help train test test-more test-all test-torch test-gpu check-cuda sanitize bench bench-docs bench-gpu \
  wheel check-wheel sdist docs lint clean
.DELETE_ON_ERROR:

help:
	@echo 'make train [ARGS="--steps 500 --ranks 4 --model gpt2"]   train a small transformer'
	@echo 'make test [ARGS="-k gather"]                             run the tests; ten minutes'
	@echo 'make test-more                                           those that CI runs beside them; nine minutes'
	@echo 'make test-all                                            all, before a release; about an hour'
	@echo 'make test-torch TORCH=2.15.0                             smoke-test another torch'
	@echo 'make check-cuda                                          build for GPUs, with or without one'
	@echo 'make test-gpu                                            test on the GPU of this machine'
	@echo 'make sanitize [SANITIZERS=thread]                        look for memory errors or races in csrc/'
	@echo 'make bench [ARGS="-w A -m floor,zero3"]                  compare with others; under an hour'
	@echo 'make bench-docs [ARGS="--match deep"]                    measure tables of docs/ again; hours'
	@echo 'make bench-gpu [ARGS="--model 3b"]                       measure on a GPU; under 9 minutes'
	@echo 'make wheel                                               a wheel for every torch, into dist/; minutes'
	@echo 'make check-wheel                                         install it beside each torch, and train'
	@echo 'make sdist                                               the sources, into dist/'
	@echo 'make docs                                                build the site of docs/, into build/docs'
	@echo 'make lint                                                check style and types'
	@echo 'make clean                                               remove what make made'
	@echo 'PYTHON=python3.12 chooses the interpreter, TORCH=2.15.0 the version of torch.'

train: $(VENV)/.installed
	$(BIN)/python examples/train.py $(ARGS)

# Two workers more than there are cores, since ranks often wait, but at most one for 2 GB of free memory,
# or eight. One that is done takes tests of the others.
WORKERS ?= $(shell awk -v cores=$$(getconf _NPROCESSORS_ONLN) '/^MemAvailable/ \
  {n = cores + 2; if (n > 8) n = 8; if (n > $$2 / 2e6) n = $$2 / 2e6; print n < 1 ? 1 : int(n)}' /proc/meminfo)
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal
# Of a copy that is installed in an environment of its own: from tests/, where no import can find the
# source tree. An editable install would put a runtime for that torch where the everyday one is looked for.
PYTEST_OF_COPY = cd tests && $(subst $(BIN),../$(BIN),$(PYTEST))
test: $(VENV)/.installed $(VENV)/.extra-test
	$(PYTEST) -m "not more and not long" $(ARGS)

test-more: $(VENV)/.installed $(VENV)/.extra-test
	$(PYTEST) -m "more and not long" $(ARGS)

test-all: $(VENV)/.installed $(VENV)/.extra-test
	$(PYTEST) $(ARGS)

test-torch: VENV = .venv-torch-$(TORCH)
# Few tests, and each worker starts ranks of its own.
test-torch check-cuda: WORKERS = 2
test-torch:
	$(MAKE) VENV=$(VENV) $(VENV)/.installed-copy
	$(PYTEST_OF_COPY) -m smoke $(ARGS)

# The runtime with its kernels for GPUs, on a machine that need not have one. torch's wheel for CUDA
# brings most of the headers and libraries, and a toolkit, CUDA_HOME, the compiler and the rest. Here
# each source is compiled by itself, and fails if it does not include what it uses. ZERO3_UNITS=1
# compiles a folder at a time, without that check and in half of the time.
CUDA_HOME ?= /usr/local/cuda
check-cuda: VENV = .venv-cuda
check-cuda: TORCH = 2.15.0
check-cuda: export TORCH_CUDA_ARCH_LIST ?= 8.0;9.0;10.0
check-cuda: export ZERO3_UNITS ?= 0
check-cuda:
	@test -x $(CUDA_HOME)/bin/nvcc || \
	  { echo "there is no $(CUDA_HOME)/bin/nvcc: make check-cuda CUDA_HOME=..." >&2; exit 1; }
	$(MAKE) VENV=$(VENV) TORCH=$(TORCH) $(VENV)/.torch-$(TORCH)
	wheel=$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages/nvidia/cu13) && \
	  CUDA_HOME=$(CUDA_HOME) CPATH=$$wheel/include LIBRARY_PATH=$$wheel/lib \
	  ZERO3_CUDA=1 ZERO3_WERROR=1 \
	  $(MAKE) VENV=$(VENV) TORCH=$(TORCH) $(VENV)/.installed-copy
	$(PYTEST_OF_COPY) -m "smoke or cuda_build" $(ARGS)

# The sanitizer watches our kernels only, and each tensor has memory of its own, past which it sees.
# Calls that torch makes to learn what a driver can do are not errors.
GPU_TESTS = runtime/test_gpu.py runtime/test_copy.py runtime/test_cuda_build.py \
  features/offload/test_gpu_activations.py
GPU_SANITIZER_FLAGS = --error-exitcode 1 --report-api-errors no --kernel-name kns=zero3
test-gpu: $(VENV)/.installed $(VENV)/.extra-test
	$(BIN)/python -c 'import sys, torch; from deepcompile_zero3.runtime import _C; \
	  sys.exit(None if torch.cuda.is_available() and _C.WITH_CUDA else "there is no GPU, or \
	  the runtime was built without CUDA: make clean, and ZERO3_CUDA=1 CUDA_HOME=... make test-gpu")'
	$(BIN)/pytest $(addprefix tests/,$(GPU_TESTS)) $(ARGS)
	@sanitizer=$$(PATH="$$PATH:$(CUDA_HOME)/bin" command -v compute-sanitizer) || \
	  { echo "compute-sanitizer is neither on PATH nor in $(CUDA_HOME)/bin: not run"; exit 0; }; \
	$$sanitizer $(BIN)/python -c 'import torch; torch.ones(1).cuda()' >/dev/null || \
	  { echo "compute-sanitizer cannot watch this GPU: not run"; exit 0; }; \
	for tool in memcheck racecheck; do \
	  echo "$$sanitizer --tool $$tool"; \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $$sanitizer --tool $$tool $(GPU_SANITIZER_FLAGS) \
	    $(BIN)/python -m pytest tests/runtime/test_copy.py -m gpu || exit; \
	done

# A runtime that sanitizers watch, in an environment of its own: AddressSanitizer together with
# UndefinedBehaviorSanitizer, or with SANITIZERS=thread, ThreadSanitizer. Python was not built with
# them, so they are loaded ahead of it. What they cannot tell here: a leak, since Python and torch
# never free some memory; memory that one C++ library allocates with new and another frees, which
# torch's wheels do; whether two libraries define the same thing, which those of torch do; races on
# memory that only torch or Python touches, or between processes, for which
# tests/transports/one_host_random/ looks. ThreadSanitizer slows compilers down: ARGS='-m "not
# more and not long"' leaves Inductor out. If it ends with "unexpected memory mapping", run make under
# setarch -R.
SANITIZERS ?= address,undefined
SANITIZER_LIBRARIES = $(patsubst address,asan,$(patsubst undefined,ubsan,$(patsubst thread,tsan,\
  $(subst $(COMMA), ,$(SANITIZERS)))))
COMMA = ,
SANITIZED_TESTS = contract/test_contract.py sharding/test_sizes.py sharding/test_gather_order.py whole/test_fuzz.py \
  $(patsubst %,runtime/test_%.py,missing_gradients gradients_ahead threads disagreements large_gradients \
  reduction_stress) $(patsubst %,transports/test_%.py,one_host one_host_graphs host_exchange) \
  features/streaming/test_reuse.py features/streaming/test_stream.py \
  faults/test_signals.py $(patsubst %,features/offload/test_file_%.py,tier offload offload_plan)
sanitize: VENV = .venv-sanitize-$(subst $(COMMA),-,$(SANITIZERS))
sanitize:
	ZERO3_SANITIZE=$(SANITIZERS) $(MAKE) VENV=$(VENV) $(VENV)/.installed-copy
	cd tests && OMP_NUM_THREADS=1 \
	  LD_PRELOAD="$(foreach name,$(SANITIZER_LIBRARIES),$$(g++ -print-file-name=lib$(name).so))" \
	  ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0:abort_on_error=1 \
	  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1:abort_on_error=1 \
	  TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 \
	  ../$(BIN)/pytest $(SANITIZED_TESTS) $(ARGS)

bench: $(VENV)/.installed $(VENV)/.extra-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m bench $(ARGS)

bench-docs: $(VENV)/.installed $(VENV)/.extra-bench
	OMP_NUM_THREADS=1 $(BIN)/python -m bench docs $(ARGS)

bench-gpu: $(VENV)/.installed $(VENV)/.extra-bench
	$(BIN)/python -m bench gpu $(ARGS)

# One wheel with a runtime for each of these torches, which is chosen at import. A runtime is built
# against the first version of a release and serves the later ones. Of a torch, its headers and three
# libraries are unpacked, whatever it was built for: the wheel's runtimes are for CPUs. auditwheel
# finds the oldest glibc that the wheel runs on. Python's own flags may link with a folder of this
# machine, hence LDCXXSHARED.
WHEEL_TORCHES ?= 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
CHECKED_TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
WHEEL_FOLDERS = $(WHEEL_TORCHES:%=build/torch/%)
wheel: $(VENV)/.extra-wheel $(WHEEL_FOLDERS:%=%/.unpacked)
	rm -rf build/lib* build/bdist* build/wheel
	@echo "building the C++ runtime for torch $(WHEEL_TORCHES): minutes for each"
	@ZERO3_TORCHES="$(WHEEL_FOLDERS)" LDCXXSHARED="$(CXX) -shared" $(BIN)/pip wheel --verbose \
	  --no-deps --no-build-isolation --wheel-dir build/wheel . $(BRIEFLY)
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'lib*torch*.so' --exclude libc10.so \
	  --only-plat --wheel-dir dist build/wheel/*.whl

build/torch/%/.unpacked: | $(VENV)/.torch-$(TORCH)
	mkdir -p $(@D)
	$(BIN)/pip download --no-deps --progress-bar off --dest $(@D) torch==$*
	$(BIN)/python -c 'import glob, re, zipfile; \
	  wheel = zipfile.ZipFile(*glob.glob("$(@D)/*.whl")); \
	  wanted = re.compile("torch/include/|torch/lib/lib(c10|torch_cpu|torch_python)[.]so"); \
	  wheel.extractall("$(@D)", filter(wanted.match, wheel.namelist()))'
	rm $(@D)/*.whl
	touch $@

# Each torch in turn has an environment without a compiler. One for CUDA takes 6 GB of disk meanwhile.
check-wheel: wheel
	$(BIN)/python bench/wheels.py $$(ls -t dist/*.whl | head -n 1) $(CHECKED_TORCHES)

sdist: $(VENV)/.extra-wheel
	$(BIN)/python -m build --sdist --no-isolation

docs: $(VENV)/.installed $(VENV)/.extra-docs
	$(BIN)/sphinx-build --fresh-env --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html is the first page"

lint: $(VENV)/.installed $(VENV)/.extra-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES) $(CXX_TESTS)

clean:
	rm -rf .venv .venv-torch-* .venv-cuda .venv-sanitize-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f deepcompile_zero3/*.so
	find deepcompile_zero3 tests examples bench -name __pycache__ -prune -exec rm -rf {} +

# The stamps. Another version of torch is another stamp, and begins the environment anew.

# pip says a page for each package: here, a line for each that it brings and each source that is
# compiled. All of it is in a log, whose end is shown if something fails.
LOG = $(VENV)/$(@F).log
# Python compiles what is imported, once; pip would compile all modules of torch and transformers.
INSTALL = PYTHONUNBUFFERED=1 $(BIN)/pip install --progress-bar off --no-compile
BRIEFLY = 2>&1 | tee $(LOG) | sed -unE \
  -e 's,^ *(Downloading|Processing|Using cached) (.*/)?([^/ ]+-[0-9][^-/ ]*)(-[^ ]*)?\.(whl|tar\.gz)( \(([0-9.]+ .B)\))?.*,  \3  \7,p' \
  -e 's,^ *(\[[0-9]+/[0-9]+\]) .* -c [^ ]*/(csrc[a-z0-9_/]*\.[a-z]+) .*,  \1 \2,p' || \
  { grep -E '[:)] (fatal )?error: ' $(LOG) | tail -n 20; tail -n 20 $(LOG); \
    echo "failed: all of what was said is in $(LOG)"; exit 1; } >&2

$(VENV)/.torch-$(TORCH):
	@$(PYTHON) -c 'import sys; old = sys.version_info < (3, 11); sys.exit(old and \
	  "$(PYTHON) is Python %d.%d; this project needs 3.11 or later: make PYTHON=..." \
	  % sys.version_info[:2])'
	@echo "torch $(TORCH), into $(VENV): half a minute, or as long as it takes to download"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(INSTALL) "torch==$(TORCH)" "setuptools>=77" wheel ninja $(BRIEFLY)
	@touch $@

# The compiler runs beside pip, and then pip finds the runtime built.
$(VENV)/.installed: $(VENV)/.torch-$(TORCH) $(BUILD_SOURCES)
	@echo "building the C++ runtime, a minute on two cores, and beside it:"
	@$(MAKE) -s -j2 $(VENV)/.built $(VENV)/.extra-train
	@$(INSTALL) --verbose --no-build-isolation --editable . $(BRIEFLY)
	@touch $@

$(VENV)/.built: $(VENV)/.torch-$(TORCH) $(BUILD_SOURCES)
	@$(BIN)/python setup.py build_ext --inplace $(BRIEFLY)
	@touch $@

$(VENV)/.installed-copy: $(VENV)/.torch-$(TORCH) $(BUILD_SOURCES) $(PACKAGE_SOURCES)
	rm -rf build/lib* build/bdist*
	@$(INSTALL) --verbose --no-build-isolation ".[train,test]" $(BRIEFLY)
	@touch $@

# An extra's own list, without the package: naming the extra would build the runtime again.
define INSTALL_EXTRA
	@echo "installing what '$(1)' needs"
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  print(*project["optional-dependencies"]["$(1)"], sep="\n")' >$(VENV)/$(1).txt
	@$(INSTALL) --requirement $(VENV)/$(1).txt $(BRIEFLY)
	@touch $@
endef

$(VENV)/.extra-train: pyproject.toml | $(VENV)/.torch-$(TORCH)
	$(call INSTALL_EXTRA,train)

$(VENV)/.extra-wheel: pyproject.toml | $(VENV)/.torch-$(TORCH)
	$(call INSTALL_EXTRA,wheel)

$(VENV)/.extra-%: pyproject.toml | $(VENV)/.installed
	$(call INSTALL_EXTRA,$*)
