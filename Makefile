# Every command of the project. Each makes what it needs: .venv, the pinned requirements, the libraries.
#
# PYTHON=python3.12          the interpreter .venv is made with (3.10 to 3.13; default python3)
# TORCHSPARSE_REC_CUDA=0|1   whether to build the CUDA library (default: if torch has CUDA and nvcc is found)
# VERBOSE=1                  print the compiler's commands, not only the names of the files
# ARGS="..."                 more arguments for ncf, wide-deep, dlrm, distributed, test, test-full and bench; for gpu, of its pytest;
#                            for mutate, which faults: python, cpu, cuda; for clients, parts of names (default all)
# OUT=folder                 where `make gpu` leaves its results (default benchmarks/results/gpu)
# PREBUILT=folder            for gpu: take _C.so and _C_cuda.so from there instead of building them (default: what
#                            `make prebuilt` made, if csrc is as it was; PREBUILT= builds)
# MINUTES=9.7                for gpu: the time for everything
# UNTIL=seconds since 1970    for test and sanitize: then no slow test begins, and under sanitizers only a sample
# TORCH=2.11.0               for test-torch: which
# DIST=folder                where `make wheel` leaves what it has built (default dist)

PYTHON_GIVEN := $(filter-out undefined,$(origin PYTHON))
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
FORMATTED_CPP = $(shell find csrc tests/emulation tests/ops/thread_sanitizer -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PYTEST := $(BIN)/python -m pytest -o faulthandler_exit_on_timeout=true
BUILT := $(VENV)/.built-$(or $(TORCHSPARSE_REC_CUDA),auto)
OUT ?= benchmarks/results/gpu
DIST ?= dist
TORCH ?= 2.11.0
KERNELS_SUM = find csrc -type f | LC_ALL=C sort | xargs cat | sha256sum
PREBUILT ?= $(if $(filter-out -,$(filter $(shell $(KERNELS_SUM)),$(shell cat build/prebuilt/csrc.sum 2>/dev/null))),build/prebuilt/torchsparse_rec)

# Where Python may not keep what it compiles, as in some containers, each process that imports the package compiles all
# of it, and each of pytest's all tests. A planted fault may have the size and, within a second, the time of another.
unexport PYTHONDONTWRITEBYTECODE
mutate: export PYTHONDONTWRITEBYTECODE = 1

# For test and sanitize: test files that a change has touched, separated by commas, as .ci/touched.py prints them.
TOUCHED ?=

# What `make sanitize` runs: the operators' tests, but for those that spend their time in torch (compilation, opcheck),
# ask for gigabytes, of which the sanitizer would write an eighth, or take the kernels nowhere new: layouts that are
# copied first, second derivatives, the widest of the long bags, processes of their own.
NOT_SANITIZED_FILES = autograd capturing determinism export func instruction_sets registrations thread_sanitizer vmap
SANITIZED_TESTS = tests/ops $(NOT_SANITIZED_FILES:%=--ignore=tests/ops/test_%.py)
SANITIZED_VARIABLE_TESTS = $(patsubst %,tests/variable/test_%.py,embedding_variable cases machine states lookup_sparse)
NOT_SANITIZED = not compile and not opcheck and not 2_to_the and not tensorflow and not layout_of_inputs and \
  not gradients_of_gradients and not (gradients_of_weights and 132) and not no_temporary
# Emulated kernels run on one thread.
NOT_SANITIZED_EMULATED = $(NOT_SANITIZED) and not number_of_threads

.PHONY: help ncf wide-deep dlrm distributed test test-full clients tiers sanitize sanitize-cpu sanitize-emulated races mutate lint format \
  bench docs gpu prebuilt test-torch wheel wheel-environments requirements build clean FORCE
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

help:
	@echo "make ncf        train NCF on MovieLens and print HR@10 and NDCG@10"
	@echo "make wide-deep  train Wide & Deep on generated examples and print AUC and log loss"
	@echo "make dlrm       train DLRM on generated examples of Criteo's shape and print AUC and log loss"
	@echo "make distributed train DLRM so on two processes, over which its tables are split"
	@echo "make test       run the tests"
	@echo "make test-full  run them all, also those too long for every day, and make sanitize"
	@echo "make clients    try what other programs make of our tables, and write docs/clients.md"
	@echo "make tiers      choose the tests of every day anew, by what make test-full has measured"
	@echo "make sanitize   run the CPU's and the emulated CUDA kernels under AddressSanitizer and UBSan"
	@echo "make races      run the emulated CUDA kernels so that races between their threads are found"
	@echo "make mutate     plant faults in Python and the kernels, one at a time: each must turn the tests red"
	@echo "make bench      time the operators, the embeddings and NCF beside their peers"
	@echo "make docs       write docs/operators.md, and the documentation's site to build/site"
	@echo "make gpu        build, test, check and time on this machine's NVIDIA GPU, with PYTHON's own torch"
	@echo "make prebuilt   compile for an H100 or H200 what make gpu then need not"
	@echo "make test-torch collect all tests and run some with another torch: TORCH=2.10.0"
	@echo "make wheel      build the wheel to be handed on; with TORCHSPARSE_REC_CUDA=1 that of the CUDA kernels too"
	@echo "make wheel-environments try the wheel in new environments, with each torch from 2.10 on"
	@echo "make lint       check the code's form and types (make format mends the form)"
	@echo "make build      make .venv with the libraries in it"
	@echo "make clean      remove .venv and everything built"

ncf: $(BUILT) $(VENV)/.examples
	$(BIN)/python -m torchsparse_rec.examples.ncf $(ARGS)

wide-deep: $(BUILT) $(VENV)/.examples
	$(BIN)/python -m torchsparse_rec.examples.wide_deep $(ARGS)

dlrm: $(BUILT) $(VENV)/.examples
	$(BIN)/python -m torchsparse_rec.examples.dlrm $(ARGS)

distributed: $(BUILT) $(VENV)/.examples
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node 2 -m torchsparse_rec.examples.dlrm \
	  --samples 131072 --held-out 16384 --max-cardinality 100000 $(ARGS)

# What is daily, and all of what has been touched.
test: $(BUILT) $(VENV)/.test $(VENV)/.tensorflow
	$(PYTEST) -m "not full and (touched or not slow)" --touched "$(TOUCHED)" $(if $(UNTIL),--until $(UNTIL)) \
	  -n auto --dist worksteal $(ARGS)

# Whatever is committed has passed: what changes later is tested against it.
test-full: $(BUILT) $(VENV)/.test $(VENV)/.tensorflow $(VENV)/.clients
	$(PYTEST) --costs .cache/costs.txt -n auto --dist worksteal
	$(MAKE) -j2 -Otarget sanitize ARGS=-q
	@if [ -n "$$(git status --porcelain)" ]; then echo "not all is committed: .ci/full stays as it is"; \
	else git rev-parse HEAD > .ci/full && echo "everything has passed: .ci/full names this commit; commit it"; fi

clients: $(BUILT) $(VENV)/.test $(VENV)/.clients
	PYTHONPATH=tests $(BIN)/python -m clients $(ARGS)

tiers:
	$(BIN)/python tests/tiers.py .cache/costs.txt

# Both sanitizers and the C++ runtime must be in the process before Python loads the first extension. What a sanitizer
# writes before it ends the process must not be captured. What is too large to be had is an error, not a fault. The
# sanitized libraries lie beside the ordinary ones: the CPU's is tested with the loops of every instruction set that the
# machine has, then the emulated CUDA kernels.
SANITIZERS = $(foreach library,libasan libubsan libstdc++,$(shell $(CXX) -print-file-name=$(library).so))
EMPTY :=
SANITIZED = ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0:allocator_may_return_null=1:max_allocation_size_mb=2048 \
  LD_PRELOAD="$(subst $(EMPTY) ,:,$(SANITIZERS))" $(PYTEST) --capture=sys \
  -m "not full and not slow$(if $(TOUCHED), and (touched or representative))" --touched "$(TOUCHED)" \
  $(if $(UNTIL),--until $(UNTIL) --sample)
sanitize: sanitize-cpu sanitize-emulated races

# All tests with the loops of the machine's best instruction set, the operators' meaning with those of the others.
sanitize-cpu: $(BUILT) $(VENV)/.test
	TORCHSPARSE_REC_SANITIZE=1 $(BIN)/python setup.py -q build_ext
	for level in baseline avx2 avx512; do \
	  echo "== CPU, $$level"; \
	  if [ $$level = avx512 ]; then tests="$(SANITIZED_TESTS) $(SANITIZED_VARIABLE_TESTS)" only="$(NOT_SANITIZED)"; \
	  else tests="tests/ops/test_operators.py" only="equals_reference"; fi; \
	  TORCHSPARSE_REC_CPU=$$level TORCHSPARSE_REC_LIBRARY=$(CURDIR)/build/sanitized/torchsparse_rec/_C.so \
	    $(SANITIZED) $$tests -k "not emulat and $$only" $(ARGS) || exit 1; \
	done

sanitize-emulated: $(BUILT) $(VENV)/.test
	PYTHONPATH=tests TORCHSPARSE_REC_EMULATED_SANITIZE=1 $(BIN)/python -c 'from emulation.build import build; build()'
	TORCHSPARSE_REC_EMULATED_SANITIZE=1 $(SANITIZED) tests/emulation $(SANITIZED_TESTS) \
	  -k "emulat and $(NOT_SANITIZED_EMULATED)" $(ARGS)

# The emulation's tests and a sample of each kind of all operators, with kernels built so that races are found.
races: $(BUILT) $(VENV)/.test
	PYTHONPATH=tests TORCHSPARSE_REC_EMULATED_RACES=1 $(BIN)/python -c 'from emulation.build import build; build()'
	TORCHSPARSE_REC_EMULATED_RACES=1 $(PYTEST) tests/emulation tests/ops/test_operators.py -m "not full and not slow" \
	  $(if $(UNTIL),--until $(UNTIL) --sample) -k "emulation or (emulated and equals_reference and not reference_too)" \
	  $(ARGS)

mutate: $(BUILT) $(VENV)/.test
	$(BIN)/python tests/mutations/plant.py $(ARGS)

bench: $(BUILT) $(VENV)/.test $(VENV)/.tensorflow $(VENV)/.bench $(VENV)/.torchrec
	$(BIN)/python -m benchmarks $(ARGS)

# What is a warning is an error: links that lead nowhere, pages that no table of contents names.
docs: $(BUILT) $(VENV)/.test $(VENV)/.docs $(VENV)/.tensorflow
	PYTHONPATH=tests $(BIN)/python docs/_operators.py
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/site-cache . build/site
	@echo "build/site/index.html"

build: $(BUILT)

# All that CI downloads, in a step of its own.
requirements: $(VENV)/.requirements $(VENV)/.test $(VENV)/.docs $(VENV)/.tensorflow

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED_CPP)
	$(BIN)/mypy
	$(BIN)/mypy tests/project/uses_of_types.py
	$(BIN)/basedpyright

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED_CPP)

