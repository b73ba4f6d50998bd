#!/usr/bin/env bash
# Shows what a run survives, in about two minutes on a laptop:  scripts/show_recovery.sh [RUN_FOLDER]
# Two ranks train; one is killed with -9 in the middle of a save; a bit of the newest checkpoint is flipped; one rank goes
# on from what is left.
set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$REPO"
. scripts/setup_env.sh
setup_env test
mkdir -p outputs
RUN=${1:-$(mktemp -d outputs/recovery.XXXXXX)}
SETTINGS=(
    --job.config_file train_configs/debug.toml --job.dump_folder "$RUN" --training.steps 60
    --training.local_batch_size 4 --training.global_batch_size 8 --checkpoint.interval 10 --checkpoint.async_mode thread
    --validation.interval 0 --metrics.log_freq 5
)
say() { printf '\n\n=== %s\n\n' "$*"; }

say "Two ranks train and save every 10 steps in the background. Rank 1 is killed while step 30 is being saved."
NPROC=2 ./run_train.sh "${SETTINGS[@]}" &
launcher=$!
until [ -d "$RUN/checkpoint/step-30.tmp" ]; do
    kill -0 "$launcher" 2>/dev/null || { echo "the run ended before its time" >&2; exit 1; }
    sleep 0.005
done
kill -9 "$(pgrep -f -- "-m titan_like.train .*$RUN " | tail -n 1)"
code=0
wait "$launcher" || code=$?
echo "The run has ended with exit code $code. Its checkpoints, and what was not completed:"
ls -1 "$RUN/checkpoint"

say "One bit of the newest checkpoint is flipped, which nothing but a hash would notice."
newest=$(cd "$RUN/checkpoint" && ls -d step-*[0-9] | sort -t- -k2 -n | tail -n 1)
"$PYTHON" - "$RUN/checkpoint/$newest/__0_0.distcp" <<'PYTHON'
import sys

with open(sys.argv[1], "r+b") as file:
    file.seek(-1000, 2)
    byte = file.read(1)[0]
    file.seek(-1000, 2)
    file.write(bytes([byte ^ 1]))
print("flipped a bit in", sys.argv[1])
PYTHON

say "One rank goes on by itself, with the same 8 sequences per step: from the newest checkpoint that is intact."
NPROC=1 ./run_train.sh "${SETTINGS[@]}" --checkpoint.resume auto

say "What the model writes now:"
"$PYTHON" scripts/generate.py --checkpoint "$RUN/checkpoint" --prompt "def " --tokens 40

say "The same weights in Hugging Face's format write the same text through transformers:"
"$PYTHON" scripts/convert_hf.py export "$RUN/checkpoint" "$RUN/hf"
"$PYTHON" scripts/generate.py --checkpoint "$RUN/checkpoint" --prompt "def " --tokens 40 --temperature 0 >"$RUN/ours.txt"
"$PYTHON" - "$RUN/hf" >"$RUN/theirs.txt" <<'PYTHON'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer("def ", return_tensors="pt", add_special_tokens=False)
print(tokenizer.decode(model.generate(**ids, max_new_tokens=40, do_sample=False)[0], skip_special_tokens=True))
PYTHON
cat "$RUN/theirs.txt"
cmp "$RUN/ours.txt" "$RUN/theirs.txt" && echo "(equal to what scripts/generate.py writes)"
