#!/usr/bin/env bash
# Sets everything up, then trains a GPT on real text as 2 nodes x 2 ranks plus a spare node, kills a whole node in the
# middle of an iteration, changes the layout to another one and back while it trains, and compares the result with stock
# Megatron's, bit for bit.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$root"
exec "$python" examples/quickstart.py "$@"
