#!/usr/bin/env bash
# Installs asyncrl into .venv; a second call is a matter of a second. PYTHON=… chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'install: %s\n' "$*" >&2; exit 1; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no \`$python\` found; install Python 3.11 or newer, or set PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; asyncrl needs Python 3.11 or newer (set PYTHON=/path/to/python3.11)"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "this Python has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv)"

extra=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra=gpu; fi
extra=${ASYNCRL_EXTRA:-$extra}
stamp=.venv/installed-$extra-$(cat pyproject.toml deploy/install.sh | sha256sum | cut -c1-16)
if [ -e "$stamp" ]; then exit 0; fi

# vLLM compiles small kernels at start, and some packages come as source.
command -v g++ >/dev/null || fail "no C++ compiler found; install one (Debian and Ubuntu: apt-get install g++)"
[ "$extra" != gpu ] || "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.isfile(sysconfig.get_paths()["include"] + "/Python.h"))' ||
    fail "Python.h is missing, which Triton needs on a GPU; install it (Debian and Ubuntu: apt-get install python3-dev)"
needed_gib=$([ "$extra" = gpu ] && echo 20 || echo 6)
free_gib=$(df -Pk . | awk 'NR==2 {print int($4 / 1048576)}')
[ "$free_gib" -ge "$needed_gib" ] || fail "$free_gib GiB free in $PWD, $needed_gib GiB are needed; free some space"

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
echo "installing asyncrl[$extra] into .venv (a few minutes the first time)"
"${pip[@]}" install --upgrade pip
# The CPU build of torch is not on PyPI itself; PyTorch's own index is asked only where it is not found otherwise.
"${pip[@]}" install -e ".[$extra,dev]" ||
    "${pip[@]}" install -e ".[$extra,dev]" --extra-index-url https://download.pytorch.org/whl/cpu
# Test data: real chat templates, which only TRL's wheel has as files. Its code is not run, so its dependencies are left out.
"${pip[@]}" install --no-deps "trl>=1.16,<2"
rm -f .venv/installed-*
touch "$stamp"
