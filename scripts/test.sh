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
    "" | --full) ;;
    --real) exec "$python" -m pytest tests/e2e/test_real_checkout.py -rA "${@:2}" ;;
    *) exec "$python" -m pytest "$@" ;;
esac
echo "== lint"
"$python" -m ruff check .
"$python" -m ruff format --check .
echo "== types"
"$python" -m mypy
echo "== tests"
[ "${1:-}" = --full ] || exec "$python" -m pytest -m "not full" --durations=25

# The long properties need a processor and nothing else. They get what training ranks leave: those wait for each other a lot. In a
# session of their own, because Linux shares processors out by session first.
mkdir -p runs
log=runs/full-properties.log
# shellcheck disable=SC2016
setsid bash -c '{ echo 19 >/proc/self/autogroup; } 2>/dev/null || true; exec nice -n 19 "$@"' _ \
    "$python" -m pytest -m "full and not e2e" "$@" >"$log" 2>&1 </dev/null &
properties=$!
trap 'kill -- "-$properties" 2>/dev/null || true' EXIT
status=0
"$python" -m pytest -m "not full or e2e" "$@" --durations=25 || status=$?
echo "== long properties, which ran beside ($log)"
others=0
wait "$properties" || others=$?
trap - EXIT
tail -n 40 "$log"
# A shard may have none of them.
[ "$others" = 5 ] && others=0
exit "$((status > others ? status : others))"
