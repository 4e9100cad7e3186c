PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UNIT := .venv-unit
LINT := .venv-lint
DOCS := .venv-docs
NEWEST := .venv-newest
LOWEST := .venv-lowest
DIST := .venv-dist
ARGS ?=
# Processes that run tests at once. Much of what tests do is to wait for other processes.
JOBS ?= 3

# The versions of a development environment are pinned for one Python minor version at a time.
PINS := .ci/constraints-py$(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])').txt
CONSTRAINTS := $(firstword $(wildcard $(PINS)) .ci/constraints.txt)

REQUIREMENTS := .ci/requirements
# Tests of these can't be left out because the backend isn't there.
export POLYTRAIN_REQUIRED_BACKENDS := torch,xgboost,lightgbm,tensorflow,reference
MEMBERS := plugins core plugin_torch plugin_xgboost plugin_lightgbm plugin_tf
# Bytecode is written by the first import instead of for thousands of files that nobody imports.
# $(1): the environment.
pip_install = $(1)/bin/python -m pip install --quiet --no-compile $(addprefix -c ,$(CONSTRAINTS))
PIP_INSTALL := $(call pip_install,$(VENV))

# With this set, every worker process of every run would compile its framework again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo lint fix unit test newest lowest sweep hosts gpu dist conformance crash chaos docs bench-script bench-startup bench-scale bench-report bench-lost bench-lost-steps bench-lost-rounds bench-recovery bench-recovery-agent \
	bench-overhead bench-control-plane bench-ingest bench-resume bench-plan bench-checkpoint bench-index bench-journal bench-page \
	bench-boosters bench-torch bench-cuts bench-faults bench-exact bench-preflight reference screenshot booster-table clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.stamp-install ## a virtual environment with all members, frameworks and tools

demo: install ## the shortest complete run
	@$(BIN)/python examples/demo.py

lint: $(LINT)/.stamp-install ## style, import contracts, types, workflows; needs no framework
	@status=0; while read -r check; do $(LINT)/bin/$$check < /dev/null || status=1; done < .ci/checks; exit $$status

fix: $(LINT)/.stamp-install ## format, and repair what can be repaired
	@$(LINT)/bin/ruff check --fix; status=$$?; $(LINT)/bin/ruff format; exit $$status

unit: $(UNIT)/.stamp-install ## the tests that need neither Ray nor a framework
	@POLYTRAIN_REQUIRED_BACKENDS= $(UNIT)/bin/pytest tests/unit -n $(JOBS) --dist worksteal $(ARGS)

# Lint is among the tests: one run tells everything. If one of pytest's processes dies, the run ends:
# the tests that were left to it would never be handed out. It ends itself after 75 minutes, and says
# what failed and what was slow: whoever kills it learns nothing.
test: install ## lint and every test (ARGS="-k name" to choose)
	@$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0 \
		--session-timeout=4500 --durations=20 $(ARGS)

# $(1): the environment, $(2): the tests besides those that both have. Of these all cases run.
define test_versions
status=0; \
for tests in "tests/unit tests/conformance" "--sweep tests/architecture/test_private_names.py $(2)"; do \
	$(1)/bin/pytest $$tests -n $(JOBS) --dist loadfile --max-worker-restart=0 $(ARGS) || status=1; \
done; exit $$status
endef

newest: $(NEWEST)/.stamp-install ## unit tests, conformance and examples with the newest versions that are allowed
	@$(call test_versions,$(NEWEST),tests/e2e/test_examples.py tests/plugin_*/test_estimator_names.py)

lowest: $(LOWEST)/.stamp-install ## unit tests and conformance with the oldest
	@$(call test_versions,$(LOWEST))

sweep: install ## all cases of the tests of which `make test` runs a selection
	@$(BIN)/pytest --sweep -m "sweep or only_in_sweep" -n $(JOBS) --dist loadfile --durations=20 $(ARGS)

hosts: install ## all tests on several hosts made of namespaces; needs root
	@$(BIN)/pytest --sweep tests/hosts $(ARGS)

gpu: $(VENV)/.stamp-gpu ## the tests that need an NVIDIA GPU, one; elsewhere they are skipped
	@$(BIN)/pytest tests/gpu -rs $(ARGS)

dist: $(DIST)/.stamp-install ## build all distributions in dist/, check them, and run them from there without a network
	@rm -rf dist
	@$(DIST)/bin/python .ci/distributions.py dist
	@$(DIST)/bin/python .ci/api_breaks.py
	@$(DIST)/bin/python .ci/try_distributions.py dist

conformance: install ## the conformance kit over every backend
	@$(BIN)/pytest tests/conformance $(ARGS)

crash: install ## runs that are killed at every line that deals with checkpoints, and resumed
	@$(BIN)/python -m tests.crash.run $(ARGS)