# With PYTHON given, a .venv of another interpreter is made anew; its stamps go with it.
$(VENV)/.created: $(if $(PYTHON_GIVEN),FORCE)
	@version=$$($(PYTHON) -c 'import sys; print(sys.version.split()[0], "in", sys.base_prefix)') || exit 1; \
	test "$$version" = "$$(cat $@ 2>/dev/null)" && exit 0; \
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is Python $$version; 3.10 to 3.13 is needed: make PYTHON=/path/to/python3.12 ..."; exit 1; }; \
	$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian and Ubuntu:" \
	    "apt install python3-venv), or choose another: make PYTHON=/path/to/python3.12 ..."; exit 1; }; \
	$(PYTHON) -m venv --clear $(VENV) && echo "$$version" > $@

$(VENV)/.requirements: requirements/build.txt requirements/constraints.txt $(VENV)/.created
	$(PIP) install -q -r requirements/build.txt
	@touch $@

$(BUILT): $(shell find csrc -type f) setup.py pyproject.toml $(VENV)/.requirements
	@command -v $${CXX:-c++} > /dev/null || \
	  { echo "no C++ compiler: install g++ 9 or later (Debian and Ubuntu: apt install g++), or set CXX"; exit 1; }
	@# First by itself: in pip's report the compiler's message drowns.
	$(BIN)/python setup.py -q build_ext --inplace
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.examples $(VENV)/.test $(VENV)/.docs $(VENV)/.wheel: $(VENV)/.%: requirements/%.txt requirements/constraints.txt $(VENV)/.requirements
	$(PIP) install -q -r $<
	@touch $@

