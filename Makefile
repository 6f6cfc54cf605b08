# The targets need make, and Python 3.11 or newer with venv. The first target that runs sets up .venv.
#   make lab    opens JupyterLab at the first notebook
#   make run    runs every notebook and writes one HTML page for each under build/, in ten minutes
#   make notebooks   runs every notebook anew and keeps its figures as pictures; NB=03_page_cache runs one
#   make records   lists the parts in which records are measured; PART="engine drafts" measures two parts
#   make numbers   writes the README's numbers and docs/scorecard.md anew from the records
#   make test   tests every module, every mode and every notebook, in ten minutes; make test-lab runs one part
#   make test-all   runs these tests and the slow ones, at full size
# With EXTRA=cuda the set-up installs MLX for a CUDA 13 GPU in place of the CPU build.

PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python3.11 python,$(shell \
	$(p) -c 'import sys, platform as p; sys.exit(sys.version_info < (3, 11) or (sys.platform, p.machine()) == ("darwin", "x86_64"))' 2>/dev/null && echo $(p))))
BIN := .venv/bin
READY := .venv/ready$(addprefix -,$(EXTRA))

.PHONY: lab run records numbers peers test test-all check lint notebooks browser clean

lab: $(READY)
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root) --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

run: $(READY)
	$(BIN)/python -m moelab.lab pages notebooks build

# Commit first, since a record names its commit. Let nothing else run: a disturbed record is not kept.
records: $(READY)
	$(BIN)/python data/recipes/records.py $(PART)

# Writes the README's blocks of numbers, and the page of claims.
numbers: $(READY)
	$(BIN)/python data/recipes/readme.py
	$(BIN)/python data/recipes/scorecard.py

# Installs llama.cpp and mlx-vlm, to compare moelab with, from PyPI into build/peers. llama.cpp is
# compiled, in five minutes.
peers: $(READY)
	$(BIN)/python data/recipes/peers.py install

# tests/helpers/parts.py runs three parts at a time and prints a line for each. test-lab runs one part.
test: $(READY)
	@$(BIN)/python tests/helpers/parts.py

# Runs the slow tests, too, with full sizes and every damaged file.
test-all: $(READY)
	@$(BIN)/python tests/helpers/parts.py --all

test-%: $(READY)
	@$(BIN)/python tests/helpers/parts.py $*

check: $(READY)
	$(BIN)/python -m moelab check

# Runs all notebooks, or NB="03_page_cache 04_prefetch". Needs a quiet machine and Chromium (make browser).
notebooks: $(READY)
	$(BIN)/python data/recipes/notebooks.py $(NB)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Installs Chromium and its driver, as root on Debian. Without them the browser test is skipped.
browser:
	command -v chromedriver >/dev/null || { apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver; }

clean:
	rm -rf build .venv .pytest_cache .ruff_cache

# Runs again only after pyproject.toml has changed. overrides.json answers JupyterLab's question about
# news and updates, so that JupyterLab neither asks nor looks for them.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "moelab needs Python 3.11 or newer (on a Mac for arm64): install it, or say 'make PYTHON=/path/to/python3'"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[test$(addprefix $(comma),$(EXTRA))]'
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps 'mlx-vlm>=0.7.10,<0.8'
	$(if $(filter cuda,$(EXTRA)),$(BIN)/python -m pip install --disable-pip-version-check --force-reinstall --no-deps mlx-cuda-13==$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("mlx"))'))
	@mkdir -p .venv/share/jupyter/lab/settings
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' > .venv/share/jupyter/lab/settings/overrides.json
	@touch $@

comma := ,
