# Two commands for a newcomer: `make demo` and `make test`. Both stand on `make setup`.
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null | grep True),$(p))))
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup
export PYSPARK_PYTHON := $(abspath $(BIN)/python)

SMOKES := smoke-4.1 smoke-4.2

.PHONY: help setup check-java demo test test-slow test-all test-hosts golden wheel chaos $(SMOKES) lint format docs site bench engines clean

# `make help` lists the targets that have a line of explanation.
help:
	@awk '/^# /{ text = substr($$0, 3); next } /^[a-z][a-z0-9.-]*:/{ split($$1, name, ":"); if (text) printf "%-11s %s\n", name[1], text } { text = "" }' $(MAKEFILE_LIST)

# Create .venv, install all that is needed, and compile the kernels.
setup: $(STAMP)

$(STAMP): pyproject.toml
	@[ -n "$(PYTHON)" ] || { echo "Millpond needs Python 3.11 or newer on the PATH."; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev,report]'
	@$(BIN)/python -m millpond.kernels.compile
	@touch $@

check-java:
	@java -version >/dev/null 2>&1 || { echo "Millpond needs Java 17 or newer on the PATH (or JAVA_HOME), as PySpark does."; exit 1; }

# Run the demo beside Spark, kill both engines, compare every row.
demo: check-java setup
	@$(BIN)/millpond demo $(ARGS)

# The quick suite: a part of each kind of test, a quarter of the drawn examples, Spark's answers as they are recorded.
test: export MILLPOND_EXAMPLES ?= 0.25
test: export MILLPOND_ORACLE ?= held
test: check-java setup
	@$(PYTEST) -m "not slow" $(ARGS)

# What `make test` leaves out, but for rare cases. Spark's answers are not believed but found again, and rows that can be combined always are.
test-slow: export MILLPOND_ORACLE ?= live
test-slow: export MILLPOND_COMBINE ?= on
test-slow: check-java setup
	@$(PYTEST) -m "slow and not rare" $(ARGS)

# Everything, with rare cases, likewise.
test-all: export MILLPOND_ORACLE ?= live
test-all: export MILLPOND_COMBINE ?= on
test-all: check-java setup
	@$(PYTEST) $(ARGS)

# The core of the comparisons with Spark, on a cluster of two hosts of this machine.
test-hosts: export MILLPOND_HOSTS = 2
test-hosts: check-java setup
	@$(PYTEST) -m "not slow" $(or $(ARGS),$(foreach name,changes distinct joins keys sessions user_functions windows,tests/differential/test_$(name).py))

# Record Spark's answers where a record is missing or of another question.
golden: export MILLPOND_ORACLE = write
golden: check-java setup
	@$(PYTEST) -m "oracle and not slow" $(or $(ARGS),tests)

# What `pip install` gives: a wheel, alone in a fresh environment, runs the README's example.
wheel: check-java setup
	@$(BIN)/python -m pytest tests/wheel

# Many more schedules of crashes than `make test` runs, with others each time if MILLPOND_SEED says where to begin.
chaos: export MILLPOND_SCHEDULES ?= 5000
chaos: export MILLPOND_SPARK_SCHEDULES ?= 50
chaos: export MILLPOND_KILLS ?= 500
chaos: export MILLPOND_SPARK_KILLS ?= 50
chaos: export MILLPOND_HOST_SCHEDULES ?= 300
chaos: check-java setup
	@$(PYTEST) --timeout 0 tests/chaos tests/slot/test_kills.py

# The older versions of Spark, each with an environment of its own: a query of each kind is compared with Spark, and on
# 4.2, the newest that Delta Lake runs on, batches are merged into a Delta table.
.venv-spark-4.2/.installed: SMOKE_WITH := delta-spark==4.4.0
.venv-spark-%/.installed: pyproject.toml Makefile
	@[ -x $(@D)/bin/python ] || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install -q --disable-pip-version-check -e '.[dev]' 'pyspark==$*.*' $(SMOKE_WITH)
	@touch $@

$(SMOKES): smoke-%: check-java .venv-spark-%/.installed
	@PYSPARK_PYTHON=$(abspath .venv-spark-$*/bin/python) .venv-spark-$*/bin/python -m pytest -n 2 tests/smoke

# Check style, types, imports and words.
lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m docs.word_list

# Format the code.
format: setup
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format -q .

# Measure both engines (ARGS: see `python -m benchmarks --help`).
bench: check-java setup
	@$(BIN)/python -m benchmarks $(or $(ARGS),rmw --engines millpond,spark --seconds 30)

# The pages that are made from the code.
docs: setup
	@$(BIN)/python -m docs.compatibility
	@$(BIN)/python -m docs.architecture_graph
	@$(BIN)/python -m docs.settings
	@$(BIN)/python -m docs.metrics
	@$(BIN)/python -m docs.command_line
	@$(BIN)/python -m docs.plan_picture

# All pages as a site, in site/: any warning (a link that leads nowhere, say) is an error.
site: $(VENV)/.site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -q

$(VENV)/.site: $(STAMP)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	@touch $@

# Flink, for side-by-side figures; its Java functions need a JDK (javac).
engines: setup
	@[ -x .venv-flink/bin/python ] || $(PYTHON) -m venv .venv-flink
	@.venv-flink/bin/python -m pip install -q --disable-pip-version-check 'setuptools<81' 'apache-flink==2.3.0'
	@$(BIN)/python -m benchmarks.engines.flink.jar

# Remove environments and what was built.
clean:
	rm -rf $(VENV) .venv-flink .venv-spark-* build dist site src/*.egg-info