# TensorFlow, FBGEMM and clients are wanted, not needed: where one has no wheel, what compares with it says so.
$(VENV)/.tensorflow $(VENV)/.bench $(VENV)/.clients: $(VENV)/.%: requirements/%.txt requirements/constraints.txt $(VENV)/.requirements
	$(PIP) install -q --only-binary=:all: -r $< || \
	  echo "$< could not be installed: going on without it"
	@touch $@

$(VENV)/.torchrec: requirements/torchrec.txt requirements/constraints.txt $(VENV)/.requirements
	$(PIP) install -q --no-deps -r $< || echo "$< could not be installed: going on without it"
	@touch $@

# No .venv and no network: a machine with a GPU often has its own torch. benchmarks/gpu.py says what it does.
gpu:
	@$(PYTHON) -m benchmarks.gpu --out "$(abspath $(OUT))" $(if $(PREBUILT),--prebuilt "$(PREBUILT)") \
	  $(if $(MINUTES),--minutes $(MINUTES)) -- $(ARGS)

# As small as such a machine's door may be.
prebuilt: $(VENV)/.requirements
	TORCHSPARSE_REC_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0 $(BIN)/python setup.py -q build_ext --build-lib build/prebuilt
	@size=$$(cat build/prebuilt/torchsparse_rec/*.so | wc -c); echo "build/prebuilt: $$size bytes"; \
	[ $$size -le 64000000 ] || { echo "more than 64 MB: too large to be carried"; exit 1; }
	@$(KERNELS_SUM) > build/prebuilt/csrc.sum

# The library as it is built, with another torch and what else is pinned, but for setuptools, which torch chooses; the
# environment goes afterwards.
OTHER := build/torch
test-torch: $(BUILT)
	@set -e; trap 'rm -rf $(OTHER)' EXIT; rm -rf $(OTHER); mkdir -p $(OTHER)/requirements; \
	cp -r torchsparse_rec $(OTHER); rm -rf $(OTHER)/torchsparse_rec/compat; cp -r compat $(OTHER)/torchsparse_rec; \
	for file in requirements/*.txt; do \
	  sed 's/^torch==.*/torch==$(TORCH)/; /^setuptools==/d' $$file > $(OTHER)/$$file; \
	done; \
	$(BIN)/python -m venv $(OTHER)/.venv; \
	$(OTHER)/.venv/bin/python -m pip --disable-pip-version-check install -q -r $(OTHER)/requirements/test.txt; \
	export PYTHONPATH=$(CURDIR)/$(OTHER); pytest="$(OTHER)/.venv/bin/pytest -q"; \
	$$pytest --collect-only > $(OTHER)/collected.txt || { tail -50 $(OTHER)/collected.txt; exit 1; }; \
	tail -1 $(OTHER)/collected.txt; \
	$$pytest -n auto -m "representative and not slow" -k "not emulat" $(ARGS)

wheel: $(BUILT) $(VENV)/.wheel
	$(BIN)/python .ci/make_wheel.py $(DIST)

# Of what is in DIST. Gigabytes are downloaded for each torch, and removed.
wheel-environments:
	$(PYTHON) .ci/wheel_environments.py $(DIST) $(ARGS)

clean:
	rm -rf $(VENV) build dist docs/reference *.egg-info torchsparse_rec/*.so
