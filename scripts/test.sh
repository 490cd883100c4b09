#!/usr/bin/env bash
# Sets everything up and runs lint, types and tests.
#
#   bash scripts/test.sh                 everything that CI runs
#   bash scripts/test.sh --full          the wide matrix as well: at most 90 minutes on 2 cores. Shows how far it is, and goes
#                                        on where it was interrupted: what passed on this very content is not run again
#       --fresh                          ... but starts again
#       --shard I/N                      ... but the I-th of N parts only
#   MEGATRON_LM=DIR bash scripts/test.sh --real     the unmodified pretrain_gpt.py of a Megatron-LM checkout of core_v0.19.0
#   bash scripts/test.sh ARGS...         pytest with these arguments instead, e.g. tests/control -k epoch
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$root"
case "${1:-}" in
    "") selection=(-m "not full") ;;
    --full) selection=("$@") ;;
    --real) exec "$python" -m pytest tests/e2e/test_real_checkout.py -rA "${@:2}" ;;
    *) exec "$python" -m pytest "$@" ;;
esac
echo "== lint"
"$python" -m ruff check .
"$python" -m ruff format --check .
echo "== types"
"$python" -m mypy
echo "== tests"
"$python" -m pytest "${selection[@]}" --durations=25
