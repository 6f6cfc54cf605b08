# Nothing is assumed but Python 3.11 or newer and make: every target sets up .venv by itself, once.
#   make lab    opens JupyterLab at the first notebook
#   make run    runs every notebook and writes one HTML page for each under build/
#   make test   runs every test, the notebooks included
# With EXTRA=cuda the set-up installs MLX for a CUDA 13 GPU in place of the CPU build.

PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11 python,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
READY := .venv/ready$(addprefix -,$(EXTRA))

.PHONY: lab run test test-code test-notebooks check lint figures browser clean

lab: $(READY)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

run: $(READY)
	$(BIN)/python -m moelab.lab.plots.pages notebooks build

# Tests and notebooks side by side: MLX uses one core for each on a CPU.
test: $(READY)
	$(MAKE) -j2 test-code test-notebooks

test-code: $(READY)
	MOELAB_FAST=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests

test-notebooks: $(READY)
	MOELAB_FAST=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --nbmake --nbmake-timeout=600 notebooks

check: $(READY)
	$(BIN)/python -m moelab check

# The pictures of the README, from the pages of `make run`.
figures: $(READY)
	$(BIN)/python data/recipes/figures.py build docs/figures

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The browser test needs Chromium and its driver, and is skipped without them; only root on Debian gets them here.
browser:
	command -v chromedriver >/dev/null || { apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver; }

clean:
	rm -rf build .venv .pytest_cache .ruff_cache

# A second call needs neither time nor network until pyproject.toml changes. The last line answers
# JupyterLab's question about news and updates, so that it neither asks nor looks for them.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "moelab needs Python 3.11 or newer: install it, or say 'make PYTHON=/path/to/python3'"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test$(addprefix $(comma),$(EXTRA))]'
	$(if $(filter cuda,$(EXTRA)),$(BIN)/python -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps mlx-cuda-13==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("mlx"))'))
	@mkdir -p .venv/share/jupyter/lab/settings
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' > .venv/share/jupyter/lab/settings/overrides.json
	@touch $@

comma := ,
