# What serves releases, and machines with a GPU. The Makefile includes it: `make clients`, ...
#
# ARGS="..."        for clients and zoo: parts of names (default all); for mutate: tables or families of faults (default
#                   all); for gpu: its arguments (--all); for aarch64: arguments of its pytest
# OUT=folder        where `make gpu` leaves its results (default benchmarks/results/gpu)
# PREBUILT=folder   for gpu: take _C.so and _C_cuda.so from there (default: what `make prebuilt` made, if csrc is as it
#                   was; else this tree's)
# TORCH=2.11.0      for test-torch: which
# DIST=folder       where `make wheel` leaves what it has built, and `make release` all (default dist)
# TESTS=test        for release: the tests, and whatever else must pass (default test-full lint)

OUT ?= benchmarks/results/gpu
DIST ?= dist
TORCH ?= 2.11.0
KERNELS_SUM = find csrc -type f | LC_ALL=C sort | xargs cat | sha256sum
PREBUILT ?= $(if $(filter-out -,$(filter $(shell $(KERNELS_SUM)),$(shell cat build/prebuilt/csrc.sum 2>/dev/null))),build/prebuilt/torchsparse_rec)

.PHONY: clients zoo mutate gpu prebuilt test-torch wheel wheel-environments aarch64 release

# Try what other programs make of our tables, and write docs/clients.md.
clients: $(BUILT) $(VENV)/.test $(VENV)/.clients
	PYTHONPATH=tests $(BIN)/python -m clients $(ARGS)

# Train other libraries' models in their own trainers, without and with our lines, and write docs/zoo.md.
zoo: $(BUILT)
	PYTHONPATH=tests $(BIN)/python -m zoo $(ARGS)

# Plant faults in Python and the kernels, one at a time: each must turn tests red. A planted fault may have the size and,
# within a second, the time of another.
mutate: export PYTHONDONTWRITEBYTECODE = 1
mutate: $(BUILT) $(VENV)/.test
	$(BIN)/python tests/mutations/plant.py $(ARGS)

# Measure this machine's NVIDIA GPU, and with --all test on it. No .venv and no network: such a machine often has its own
# torch. benchmarks/gpu says what it does.
gpu:
	@$(PYTHON) -m benchmarks.gpu --out "$(abspath $(OUT))" $(if $(PREBUILT),--prebuilt "$(PREBUILT)") $(ARGS)

# Compile for an H100 or H200, for `make gpu`, which compiles nothing. Such a machine may refuse large uploads.
prebuilt: $(VENV)/.requirements
	TORCHSPARSE_REC_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0 $(BIN)/python setup.py -q build_ext --build-lib build/prebuilt
	@size=$$(cat build/prebuilt/torchsparse_rec/*.so | wc -c); echo "build/prebuilt: $$size bytes"; \
	[ $$size -le 64000000 ] || { echo "more than 64 MB: too large to be carried"; exit 1; }
	@$(KERNELS_SUM) > build/prebuilt/csrc.sum

# Collect all tests, and run some, with another torch: the library as it is built, and what else is pinned but for
# setuptools, which torch chooses. The environment goes afterwards.
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

# Build the wheel to be handed on; with TORCHSPARSE_REC_CUDA=1 that of the CUDA kernels too.
wheel: $(BUILT) $(VENV)/.wheel
	$(BIN)/python .ci/make_wheel.py $(DIST)

# Try the wheel in DIST in new environments, with each torch from 2.10 on. Gigabytes are downloaded for each torch, and removed.
wheel-environments:
	$(PYTHON) .ci/wheel_environments.py $(DIST) $(ARGS)

# Compile for aarch64, compare bits with this machine's, and run tests of each family of operators on an emulated
# processor. It needs Debian's qemu-user-static and g++-12-aarch64-linux-gnu.
aarch64: $(BUILT)
	$(BIN)/python .ci/aarch64.py $(ARGS)

# Make in DIST what is handed on of the last commit: after all tests its source, wheels, documentation and checksums. What
# no program can check is then printed, from docs/developing.md.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' torchsparse_rec/_version.py)
TESTS ?= test-full lint
release:
	@test -z "$$(git status --porcelain)" || { git status --short; echo "a release is of a commit: commit these first"; exit 1; }
	@grep -q '^## \[$(VERSION)\] - 20' CHANGELOG.md || { echo "CHANGELOG.md has no date for $(VERSION)"; exit 1; }
	@test ! -e $(DIST) || { echo "$(DIST) is there already: remove it, or set DIST"; exit 1; }
	@echo "the tests take an hour on two cores, all else some minutes"
	$(MAKE) $(TESTS) docs
	git diff --exit-code --stat -- docs
	$(MAKE) wheel
	git archive --prefix=torchsparse_rec-$(VERSION)/ -o $(DIST)/torchsparse_rec-$(VERSION)-source.tar.gz HEAD
	tar -czf $(DIST)/torchsparse_rec-$(VERSION)-docs.tar.gz -C build --transform 's,^site,torchsparse_rec-$(VERSION)-docs,' site
	cd $(DIST) && sha256sum *.whl *.tar.gz > SHA256SUMS && cat SHA256SUMS
	@sed -n '/^Then check by hand:$$/,/^## /{/^## /!p}' docs/developing.md

