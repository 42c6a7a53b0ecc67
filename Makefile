# make demo   a real language model answers over gRPC        make check  format, lint, types, tests
# make test   the whole test suite                           make soak   the long forms of the soak tests
# VENV=none PYTHON=python3 uses an interpreter that has everything installed already.

# JOBS=2 runs the tests in so many processes; JOBS=0 in this one, as one GPU needs.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(if $(filter none,$(VENV)),0,2)

DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -om 1 '^[0-9]*')
CUDA := $(if $(DRIVER),$(shell [ "$(DRIVER)" -ge 580 ] && echo ,cuda13 || echo ,cuda12))

ifeq ($(VENV),none)
RUN := PYTHONPATH=.:$(PYTHONPATH) $(PYTHON)
BASE :=
DEV :=
else
RUN := $(VENV)/bin/python
BASE := $(VENV)/.base$(CUDA)
DEV := $(VENV)/.dev$(CUDA)
endif

.PHONY: demo test soak check lint types count parity proto clean

demo: $(BASE)
	$(RUN) -m swiftjax.cli demo

test: $(DEV)
	$(RUN) -m pytest $(if $(filter-out 0,$(JOBS)),-n $(JOBS) --dist loadfile)

soak: $(DEV)
	SWIFTJAX_SOAK=1 $(RUN) -m pytest -m "soak or hypothesis" --timeout=3600

check: lint types count test

lint: $(DEV)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .

types: $(DEV)
	$(RUN) -m pyright --pythonpath "$$($(RUN) -c "import sys; print(sys.executable)")"

count:
	@$(PYTHON) tests/count_lines.py

# Compares live with transformers and torch; the checked-in goldens need neither.
parity: $(DEV)
	$(RUN) -m pip install --quiet "torch>=2.6" "transformers>=5"
	$(RUN) -m tests.model.make_goldens --check

# grpcio-tools is pinned low so that the generated code runs on old and new protobuf alike; it
# can't share an environment with a newer protobuf.
proto:
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install --quiet grpcio-tools==1.75.1
	.venv-proto/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		--grpc_python_out=. swiftjax/serving/proto/swiftjax.proto

clean:
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "SwiftJAX needs Python >= 3.11: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --editable ".[base$(CUDA)]"
	touch $@

# uv takes a third of pip's time, but does not know pip's settings, which some networks need.
$(DEV): pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet uv
	$(VENV)/bin/python -m uv pip install --quiet --compile-bytecode \
		--python $(VENV)/bin/python --editable ".[dev$(CUDA)]" \
		|| $(VENV)/bin/python -m pip install --quiet --editable ".[dev$(CUDA)]"
	touch $@
