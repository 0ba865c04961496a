# gapmeter: every target sets up what it needs by itself. `make help` lists targets and scenarios.

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell if test -x .venv/bin/python; then echo .venv/bin/python; exit; fi; \
  for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; true)
endif

# Nothing is cached outside this checkout, unless you say where.
XDG_CACHE_HOME ?= $(CURDIR)/.cache
PIP_CACHE_DIR ?= $(CURDIR)/.cache/pip
HF_HOME ?= $(CURDIR)/.cache/huggingface
TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/torchinductor
TRITON_CACHE_DIR ?= $(CURDIR)/.cache/triton
VLLM_CACHE_ROOT ?= $(CURDIR)/.cache/vllm
VLLM_CONFIG_ROOT ?= $(CURDIR)/.cache/vllm-config
NUMBA_CACHE_DIR ?= $(CURDIR)/.cache/numba
CUDA_CACHE_PATH ?= $(CURDIR)/.cache/cuda
export XDG_CACHE_HOME PIP_CACHE_DIR HF_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR VLLM_CACHE_ROOT VLLM_CONFIG_ROOT \
  NUMBA_CACHE_DIR CUDA_CACHE_PATH
export ARGS TORCH_INDEX TORCH_BUILD VLLM_VERSION

SOAK ?= 60m
FUZZ ?= 90

# What these hold is passed on by the environment, as it is: neither make nor a shell looks for commands in it.
given := SCENARIO ENGINE URL GENERATOR LOCUSTFILE OVER LIVE RUN A B SOAK FUZZ
$(foreach name,$(given),$(eval override $(name) := $$(value $(name))))
override LIVE := $(filter-out 0,$(LIVE))
export $(given)

