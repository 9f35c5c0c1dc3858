# Everything a newcomer needs is a target here; each makes what it depends on.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LOOPS  ?= .venv-loops
DIST   ?= .venv-dist
ENGINES ?= .venv-engines
SITE   ?= .venv-docs
VERSIONS ?= 3.10 3.11 3.12 3.13 3.14
# bf16 matmuls can die with SIGILL on virtual machines that show AMX but forbid it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.PHONY: help demo demo-ranks demo-tiers demo-nodes docs test test-device test-engines test-loops test-servers test-torch test-versions dist lint torture bench bench-full clean s3-server azure-server slurm

help:
	@echo "make demo        train a small GPT, kill it, resume it, compare bit for bit (under 3 minutes)"
	@echo "make demo-ranks  the same with FSDP2 on 2 ranks, one of them killed; then restored on 1 (under 2 minutes)"
	@echo "make demo-tiers  two nodes, a shared directory, an object store: killed, a node lost, then all but the store (under 2 minutes)"
	@echo "make demo-nodes  two hosts with a network of their own (Linux, root): one is cut off and killed, a fresh one takes its place (under 3 minutes);"
	@echo "                 with ENGINE=torchtitan, megatron or ray, under that engine (5 minutes)"
	@echo "make test        lint, types and all tests"
	@echo "make test-device   of these the order of copies on an accelerator made of threads; needs a C++ compiler, no accelerator"
	@echo "make test-loops    Hugging Face Trainer, TRL, PEFT, Accelerate and Lightning, killed and resumed; in an environment of its own"
	@echo "make test-engines  Ray Train, torchtitan and Megatron-core, killed and resumed; in an environment of their own"
	@echo "make test-servers  installs real servers: of S3 (Debian, root), of Azure's blobs (npm); without them their tests are skipped"
	@echo "make test-versions the tests of the core on every supported version of Python that is here"
	@echo "make test-torch    the same on the oldest supported torch, or on TORCH=2.9.1; takes a few GB"
	@echo "make dist        wheel and sdist, checked: installed into a clean environment, where a run is killed and resumed"
	@echo "make bench       what it costs, beside every peer that runs here: the short form, ten minutes"
	@echo "make bench-full  the whole evaluation, every question, every size"
	@echo "make docs        writes docs/CLI.md and docs/API.md from the code, and builds the documentation in site/"
	@echo "make torture     200 random SIGKILLs of a real training run, 75 through DCP and DeepSpeed, each resumed and compared; power cuts, replayed"

# What the demos need, and no more.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "stillframe needs Python 3.10 or newer"'
	@echo "installing stillframe, torch and matplotlib into $(VENV)/ (a few minutes at first)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@
	@echo "\`source $(VENV)/bin/activate\` puts stillframe, python and torchrun of $(VENV)/ on your path"

$(VENV)/.installed: $(VENV)/.demo
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python demo/run.py

demo-ranks: $(VENV)/.demo
	$(BIN)/python demo/ranks.py

demo-tiers: $(VENV)/.demo
	$(BIN)/python demo/tiers.py

demo-nodes: $(if $(ENGINE),$(ENGINES)/.installed,$(VENV)/.demo)
	$(if $(ENGINE),$(ENGINES),$(VENV))/bin/python demo/nodes.py $(ENGINE)

docs: $(VENV)/.installed $(SITE)/.installed
	$(BIN)/python -m stillframe.cli.document > docs/CLI.md
	$(BIN)/python -m docs.reference > docs/API.md
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict  # with --quiet it would not count warnings
	@echo "open site/index.html, or, with search: python -m http.server --bind 127.0.0.1 -d site"

$(SITE)/.installed: docs/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

test: lint
	$(BIN)/python -m pytest -m "not torture" -n 2 --dist worksteal

test-device: $(VENV)/.installed
	$(BIN)/python -m pytest tests/device -n 2 --dist worksteal

# The frameworks, in an environment of their own: what they pull in need not agree with the rest.
$(LOOPS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOOPS)
	$(LOOPS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(LOOPS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[loops]'
	touch $@

test-loops: $(LOOPS)/.installed
	$(LOOPS)/bin/python -m pytest tests/loops tests/integration/test_lightning*.py -n 2 --dist worksteal

$(ENGINES)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engines]'
	touch $@

# One after the other: an engine starts processes enough.
test-engines: $(ENGINES)/.installed
	$(ENGINES)/bin/python -m pytest tests/engines tests/integration/test_ray.py tests/integration/test_torchtitan.py tests/integration/test_megatron.py

test-versions:
	@for version in $(VERSIONS); do \
	  if python$$version -c "" 2> /dev/null; then $(MAKE) --no-print-directory test-version VERSION=$$version || exit 1; \
	  else echo "python$$version is not here: skipped"; fi; done

# test_pointers.py is about DeepSpeed, which is not of the core.
test-version:
	python$(VERSION) -m venv --clear .venv-$(VERSION)
	.venv-$(VERSION)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-$(VERSION)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[core]'
	.venv-$(VERSION)/bin/python -m pytest tests/unit tests/property tests/store --ignore tests/unit/test_pointers.py \
	  -m "not torture" -n 2 --dist worksteal

# The oldest torch that is supported; it takes a few GB.
TORCH ?= 2.6.0
test-torch:
	$(PYTHON) -m venv --clear .venv-torch
	grep -v '^torch' constraints.txt > .venv-torch/constraints.txt
	.venv-torch/bin/pip install --quiet --disable-pip-version-check -c .venv-torch/constraints.txt torch==$(TORCH)
	.venv-torch/bin/pip install --quiet --disable-pip-version-check -c .venv-torch/constraints.txt -e '.[core]' torch==$(TORCH)
	.venv-torch/bin/python -m pytest tests/unit tests/property tests/store --ignore tests/unit/test_pointers.py \
	  -m "not torture" -n 2 --dist worksteal

dist:
	rm -rf dist
	$(PYTHON) -m venv --clear $(DIST)
	$(DIST)/bin/pip install --quiet --disable-pip-version-check build twine
	$(DIST)/bin/python -m build --outdir dist .
	$(DIST)/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(DIST)/clean
	$(DIST)/clean/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(DIST)/clean/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	$(DIST)/clean/bin/python tests/installed.py

test-servers: azure-server s3-server

azure-server: .servers/.installed

# A few minutes, at most: the tests can do without.
.servers/.installed:
	timeout 300 npm install --no-audit --no-fund --ignore-scripts --prefix .servers azurite@3.37.0
	touch $@

s3-server:
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-common

# For the test of the Slurm example, which `make torture` runs; it needs root.
slurm:
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

torture: $(VENV)/.installed
	$(BIN)/python -m pytest -m torture -s

# Each peer on its own: one that cannot be installed is listed as such, and the others are measured.
$(VENV)/.peers: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	for peer in torchsnapshot torch_checkpointing deepspeed nvidia-resiliency-ext; do \
		$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $$peer || true; done
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m benchmarks.systems.deepspeed >/dev/null 2>&1 || true # builds its writer
	touch $@

bench: $(VENV)/.peers
	$(BIN)/python -m benchmarks --short

bench-full: $(VENV)/.peers
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-3.* .venv-torch $(LOOPS) $(ENGINES) $(DIST) $(SITE) site .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
