# make run       install, download the text, train a small translator, evaluate it, translate
# make install   only install
# make test      install the test dependencies and run the tests
# make ablation  train norm placements and position schemes with three seeds, and write the report
# make ablation-tuned   the same, with the learning rate of each arm tuned
# make coverage  measure how often intervals of compute multipliers contain the truth, on known laws
# make kernels   compile all kernels of fused attention for TPUs, and count their cycles
# make faults    inject random faults for an hour (kills, flipped bits, damaged files, odd configs)
# make slice     with the newest supported Python that is installed: install, import, train a small
#                model, evaluate it, generate, plan
# make docs      build the manual as a site, in docs/_build/html
# make lint      check style and imports, which `make test` also does

# The first Python on the PATH with a supported version.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
		2>/dev/null && echo $$p && break; done)
# The newest supported Python, on the PATH or installed by pyenv.
NEWEST ?= $(shell for v in 13 12 11; do \
	for p in python3.$$v $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.$$v.*/bin/python3; do \
		$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, '$$v'))' \
			2>/dev/null && echo $$p && exit; done; done)
BIN := .venv/bin
WORKDIR ?= runs/quickstart

run: .venv/installed
	$(BIN)/python -m transformer data tatoeba_en_es
	$(BIN)/python -m transformer train --config=experiments/quickstart.py --workdir=$(WORKDIR)
	$(BIN)/python -m transformer evaluate --workdir=$(WORKDIR)
	@printf '%s\n' 'Where is the library?' 'I have never seen such a beautiful house.' \
		'She told me that she was going to buy a new car.' > $(WORKDIR)/examples.txt
	$(BIN)/python -m transformer generate --workdir=$(WORKDIR) --input=$(WORKDIR)/examples.txt

install: .venv/installed

ablation: .venv/installed
	$(BIN)/python -m transformer sweep --config=experiments/ablation.py --workdir=runs/ablation \
		--untuned
	$(BIN)/python -m transformer compare runs/ablation

ablation-tuned: .venv/installed
	$(BIN)/python -m transformer sweep --config=experiments/ablation.py --workdir=runs/ablation
	$(BIN)/python -m transformer compare runs/ablation

test: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# A worker runs whole files, so that their tests share what is compiled. A third worker uses the
	@# time in which others wait for processes. XLA may end a worker. The worker is then restarted and
	@# repeats its test. A test that fails is not repeated.
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --reruns 1 --only-rerun 'crashed while running'

kernels: .venv/installed-test
	$(BIN)/python experiments/benchmarks/compiled_kernels.py
	$(BIN)/python experiments/benchmarks/kernels.py
	$(BIN)/python experiments/benchmarks/splash.py

coverage: .venv/installed
	$(BIN)/python tests/law_coverage.py

faults: .venv/installed-test
	cd tests && ../$(BIN)/python -m faults --minutes=60

docs: .venv/installed-docs
	$(BIN)/python docs/generate.py --check
	$(BIN)/sphinx-build --fail-on-warning --quiet docs docs/_build/html
	@echo docs/_build/html/index.html

slice:
	.ci/slice "$(NEWEST)"

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11, 3.12 or 3.13 found;" \
		"give its path with make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable .
	@touch $@

.venv/installed-test: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[test]'
	@touch $@ .venv/installed

.venv/installed-docs: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[docs]'
	@touch $@ .venv/installed

.PHONY: run install docs ablation ablation-tuned test kernels coverage faults slice lint
