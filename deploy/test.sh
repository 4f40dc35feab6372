#!/usr/bin/env bash
# deploy/test.sh fast | ci | all: what `make test`, `.ci/run` and `make test-all` run; tests/groups.toml has the lists.
# deploy/test.sh group [NAME ...]: these groups, or those that have not passed with their sources of today.
set -euo pipefail
cd "$(dirname "$0")/.."
bash deploy/install.sh
export PATH="$PWD/.venv/bin:$PATH"
others() { python -m pytest tests/simulation tests/integration tests/chaos --durations=20 "$@"; }
stale=$(python -m tests.support.groups stale)
ran=$(mktemp)
if [ "$1" = ci ]; then trap 'python -m tests.support.groups told $(cat "$ran")' EXIT; fi

if [ "$1" = group ]; then
    shift
    for name in ${*:-$stale}; do others --group "$name"; done
    exit
fi
ruff format --check .
ruff check .
mypy
# A file goes to one process as a whole: its tests share stores and engines.
python -m pytest tests/unit --durations=20 --dist loadfile -n 2
if [ "$1" = fast ]; then
    others -m fast --dist loadfile -n 2
    exit
fi
# Three processes on two cores, because these tests wait half of the time for what they started. In the order of
# tests/groups.toml and of the files: by their number of tests, the longest would come last.
others -m "not group" --dist loadfile -n 3 --no-loadscope-reorder
if [ "$1" = all ]; then
    others -m group --dist loadfile -n 2
elif [ -n "$stale" ]; then
    # CI ends after 90 minutes. A group that has not begun after 65 stays due, and is told; two run together.
    export -f others
    export ran ends_s=$(($(date +%s) - SECONDS + 3900))
    one='[ "$(date +%s)" -ge "$ends_s" ] || { echo {} >>"$ran" && others -m {}; }'
    # shellcheck disable=SC2086
    printf '%s\n' $stale | xargs -P 2 -I{} bash -c "$one"
fi
