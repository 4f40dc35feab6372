.PHONY: quickstart test test-all install gpu-check

quickstart:
	bash deploy/quickstart.sh

# Ten minutes on two cores; `make test-all` is every test, as CI runs them.
test:
	bash deploy/test.sh fast

test-all:
	bash deploy/test.sh all

install:
	bash deploy/install.sh

# Measures this machine's GPUs in 5 to 10 minutes: docs/gpu.md.
gpu-check:
	.venv/bin/asyncrl doctor --gpu
