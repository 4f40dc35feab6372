#!/usr/bin/env bash
# Builds a tiny model that can hardly add, then trains it with the whole system. No GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."
bash deploy/install.sh
.venv/bin/asyncrl warmup build/quickstart
exec .venv/bin/asyncrl up --config configs/quickstart.yaml "$@"
