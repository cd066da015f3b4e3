#!/usr/bin/env bash
# Train heads for a model, fit the tree to this machine, measure, and export the heads.
#
#   examples/train_tune_export.sh                                   the embedded demo model, a little data: some minutes
#   examples/train_tune_export.sh MODEL train.jsonl prompts.jsonl [FOLDER]
#
# MODEL is a folder or a hub id; the files hold JSON lines as docs/data.md says. FOLDER (default: runs/own) gets the configuration
# and the exports. The heads are written to the folder that the configuration names, which must not exist yet.
set -euo pipefail
out=${4:-runs/own}
mkdir -p "$out"
if [ $# -ge 3 ]; then
  model=$1 train=$2 prompts=$3
else
  # Requests that this model knows: some to train with, others as prompts.
  model=$(python -c 'from medusa_decoding.demo import CHECKPOINT; print(CHECKPOINT / "base")')
  train=$out/train.jsonl prompts=$out/prompts.jsonl
  requests() { PYTHONPATH=$(dirname "$0")/..${PYTHONPATH:+:$PYTHONPATH} python -m recipes.demo.requests "$@"; }
  requests "$train" --count 200 --seed 3
  requests "$prompts" --count 20 --seed 4
fi

# A configuration that fits model, data and device; then the model writes answers, and heads learn them. vLLM reads no heads whose
# drafts see the tokens before them: without the two --set, they would guess better, and only this package could use them.
medusa train --init "$model" "$train" --out "$out/heads.yaml"
medusa distill --config "$out/heads.yaml" --set heads.root_rank=0 --set heads.parent_rank=0
heads=$(python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["output"]["folder"])' "$out/heads.yaml")/heads

# How often the heads are right on these prompts; then the tree with the most tokens per second on this device. On a machine
# that is too busy to tell, each step picks a tree.
medusa calibrate --model "$heads" --prompts "$prompts" --max-new-tokens 64
medusa tune --model "$heads" --undecided auto

# Tokens per step and the speedup over plain decoding and transformers; the texts must be equal.
medusa eval --model "$heads" --prompts "$prompts" --max-new-tokens 64

# For vLLM 0.28 to 0.32, and as one folder with the base model.
medusa export --model "$heads" --out "$out/for-vllm" --format vllm --overwrite
medusa export --model "$heads" --out "$out/one-folder" --format embedded --overwrite
