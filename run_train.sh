#!/usr/bin/env bash
# Sets up what is needed, then trains:  ./run_train.sh [--job.config_file FILE.toml] [--section.key VALUE ...]
# Without --job.config_file: train_configs/debug.toml, and a sample of text from the trained model at the end.
#
# In the environment, all optional:
#   NPROC     processes on this node (default: one per GPU; 2 without GPUs)
#   LOG_RANK  local ranks whose output is shown (default: 0; several: 0,1)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT   several nodes (default under srun: taken from Slurm)
#   MAX_RESTARTS  how often a run that failed is started again, from its last checkpoint (default: 0)
#   PYTHON    the interpreter (default: see scripts/setup_env.sh);  OMP_NUM_THREADS (default: cores / NPROC)
# TERM, INT (Ctrl-C) and USR1 (Slurm: --signal=USR1@120): finish the step, save, leave with 75; a second one ends at once.
# Exit code: 0 done, 2 the request cannot be run as it is, 75 stopped and saved, other: of the rank that failed first.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$REPO/scripts/setup_env.sh"
setup_env

count_gpus() {
    local gpus
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || gpus=0
    if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then  # as CUDA reads it: up to the first -1
        gpus=$(printf '%s' "${CUDA_VISIBLE_DEVICES%%-1*}" | tr ',' '\n' | grep -c .) || gpus=0
    fi
    printf '%s\n' "$gpus"
}

set_defaults() {
    if [ -z "${NPROC:-}" ]; then
        NPROC=$(count_gpus)
        if [ "$NPROC" = 0 ]; then NPROC=2; fi
    fi
    if [ "${SLURM_STEP_NUM_NODES:-1}" != 1 ]; then  # started by srun on several nodes
        : "${NNODES:=$SLURM_STEP_NUM_NODES}" "${NODE_RANK:=$SLURM_NODEID}"
        : "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 10000))}"  # the same on all nodes, another for each job
        : "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}"
    fi
    : "${NNODES:=1}"
    export NPROC NNODES NODE_RANK MASTER_ADDR MASTER_PORT
}

run() {  # in the background, so that a signal that only this script gets is passed on; Ctrl-C reaches all by itself
    local code child interrupted=1
    trap '' INT  # ignored here: a wait that it interrupts may lose the child's exit code
    (trap - INT; exec "$@") <&0 &
    child=$!
    trap 'interrupted=1; kill -TERM "$child" 2>/dev/null || true' TERM
    trap 'interrupted=1; kill -USR1 "$child" 2>/dev/null || true' USR1
    while [ -n "$interrupted" ]; do  # a signal ends the wait, but not yet the child
        code=0 interrupted=
        wait "$child" || code=$?
    done
    trap - TERM USR1 INT
    return "$code"
}

run_with_restarts() {
    local code restarts=0
    TITAN_LIKE_LAUNCH=$(uname -n):$$
    export TITAN_LIKE_LAUNCH TITAN_LIKE_RESTARTS
    while :; do
        TITAN_LIKE_RESTARTS=$restarts code=0
        run "$@" || code=$?
        case $code in 0 | 2 | 75 | 130 | 138 | 143) return "$code" ;; esac  # done, refused, stopped, ended by a signal
        if [ "$restarts" -ge "${MAX_RESTARTS:-0}" ]; then return "$code"; fi
        restarts=$((restarts + 1))
        printf 'The run failed (exit code %s): restart %s of %s\n' "$code" "$restarts" "$MAX_RESTARTS" >&2
    done
}

is_first_try=1
for argument in "$@"; do
    case $argument in
        --help | -h | --print_config) exec "$PYTHON" -m titan_like.train "$@" ;;
        --job.config_file | --job.config_file=*) is_first_try= ;;
    esac
done
if [ -n "$is_first_try" ]; then set -- --job.config_file "$REPO/train_configs/debug.toml" "$@"; fi

set_defaults
folders=$("$PYTHON" -m titan_like.launch "$@")  # checks everything that needs no torch, prepares the default corpus
{ read -r mode; read -r run_folder; read -r checkpoints; } <<<"$folders"

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    threads=$(($(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) / NPROC))
    export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi
if [ "$mode" = fake ]; then  # one process stands for NPROC x NNODES
    exec "$PYTHON" -m titan_like.train "$@"
elif [ "$NPROC" = 1 ] && [ "$NNODES" = 1 ]; then
    run_with_restarts "$PYTHON" -m titan_like.train "$@"  # without torchrun, which takes seconds to start
else
    run_with_restarts "$PYTHON" -m titan_like.torchrun "$@"
fi

if [ -n "$is_first_try" ] && [ "${NODE_RANK:-0}" = 0 ]; then
    if [ -d "$checkpoints" ]; then
        printf '\nA sample of what the model writes:\n'
        # 2: it cannot be had, such as from data that came without a tokenizer; the run has gone well.
        "$PYTHON" "$REPO/scripts/generate.py" --checkpoint "$checkpoints" --prompt "def " || [ $? = 2 ]
    fi
    printf '\nRun folder:  %s\nCheckpoints: %s\nMetrics:     %s\nTensorBoard: "%s" -m tensorboard.main --logdir "%s"\n' \
        "$run_folder" "$checkpoints" "$run_folder/metrics.jsonl" "$PYTHON" "$run_folder"
fi
