# On a fresh machine `make demo` and `make test` set up everything: all they need is make and
# Python 3.12 or newer as `python3` (or say: make PYTHON=/path/to/python3.12 ...).

PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.setup-complete
PROMPT ?= a red star on a white background
# By the environment, so that the shell leaves its quotes and dollars alone.
demo: export PROMPT := $(value PROMPT)

# Another project's active environment must not leak into this one. What says where packages come from
# (index, proxy, certificates) stays.
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH
unexport PIP_CONSTRAINT PIP_NO_DEPS PIP_PREFIX PIP_PYTHON PIP_REQUIREMENT PIP_ROOT PIP_TARGET PIP_USER
unexport UV_CONSTRAINT UV_BUILD_CONSTRAINT UV_OVERRIDE UV_PREFIX UV_PYTHON UV_SYSTEM_PYTHON UV_TARGET

.PHONY: help demo test check check-tpu build lint format clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(SETUP) ## paint out/demo.png with and without the kernels and compare (CPU, tiny model)
	@mkdir -p out
	$(BIN)/qwenimage-tpu generate --demo --compare -o out/demo.png "$$PROMPT"

test: $(SETUP) ## the tests, without the full cross products
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not full"

check: $(SETUP) ## every test, the full cross products too (long)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check-tpu: $(SETUP) ## compile every kernel ahead of time for every TPU generation (long)
	$(BIN)/qwenimage-tpu check-tpu

# The tests run offline; tests/conftest.py keeps them on the CPU.
test check: export HF_HUB_OFFLINE = 1

build: $(SETUP) ## assemble build/ from kernels_src/ and torch_ext/
	$(BIN)/qwenimage-tpu build

lint: $(SETUP) ## ruff, pyright, and whether build/ is up to date
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --warnings
	$(BIN)/qwenimage-tpu build --check

format: $(SETUP) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## delete caches and outputs (the environment, .venv, stays)
	rm -rf out dist .pytest_cache .ruff_cache .hypothesis
	find build kernels_src torch_ext pipelines tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted set-up is repeated. Byte code is made once, as many containers set
# PYTHONDONTWRITEBYTECODE: every start would compile torch, diffusers and jax again, for 20 seconds.
$(SETUP): pyproject.toml constraints.txt overrides.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { \
	  echo "Python 3.12 or newer is needed, but '$(PYTHON)' is not: install it, or say make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python --constraints constraints.txt \
	  --overrides overrides.txt --build-constraints constraints.txt --group dev --editable '.[emulator,publish]'
	@touch $@
