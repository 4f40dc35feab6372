#!/usr/bin/env bash
# Installs, then: a tiny model that can hardly add, trained with the whole system. No GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."
bash deploy/install.sh
exec .venv/bin/asyncrl quickstart "$@"
