# The commands of the project. Each makes what it needs: .venv, the pinned requirements, the libraries.
#
# PYTHON=python3.12          the interpreter .venv is made with (3.10 to 3.13; default python3)
# TORCHSPARSE_REC_CUDA=0|1   whether to build the CUDA library (default: if torch has CUDA and nvcc is found)
# ARGS="..."                 more arguments for ncf, sasrec, wide-deep, dlrm, distributed, test, test-full and bench

PYTHON_GIVEN := $(filter-out undefined,$(origin PYTHON))
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
FORMATTED_CPP = $(shell find csrc tests/emulation tests/ops/thread_sanitizer -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PYTEST := $(BIN)/python -m pytest -o faulthandler_exit_on_timeout=true
# Compiles the emulated CUDA kernels if a source has changed.
EMULATE := env PYTHONPATH=tests $(BIN)/python -c 'from emulation.build import build; build()'
BUILT := $(VENV)/.built-$(or $(TORCHSPARSE_REC_CUDA),auto)
# Some containers forbid Python to keep what it compiles. Each process would then compile the whole package, and each of
# pytest's processes all tests.
unexport PYTHONDONTWRITEBYTECODE

# For test and sanitize: the test files that a change has touched, separated by commas, as .ci/touched.py prints them.
TOUCHED ?=

# `make sanitize` runs the operators' tests, except those that spend their time in torch (compilation, opcheck), ask for
# gigabytes, an eighth of which the sanitizer would write, or reach no new code of the kernels: second derivatives, the
# widest long bags, separate processes. tests/ops/sample_checks.py leaves out layouts and vmap.
NOT_SANITIZED_FILES = autograd determinism export func instruction_sets registrations thread_sanitizer vmap
SANITIZED_TESTS = tests/ops $(NOT_SANITIZED_FILES:%=--ignore=tests/ops/test_%.py)
SANITIZED_VARIABLE_TESTS = $(patsubst %,tests/variable/test_%.py,embedding_variable cases machine states lookup_sparse)
NOT_SANITIZED = not compile and not opcheck and not 2_to_the and not tensorflow and not gradients_of_gradients and \
  not (gradients_of_weights and 132) and not no_temporary
# Emulated kernels run on one thread.
NOT_SANITIZED_EMULATED = $(NOT_SANITIZED) and not number_of_threads

.PHONY: help ncf sasrec wide-deep dlrm distributed test test-full sanitize sanitize-cpu sanitize-emulated races bench \
  docs build requirements lint format clean FORCE
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

## print this list
help:
	@awk '/^## / { text = substr($$0, 4); next } \
	  text && /^[a-z-]+:/ { sub(":.*", ""); printf "make %-12s %s\n", $$0, text } \
	  { text = "" }' Makefile
	@echo "for releases and for machines with a GPU: .ci/release.mk"

## train NCF on MovieLens and print HR@10 and NDCG@10
ncf: $(BUILT) $(VENV)/.examples
	@echo "by default 30 epochs of ml-100k: about a minute on two cores that are free"
	$(BIN)/python -m torchsparse_rec.examples.ncf $(ARGS)

## train SASRec on MovieLens, ranking all items, and print HR@10 and NDCG@10
sasrec: $(BUILT) $(VENV)/.examples
	@echo "by default 60 epochs of ml-100k: about a minute on two cores that are free"
	$(BIN)/python -m torchsparse_rec.examples.sasrec $(ARGS)

## train Wide & Deep on generated examples and print AUC and log loss
wide-deep: $(BUILT) $(VENV)/.examples
	@echo "by default 3 epochs of 262,144 examples: about a minute on two cores that are free"
	$(BIN)/python -m torchsparse_rec.examples.wide_deep $(ARGS)

## train DLRM on generated examples of Criteo's shape and print AUC and log loss
dlrm: $(BUILT) $(VENV)/.examples
	@echo "by default an epoch of 1,048,576 examples: about 2 minutes on two cores that are free"
	$(BIN)/python -m torchsparse_rec.examples.dlrm $(ARGS)

## train DLRM on two processes, which share its tables
distributed: $(BUILT) $(VENV)/.examples
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node 2 -m torchsparse_rec.examples.dlrm \
	  --samples 131072 --held-out 16384 --max-cardinality 100000 $(ARGS)

# The daily tests, and all tests of what has been touched. Each process collects other files.
## run the daily tests
test: $(BUILT) $(VENV)/.test $(VENV)/.tensorflow
	@echo "the emulated CUDA kernels: 4 minutes on two cores to compile them all, nothing where none has changed"
	$(EMULATE)
	@echo "the daily tests: about 5 minutes on two cores"
	$(PYTEST) -m "not full and (touched or daily)" --touched "$(TOUCHED)" -n auto --dist each $(ARGS)

# A run that passes measures the cost of each test: commit tests/costs.txt.
## run all tests, even those too long for every day, and make sanitize
test-full: $(BUILT) $(VENV)/.test $(VENV)/.tensorflow $(VENV)/.clients
	$(EMULATE)
	$(PYTEST) --costs=.cache/costs.txt -n auto --dist worksteal $(ARGS)
	$(BIN)/python tests/tiers.py .cache/costs.txt
	$(MAKE) -j2 -Otarget sanitize ARGS=-q

# Both sanitizers and the C++ runtime must be in the process before Python loads the first extension. pytest must not
# capture what a sanitizer writes before it ends the process. An allocation that is too large is an error, not a fault.
# The sanitized libraries lie beside the ordinary ones. The CPU's library is tested with the loops of every instruction
# set that the machine has, then the emulated CUDA kernels are.
SANITIZERS = $(foreach library,libasan libubsan libstdc++,$(shell $(CXX) -print-file-name=$(library).so))
EMPTY :=
SANITIZED = ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0:allocator_may_return_null=1:max_allocation_size_mb=2048 \
  LD_PRELOAD="$(subst $(EMPTY) ,:,$(SANITIZERS))" $(PYTEST) --capture=sys \
  -m "not full and not slow$(if $(TOUCHED), and touched)" --touched "$(TOUCHED)"
## run the kernels, the CPU's and the emulated CUDA's, under sanitizers
sanitize: sanitize-cpu sanitize-emulated races

# All tests use the loops of the machine's best instruction set. Only comparisons with the reference use the others'.
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
	$(EMULATE) && TORCHSPARSE_REC_EMULATED_SANITIZE=1 $(EMULATE)
	TORCHSPARSE_REC_EMULATED_SANITIZE=1 $(SANITIZED) tests/emulation $(SANITIZED_TESTS) \
	  -k "emulat and $(NOT_SANITIZED_EMULATED)" $(ARGS)

# The emulation's tests, and a sample of each kind of all operators, with kernels that are built to find races.
races: $(BUILT) $(VENV)/.test
	$(EMULATE) && TORCHSPARSE_REC_EMULATED_RACES=1 $(EMULATE)
	TORCHSPARSE_REC_EMULATED_RACES=1 $(PYTEST) tests/emulation tests/ops/test_operators.py -m "not full and not slow" \
	  -k "emulation or (emulated and equals_reference and not reference_too)" \
	  $(ARGS)

## time the operators, the embeddings and NCF beside their peers
bench: $(BUILT) $(VENV)/.test $(VENV)/.tensorflow $(VENV)/.bench $(VENV)/.torchrec
	$(BIN)/python -m benchmarks $(ARGS)

# A warning is an error: a link that leads nowhere, a page that no table of contents names.
## write docs/operators.md, and the documentation's site to build/site
docs: $(BUILT) $(VENV)/.test $(VENV)/.docs $(VENV)/.tensorflow
	PYTHONPATH=tests $(BIN)/python docs/_operators.py
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/site-cache . build/site
	@echo "build/site/index.html"

## make .venv with the libraries in it
build: $(BUILT)

# All that CI downloads, in a separate step.
requirements: $(VENV)/.requirements $(VENV)/.test $(VENV)/.docs $(VENV)/.tensorflow

## check the code's form and types
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED_CPP)
	$(BIN)/mypy
	$(BIN)/mypy tests/project/uses_of_types.py
	$(BIN)/basedpyright

