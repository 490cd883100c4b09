#!/usr/bin/env bash
# Sets everything up and runs lint, types and tests.
#
#   bash scripts/test.sh           everything that CI runs
#   bash scripts/test.sh --full    the wide matrix as well
#   bash scripts/test.sh ARGS...   pytest with these arguments instead, e.g. tests/control -k epoch
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$root"
if [ $# -gt 0 ] && [ "$1" != --full ]; then
    exec "$python" -m pytest "$@"
fi
selection=(-m "not full")
if [ "${1:-}" = --full ]; then
    selection=()
fi
echo "== lint"
"$python" -m ruff check .
"$python" -m ruff format --check .
echo "== types"
"$python" -m mypy
echo "== tests"
"$python" -m pytest "${selection[@]}" --durations=10
