#!/usr/bin/env bash
# Installs asyncrl into .venv with the releases of deploy/constraints.txt; a second call is a matter of a second.
# PYTHON=… chooses the interpreter. A .venv of another one, or one that an interrupted call left, is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'install: %s\n' "$*" >&2; exit 1; }
# By links where it can, because nothing writes into an installed file: pip and sed put a new one in its place.
copy() { cp -al "$1" "$2" 2>/dev/null || { rm -rf "$2"; cp -a "$1" "$2"; }; }

python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no \`$python\` found; install Python 3.11 or newer, or set PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; asyncrl needs Python 3.11 or newer (set PYTHON=/path/to/python3.11)"
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "this Python has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv)"

extra=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra=gpu; fi
extra=${ASYNCRL_EXTRA:-$extra}
# One environment per interpreter and releases. With ASYNCRL_VENVS, a directory, it is kept there for other clones.
of_python='import sys; print(sys.version, sys.base_prefix)'
hash=$({ cat pyproject.toml asyncrl/version.py deploy/install.sh deploy/constraints.txt; "$python" -c "$of_python"; } | sha256sum | cut -c1-16)
stamp=.venv/installed-$extra-$hash kept=${ASYNCRL_VENVS:+$ASYNCRL_VENVS/$extra-$hash}
if [ -e "$stamp" ] && [ ! -e .venv/installing ]; then exit 0; fi

# vLLM compiles small kernels at start, and some packages come as source.
command -v g++ >/dev/null || fail "no C++ compiler found; install one (Debian and Ubuntu: apt-get install g++)"
[ "$extra" != gpu ] || "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.isfile(sysconfig.get_paths()["include"] + "/Python.h"))' ||
    fail "Python.h is missing, which Triton needs on a GPU; install it (Debian and Ubuntu: apt-get install python3-dev)"
needed_gib=$([ "$extra" = gpu ] && echo 20 || echo 6)
free_gib=$(df -Pk . | awk 'NR==2 {print int($4 / 1048576)}')
[ "$free_gib" -ge "$needed_gib" ] || fail "$free_gib GiB free in $PWD, $needed_gib GiB are needed; free some space"

if [ -e .venv/installing ]; then rm -rf .venv; fi
if [ -e .venv ] && [ "$(.venv/bin/python -c "$of_python" 2>/dev/null)" != "$("$python" -c "$of_python")" ]; then
    compgen -G '.venv/installed-*' >/dev/null || fail ".venv is not of $("$python" --version); remove it, or set PYTHON"
    rm -rf .venv
fi
if [ ! -e .venv ] && [ -n "$kept" ] && [ -e "$kept" ]; then
    touch "$kept"
    rm -rf .venv.part
    copy "$kept" .venv.part
    touch .venv.part/installing
    mv .venv.part .venv
    made_in=$(sed -n 's#^command = .* -m venv \(.*\)/.venv$#\1#p' .venv/pyvenv.cfg)
    grep -rlI --null "$made_in" .venv/bin .venv/pyvenv.cfg .venv/lib/python*/site-packages/*asyncrl* |
        xargs -0 sed -i "s#$made_in\b#$PWD#g"
    rm .venv/installing
    exit 0
fi

[ -e .venv ] || "$python" -m venv "$PWD/.venv"
rm -f .venv/installed-*
touch .venv/installing
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
echo "installing asyncrl[$extra] into .venv (a few minutes the first time)"
"${pip[@]}" install --upgrade pip
install=("${pip[@]}" install --constraint deploy/constraints.txt -e ".[$extra,dev]")
# The CPU build of torch is not on PyPI itself; PyTorch's own index is asked only where it is not found otherwise.
"${install[@]}" || "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu
touch "$stamp"
rm .venv/installing

if [ -n "$kept" ] && [ ! -e "$kept" ]; then
    mkdir -p "$ASYNCRL_VENVS"
    find "$ASYNCRL_VENVS" -mindepth 1 -maxdepth 1 -mtime +14 -exec rm -rf {} +
    part=$(mktemp -d "$ASYNCRL_VENVS/part.XXXXXX")
    copy .venv "$part/venv"
    # Another clone may have been first.
    mv -T "$part/venv" "$kept" 2>/dev/null || true
    rm -rf "$part"
fi