chaos: install ## every fault in every backend, and by chance (ARGS="--minutes 30 --seed 1 --backend torch")
	@$(BIN)/python -m polytrain.testing.chaos_cli tests/conformance $(ARGS)

bench-script: $(VENV)/.stamp-bench ## time and memory of whole cold scripts, against torchrun, Lightning, Accelerate, Ray Train
	@$(BIN)/python tests/benchmarks/bench_script.py $(ARGS)

bench-startup: $(VENV)/.stamp-bench ## time to the first distributed step, against Ray Train
	@$(BIN)/python tests/benchmarks/bench_startup.py $(ARGS)

bench-scale: install ## time to the first line of 2 to 128 workers on two nodes of Ray
	@$(BIN)/python tests/benchmarks/bench_scale.py $(ARGS)

bench-report: $(VENV)/.stamp-bench ## cost of one report, against Ray Train
	@$(BIN)/python tests/benchmarks/bench_report.py $(ARGS)

bench-lost: bench-lost-steps bench-lost-rounds ## both of them: what random kills cost, for all that trains

bench-lost-rounds: install ## rounds that random kills cost, and the model at the end, for boosters
	@$(BIN)/python tests/benchmarks/bench_lost_rounds.py $(ARGS)

bench-lost-steps: install ## steps that random kills cost, and the weights at the end, for torch and Keras
	@$(BIN)/python tests/benchmarks/bench_lost_steps.py $(ARGS)

bench-recovery: $(VENV)/.stamp-bench ## time from a kill to the next step, against Ray Train
	@$(BIN)/python tests/benchmarks/bench_recovery.py $(ARGS)

bench-recovery-agent: install ## time from the loss of an agent, or a node, to the next step
	@$(BIN)/python tests/benchmarks/bench_recovery_agent.py $(ARGS)

bench-overhead: install ## steps per second with no failure, against bare torchrun and xgboost
	@$(BIN)/python tests/benchmarks/bench_overhead.py $(ARGS)

bench-control-plane: install ## CPU time and memory of the driver of up to 10,000 workers
	@$(BIN)/python tests/benchmarks/bench_control_plane.py $(ARGS)

bench-ingest: $(VENV)/.stamp-bench ## rows per second and memory, against Ray Train and DataLoader
	@$(BIN)/python tests/benchmarks/bench_ingest.py $(ARGS)

bench-resume: $(VENV)/.stamp-bench ## time from a kill inside an epoch to its next rows
	@$(BIN)/python tests/benchmarks/bench_resume.py $(ARGS)

bench-plan: install ## cost of the next row of an epoch of a billion
	@$(BIN)/python tests/benchmarks/bench_plan.py $(ARGS)

bench-checkpoint: $(VENV)/.stamp-bench ## how long training stands still for a checkpoint, against Ray Train
	@$(BIN)/python tests/benchmarks/bench_checkpoint.py $(ARGS)

bench-index: install ## time to find the newest of ten thousand checkpoints
	@$(BIN)/python tests/benchmarks/bench_index.py $(ARGS)

bench-journal: install ## memory and time of up to five million reports, and of a resume after them
	@$(BIN)/python tests/benchmarks/bench_journal.py $(ARGS)

bench-page: install ## start of the command line, pages of up to a million reports, progress bars in the driver
	@$(BIN)/python tests/benchmarks/bench_page.py $(ARGS)

bench-boosters: $(VENV)/.stamp-bench ## from Parquet files to a booster, against one process, dask and Ray Train
	@$(BIN)/python tests/benchmarks/bench_boosters.py $(ARGS)

bench-cuts: install ## hosts cut off at random, time to train without them; needs root
	@PYTHONPATH=. $(BIN)/python tests/benchmarks/bench_cuts.py $(ARGS)

bench-faults: install ## faults of hosts, time to train again, of each backend; needs root
	@PYTHONPATH=. $(BIN)/python tests/benchmarks/bench_faults.py $(ARGS)

bench-exact: install ## time of a step with virtual workers, against DDP with gradients accumulated by hand
	@PYTHONPATH=. $(BIN)/python tests/benchmarks/bench_exact.py $(ARGS)

bench-preflight: install ## time in which the nodes of a run try their connections
	@$(BIN)/python tests/benchmarks/bench_preflight.py $(ARGS)

bench-torch: $(VENV)/.stamp-bench ## steps per second and whole runs, against torchrun, Lightning, Accelerate, Ray Train and bare TensorFlow
	@$(BIN)/python tests/benchmarks/bench_torch.py $(ARGS)

docs: $(DOCS)/.stamp-install ## the documentation as a site, in build/docs; needs no framework
	@$(DOCS)/bin/sphinx-build --quiet --fail-on-warning --keep-going --conf-dir docs . build/docs
	@echo "build/docs/docs/index.html is written"

