#!/usr/bin/env bash
# Checks titan_like on one GPU in at most 9 minutes: the loss against the CPU's, then tokens/s, MFU and memory of Llama
# 3 1B and 3B shapes beside the estimator's forecast. The table comes last; the JSON goes to benchmarks/results/.
#   scripts/gpu_check.sh [--dry] [--only NAME] [--output FILE]        --dry: on the CPU, at toy size, JSON in outputs/
# Takes the Python that is there if it has titan_like's packages (any torch from 2.11 on), else sets up one.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$REPO"
. scripts/setup_env.sh
setup_env
exec "$PYTHON" -m benchmarks.gpu_check "$@"