## correct the code's form
format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED_CPP)

# If PYTHON is given, a .venv of another interpreter is made anew, without its stamps.
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
	@echo "installing torch into $(VENV): minutes, in which pip is silent; with CUDA it downloads gigabytes"
	$(PIP) install -q -r requirements/build.txt
	@touch $@

$(BUILT): $(shell find csrc -type f) setup.py pyproject.toml $(VENV)/.requirements
	@command -v $${CXX:-c++} > /dev/null || \
	  { echo "no C++ compiler: install g++ 9 or later (Debian and Ubuntu: apt install g++), or set CXX"; exit 1; }
	@# The build runs first by itself, because pip's report would hide the compiler's message.
	$(BIN)/python setup.py -q build_ext --inplace
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.examples $(VENV)/.test $(VENV)/.docs $(VENV)/.wheel: $(VENV)/.%: requirements/%.txt requirements/constraints.txt $(VENV)/.requirements
	@echo "installing $< into $(VENV): a minute or more, in which pip is silent"
	$(PIP) install -q -r $<
	@touch $@

# TensorFlow, FBGEMM and clients are optional. If one has no wheel, the tests that compare with it say so.
$(VENV)/.tensorflow $(VENV)/.bench $(VENV)/.clients: $(VENV)/.%: requirements/%.txt requirements/constraints.txt $(VENV)/.requirements
	@echo "installing $< into $(VENV): minutes, in which pip is silent"
	$(PIP) install -q --only-binary=:all: -r $< || \
	  echo "$< could not be installed: going on without it"
	@touch $@

$(VENV)/.torchrec: requirements/torchrec.txt requirements/constraints.txt $(VENV)/.requirements
	$(PIP) install -q --no-deps -r $< || echo "$< could not be installed: going on without it"
	@touch $@

include .ci/release.mk

## remove .venv and everything built
clean:
	rm -rf $(VENV) build dist docs/reference *.egg-info torchsparse_rec/*.so
