#!/usr/bin/env bash
# Checks what only a GPU can show: the rate and the overlap of copies to host memory, restoring to the bit, NCCL groups that are
# aborted and made again, and a Megatron job that loses a rank. For a machine with one CUDA GPU of which nothing can be reached:
# nothing is installed and nothing outside $OUT is written. A few minutes.
#
#   OUT=DIR bash scripts/device_check.sh [--wheels DIR]     table, and DIR/docs/results/device-check.json
#   bash scripts/device_check.sh --stand-in                 the same on the CPU stand-in: checks this check, says nothing of a GPU
#
#   --wheels DIR    folder with wheels of what the machine lacks (megatron-core, say): used from a temporary folder
#
# It needs Python 3.12 or 3.13 with torch, numpy, psutil, xxhash, yaml and nvidia-ml-py; the Megatron part also megatron-core 0.19.
# Exit status: 0 all held, 1 something did not, 2 nothing was checked (no CUDA, or something is missing).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheels="" more=()
while [ $# -gt 0 ]; do
    case "$1" in
        --wheels)
            [ -d "${2:-}" ] || { echo "device_check.sh: --wheels ${2:-}: no such folder" >&2; exit 2; }
            wheels=$2
            shift ;;
        --stand-in) more+=(--stand-in) ;;
        *)
            echo "device_check.sh: $1: unknown; see the head of $0" >&2
            exit 2 ;;
    esac
    shift
done

has() { "$1" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$2') is None)" >/dev/null 2>&1; }

python=""
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.13 /opt/*/.venv/bin/python3 /opt/venv/bin/python3 "$root/.venv/bin/python"; do
    if command -v "$candidate" >/dev/null && has "$candidate" torch; then
        python=$(command -v "$candidate")
        break
    fi
done
[ -n "$python" ] || { echo "device_check.sh: no torch in any Python here: nothing checked. Name one that has it: PYTHON=/path/to/python3" >&2; exit 2; }

scratch=$(mktemp -d "${TMPDIR:-/tmp}/device-check.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
if [ -n "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$wheels"/*.whl
fi
missing=()
export PYTHONPATH="$root:$scratch/site" PYTHONDONTWRITEBYTECODE=1
for module in numpy psutil xxhash yaml pynvml; do
    has "$python" "$module" || missing+=("$module")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "device_check.sh: $python has no ${missing[*]}: nothing checked. Bring them as wheels (--wheels DIR); pynvml is nvidia-ml-py's" >&2
    exit 2
fi
cd "$root"
"$python" -m scripts.device_check --out "${OUT:-$root/runs/device-check}" --scratch "$scratch" ${more[@]+"${more[@]}"}
