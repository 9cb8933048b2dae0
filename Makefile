# make demo, make test: the two commands of the README. Each builds what it needs.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo hosts-demo test check simulate test-fault kill-loop soak fuzz test-kernels bench format clean

$(READY): pyproject.toml setup.py $(wildcard hpstore/*/*/*.[ch]) constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/demo.py

# root: three hosts in network namespaces, etcd; each host fails in turn (docs/hosts.md)
hosts-demo: $(READY)
	$(BIN)/python examples/hosts_demo.py

test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 hpstore examples  # a locale chooses no encoding
	$(BIN)/mypy
	$(BIN)/mypy tests
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 2 tests/unit tests/property tests/contract

# everything in tests/fault and tests/hosts; as root it breaks real devices, and writes build/faults.md
test-fault: $(READY)
	HYPOTHESIS_PROFILE=ci HPSTORE_LONG_TESTS=1 $(BIN)/python -m pytest -o faulthandler_timeout=900 tests/fault tests/hosts

# SIGKILL of trainer, agent, rebuild, scrub and ingest, so often (docs/faults.md)
kill-loop: $(READY)
	$(BIN)/python -m tests.fault.kills --kills $(or $(KILLS),2000) $(if $(SEED),--seed $(SEED))

# root: faults of devices and processes for so long, one run for each seed (docs/faults.md)
soak: $(READY)
	$(BIN)/python -m tests.fault.soak --minutes $(or $(MINUTES),40) --seed $(or $(SEEDS),1)

# INPUTS mutated inputs for each parser of bytes that others may have written (tests/fuzz)
fuzz: $(READY)
	$(BIN)/python -m tests.fuzz --inputs $(or $(INPUTS),100000) $(if $(SEED),--seed $(SEED)) \
		$(if $(TARGETS),--targets $(TARGETS))

# Triton is 200 MB and not in [dev]: docs/decisions/0013. The version that the pinned torch wants.
test-kernels: $(READY)
	$(BIN)/python -m pip install --quiet 'triton==3.7.1'
	$(BIN)/python -m pytest tests/integration/test_direct_kernels.py

# schedules of several processes with faults (docs/protocol.md), until stopped or SEEDS are done
simulate: $(READY)
	$(BIN)/python -m hpstore.testing.simulation $(if $(SEEDS),--seeds $(SEEDS)) $(if $(HOSTS),--hosts)

bench: $(READY)
	$(BIN)/hpstore bench devices erasure

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info
