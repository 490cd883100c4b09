# shellcheck shell=bash
# Sourced by the other scripts: finds a Python, makes .venv, installs what is missing. Sets $python.
# Nothing outside the repository's folder is touched.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

works() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python; do
        if works "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null && candidate=$(uv python find 3.12 2>/dev/null) && works "$candidate"; then
        echo "$candidate"
        return
    fi
    echo "No Python 3.12 or 3.13 found (megatron-core needs it). Install one, for example with" >&2
    echo "    uv python install 3.12      or      pyenv install 3.12" >&2
    echo "or name one: PYTHON=/path/to/python3.12 bash $0" >&2
    return 1
}

prepare() {
    local stamp=$venv/installed
    if [ ! -x "$venv/bin/python" ]; then
        local found
        found=$(find_python) || exit 1
        echo "== making $venv with $found"
        "$found" -m venv "$venv"
    fi
    python=$venv/bin/python
    if [ ! -f "$stamp" ] || [ "$root/pyproject.toml" -nt "$stamp" ]; then
        echo "== installing (torch, megatron-core and tools; some minutes the first time)"
        "$python" -m pip install --quiet --disable-pip-version-check --editable "${root}[laptop,test]"
        touch "$stamp"
    fi
    export python
}