reference: install ## write the pages that are made from docstrings and tables
	@$(BIN)/python .ci/reference_page.py
	@$(BIN)/python .ci/data_types_page.py
	@$(BIN)/python .ci/exactness_page.py

screenshot: install ## take the picture of a page in docs/see-a-run.md; needs Chromium
	@$(BIN)/python .ci/screenshot.py

booster-table: install ## hashes of models that should be the same
	@PYTHONPATH=. $(BIN)/python tests/benchmarks/booster_table.py $(ARGS)

clean: ## remove the environment, the caches and what was built
	rm -rf $(VENV) $(UNIT) $(LINT) $(DOCS) $(NEWEST) $(LOWEST) $(DIST) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian splits ensurepip into a package of its own: without it, the interpreter's pip puts one in.
%/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "polytrain needs Python 3.11 or newer: make install PYTHON=python3.11" >&2; exit 1; }
	@rm -rf $*
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
		$(PYTHON) -m venv $*; \
	else \
		$(PYTHON) -m venv --without-pip $* && \
		$(PYTHON) -m pip --python $*/bin/python install --quiet --no-compile pip || \
		{ echo "neither ensurepip nor pip: install python3-venv or python3-pip" >&2; exit 1; }; \
	fi
	@touch $@

$(VENV)/.stamp-install: $(CONSTRAINTS)
# With no constraint, pip takes the newest version that our metadata allows.
$(NEWEST)/.stamp-install: CONSTRAINTS :=
$(LOWEST)/.stamp-install: CONSTRAINTS := .ci/constraints-lowest.txt
$(LOWEST)/.stamp-install: .ci/constraints-lowest.txt
INSTALLED := members.txt frameworks.txt libraries.txt dev.txt dist.txt examples.txt docs.txt
# The oldest jax that the examples take and the oldest TensorFlow exclude each other.
$(LOWEST)/.stamp-install: INSTALLED := members.txt frameworks.txt libraries.txt dev.txt

# One call for the members: they resolve against each other, with no index.
$(addsuffix /.stamp-install,$(VENV) $(NEWEST) $(LOWEST)): %/.stamp-install: %/.stamp-venv $(MEMBERS:=/pyproject.toml) \
		$(addprefix $(REQUIREMENTS)/,build.txt $(INSTALLED) alone.txt)
	@echo "installing polytrain, four frameworks and the tools into $*"
	@$(call pip_install,$*) -r $(REQUIREMENTS)/build.txt
	@$(call pip_install,$*) --no-build-isolation $(addprefix -r $(REQUIREMENTS)/,$(INSTALLED))
	@$(call pip_install,$*) --no-deps -r $(REQUIREMENTS)/alone.txt
	@touch $@

# The members without what they ask for: Ray is among it.
$(UNIT)/.stamp-install: $(UNIT)/.stamp-venv $(REQUIREMENTS)/build.txt $(REQUIREMENTS)/unit.txt $(MEMBERS:=/pyproject.toml)
	@$(call pip_install,$(UNIT)) $(addprefix -r $(REQUIREMENTS)/,build.txt unit.txt)
	@$(call pip_install,$(UNIT)) --no-deps --no-build-isolation $(addprefix -e ./,$(MEMBERS))
	@touch $@

$(LINT)/.stamp-install: $(LINT)/.stamp-venv $(REQUIREMENTS)/build.txt $(REQUIREMENTS)/lint.txt $(MEMBERS:=/pyproject.toml)
	@$(call pip_install,$(LINT)) -r $(REQUIREMENTS)/build.txt
	@$(call pip_install,$(LINT)) --no-build-isolation -e ./plugins -e ./core -r $(REQUIREMENTS)/lint.txt
	@$(call pip_install,$(LINT)) --no-deps --no-build-isolation $(addprefix -e ./,$(MEMBERS))
	@touch $@

$(DOCS)/.stamp-install: $(DOCS)/.stamp-venv $(REQUIREMENTS)/docs.txt
	@$(call pip_install,$(DOCS)) -r $(REQUIREMENTS)/docs.txt
	@touch $@

$(DIST)/.stamp-install: $(DIST)/.stamp-venv $(REQUIREMENTS)/build.txt $(REQUIREMENTS)/dist.txt $(CONSTRAINTS)
	@$(call pip_install,$(DIST)) $(addprefix -r $(REQUIREMENTS)/,build.txt dist.txt)
	@touch $@

$(VENV)/.stamp-gpu: $(VENV)/.stamp-install $(REQUIREMENTS)/gpu.txt
	@$(PIP_INSTALL) -r $(REQUIREMENTS)/gpu.txt
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-install $(REQUIREMENTS)/bench.txt
	@$(PIP_INSTALL) -r $(REQUIREMENTS)/bench.txt
	@touch $@