own := .venv/bin/python
no_python = echo 'gapmeter needs Python 3.11 or newer, and found none; name one: make PYTHON=/path/to/python3.12' >&2; false
named = @test -n "$$SCENARIO" || { echo 'which scenario? make $@ SCENARIO=NAME, one of:' \
  $$(basename -s .yaml scenarios/*.yaml) >&2; exit 2; }
setup = @$(if $(PYTHON),$(PYTHON),$(no_python)) setup/environment.py

.DEFAULT_GOAL := help
.PHONY: gpu-proof capacity screenshots compare evidence calibrate bench-peers streams soak fuzz help loadtest report doctor test test-fast lint check format bench setup vllm clean clean-all

help:  ## targets and scenarios, a line each
	@echo 'make TARGET [VARIABLE=value …]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile
	@echo; echo 'scenarios (make loadtest SCENARIO=NAME)'
	@for f in scenarios/*.yaml; do \
	  printf '  %-12s %s\n' "$$(basename "$$f" .yaml)" "$$(sed -n 's/^summary: *//p' "$$f" | head -n 1)"; done
	@echo; echo 'variables: PYTHON, TORCH_INDEX (where pip also looks for torch), TORCH_BUILD (cpu or cuda), VLLM_VERSION'

loadtest:  ## load a server and explain it: SCENARIO=chat-p99 [ENGINE=vllm URL=http://... GENERATOR=locust LIVE=1 LOCUSTFILE=... ARGS='...']
	$(named)
	$(setup) run
	@$(own) -P -m gapmeter run "$$SCENARIO" $(if $(ENGINE),--engine "$$ENGINE") $(if $(URL),--url "$$URL") \
	  $(if $(GENERATOR),--set "load.generator=$$GENERATOR") $(if $(LIVE),--live) $(if $(LOCUSTFILE),--locustfile "$$LOCUSTFILE") $(ARGS)

capacity:  ## the highest rate at which every SLO holds: SCENARIO=chat-p99 [ENGINE=vllm URL=http://... GENERATOR=locust OVER=server.max_batch=4,8 ARGS='--target-rps 50']
	$(named)
	$(setup) run
	@$(own) -P -m gapmeter capacity "$$SCENARIO" $(if $(ENGINE),--engine "$$ENGINE") $(if $(URL),--url "$$URL") \
	  $(if $(GENERATOR),--set "load.generator=$$GENERATOR") $(if $(OVER),--over "$$OVER") $(ARGS)

report:  ## write a run's report again, from its folder alone: [RUN=runs/..., otherwise the newest]
	$(setup) core
	@$(own) -P -m gapmeter report $(if $(RUN),"$$RUN") $(ARGS)

compare:  ## what differs between runs; of searches and sweeps, which is cheaper: A=runs/... B=runs/... [ARGS='runs/C']
	@test -n "$$A" && test -n "$$B" || { echo 'which runs? make compare A=FOLDER B=FOLDER (several: A=FOLDER,FOLDER)' >&2; exit 2; }
	$(setup) core
	@$(own) -P -m gapmeter compare "$$A" "$$B" $(ARGS)

screenshots:  ## take the docs' pictures, with Chromium: of the newest run, sweep, search, comparison [RUN='runs/A runs/B']
	$(setup) core
	@$(own) -m docs.screenshots $$RUN $(ARGS)

doctor:  ## check what works on this machine, and how to fix the rest
	$(setup) core
	@$(own) -P -m gapmeter doctor $(ARGS)

# NumPy's threads wait for each other at every sum of products, most of all beside other tests: four times the work.
test test-fast: export OPENBLAS_NUM_THREADS = 1
# Where Python may keep nothing compiled (containers often forbid it), every process that a test starts compiles all anew.
compiled = unset PYTHONDONTWRITEBYTECODE;
test:  ## all tests, both engines included (some twenty minutes on two cores)
	$(setup) core dev transformers locust otel vllm
	@$(compiled) $(own) -m pytest --lanes 3 $(ARGS)

test-fast:  ## the tests that need no engine and no whole run (a few minutes)
	$(setup) core dev transformers locust otel
	@$(compiled) $(own) -m pytest -n auto --maxprocesses=4 --dist loadfile -m 'not transformers and not vllm and not whole_run and not environment' $(ARGS)

lint:  ## ruff and mypy --strict
	$(setup) core dev transformers locust otel
	@$(own) -m ruff check .
	@$(own) -m ruff format --check .
	@$(own) -m mypy

check: lint test  ## what CI runs: lint, then test

format:  ## format the code
	$(setup) core dev
	@$(own) -m ruff check --fix .
	@$(own) -m ruff format .

bench:  ## the figures in docs/results, measured on this machine
	$(setup) core dev transformers locust otel vllm
	@$(own) -m bench $(ARGS)

calibrate:  ## measure the load tester itself on this machine: its error, its cost, its limits (four minutes)
	$(setup) core locust
	@$(own) -P -m gapmeter calibrate $(ARGS)

bench-peers:  ## gapmeter beside guidellm, aiperf, vllm bench serve and genai-bench, against the null server's log
	$(setup) core transformers locust vllm
	@for peer in guidellm aiperf genai-bench; do $(PYTHON) setup/environment.py $$peer || echo "$$peer is left out" >&2; done
	@$(own) -m bench peers $(ARGS)

evidence:  ## how often 95 % intervals contain the truth, on queues with known quantiles; into docs/results (three minutes)
	$(setup) core
	@$(own) -m bench coverage $(ARGS)

streams:  ## 10,000 answers open at once against the null server: none lost, memory of each [ARGS='--generator locust']
	$(setup) core locust
	@$(own) -m bench streams $(ARGS)

gpu-proof:  ## check what gapmeter says of this machine's GPU, into runs/ (45 minutes) [ARGS='nvml anchors']
	$(setup) core transformers vllm
	@$(own) -m bench.gpu_proof $(ARGS)

soak:  ## a steady rate for an hour [SOAK=60m]: does memory grow, does lag drift? [ARGS='--engine vllm']
	$(setup) core locust $(if $(findstring vllm,$(value ARGS)),vllm)
	@$(own) -m bench soak --soak "$$SOAK" $(ARGS)

fuzz:  ## fuzz everything that reads input from outside, with atheris [FUZZ=90 seconds, divided; ARGS='folders plans']
	$(setup) fuzz
	@.venv-fuzz/bin/python -m tests.fuzz "$$FUZZ" $(ARGS)

setup:  ## only set up .venv: gapmeter, Transformers, Locust, the tools for development
	$(setup) core dev transformers locust otel

vllm:  ## only set up .venv-vllm: vLLM for this machine's hardware, with the probe
	$(setup) vllm

clean:  ## remove caches and build products; runs and environments stay
	rm -rf .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

clean-all: clean  ## remove the environments too; runs stay
	rm -rf .venv .venv-vllm .venv-peers .venv-fuzz
