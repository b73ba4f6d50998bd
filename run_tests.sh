#!/usr/bin/env bash
# Sets up what the tests need, then runs them:  ./run_tests.sh [--all] [pytest arguments]
# Fast by default; --all, or CI=true in the environment, also runs the tests marked slow.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$REPO/scripts/setup_env.sh"
setup_env prepare test dev

selection=(-m "not slow")
if [ "${CI:-}" = true ]; then selection=(); fi
if [ "${1:-}" = --all ]; then selection=(); shift; fi
if [ $# -eq 0 ]; then selection+=(-n 2 --dist loadfile --no-loadscope-reorder); fi  # most are one thread
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # tests side by side, and their ranks, share the cores
cd "$REPO"
exec "$PYTHON" -m pytest ${selection[@]+"${selection[@]}"} "$@"
