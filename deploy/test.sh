#!/usr/bin/env bash
# `make test`: lint, types and the fast tests. `make test-all`, which CI runs: every test.
set -euo pipefail
cd "$(dirname "$0")/.."
bash deploy/install.sh
export PATH="$PWD/.venv/bin:$PATH"
ruff format --check .
ruff check .
mypy
# A file goes to one process as a whole: its tests share stores and engines.
python -m pytest tests/unit --durations=20 --dist loadfile -n 2
others() { python -m pytest tests/simulation tests/integration tests/chaos --durations=20 "$@"; }
# Three processes on two cores, because these tests wait half of the time for what they started. In the
# order of the files: by their number of tests, the longest would come last.
others -m "not slow" --dist loadfile -n 3 --no-loadscope-reorder
# One after the other: some of the slow ones start engines enough for both cores.
if [ "$1" = all ]; then others -m slow; fi
