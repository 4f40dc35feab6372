#!/usr/bin/env bash
# Lint, types, unit tests, then the tests with real processes. `make test` and CI run this.
set -euo pipefail
cd "$(dirname "$0")/.."
bash deploy/install.sh
export PATH="$PWD/.venv/bin:$PATH"
ruff format --check .
ruff check .
mypy
exec python -m pytest "$@"
