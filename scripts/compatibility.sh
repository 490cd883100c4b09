#!/usr/bin/env bash
# Which pairs of torch and megatron-core work: makes an environment for each of the named pairs, one after the other, installs
# the pair and this package there, runs a small list of tests, removes it again, and writes what came out to
# docs/results/compatibility.json and docs/compatibility.md. About five minutes a pair on 2 cores, less with uv on PATH; 6 GB in
# $TMPDIR.
#
#   bash scripts/compatibility.sh                  all pairs; what was done with this very package is not done again
#   bash scripts/compatibility.sh --pair NAME      this one (may be repeated)
#       --fresh                                    again, even if it was done
#   bash scripts/compatibility.sh --list           the pairs
#   bash scripts/compatibility.sh --report         only writes docs/compatibility.md anew
#
# Exit status: 0 every pair works or is refused by name, 1 one does not, 2 it cannot be done.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$root"
exec "$python" -m scripts.compatibility "$@"
