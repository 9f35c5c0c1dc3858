# Everything a newcomer needs is a target here; each makes what it depends on.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# bf16 matmuls can die with SIGILL on virtual machines that show AMX but forbid it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE

.PHONY: help demo demo-ranks docs test lint torture bench bench-full clean

help:
	@echo "make demo        train a small GPT, kill it, resume it, compare bit for bit (under 3 minutes)"
	@echo "make demo-ranks  the same with FSDP2 on 2 ranks, one of them killed; then restored on 1 (under 2 minutes)"
	@echo "make test        lint, types and all tests"
	@echo "make bench       what it costs, beside every peer that runs here: the short form, ten minutes"
	@echo "make bench-full  the whole evaluation, every question, every size"
	@echo "make docs        writes docs/CLI.md from the commands"
	@echo "make torture     200 random SIGKILLs of a real training run, each resumed and compared"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "stillframe needs Python 3.10 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/python demo/run.py

demo-ranks: $(VENV)/.installed
	$(BIN)/python demo/ranks.py

docs: $(VENV)/.installed
	$(BIN)/python -m stillframe.cli.document > docs/CLI.md

test: lint
	$(BIN)/python -m pytest -m "not torture"

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
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
