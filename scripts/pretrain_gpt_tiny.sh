#!/usr/bin/env bash
# A GPT of 1 M parameters with 8 experts, on bytes; fp32, 4 local ranks, two CPU cores are enough.
# Usage: [VARIABLE=VALUE …] scripts/pretrain_gpt_tiny.sh [option of pretrain_gpt …]
# Without DATA_PATH it fetches a few megabytes of text from the package index and preprocesses them first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${NAME:=tiny}" "${NUM_GPUS:=4}" "${OUTPUT:=output/tiny}"
: "${NUM_LAYERS:=2}" "${HIDDEN_SIZE:=128}" "${NUM_ATTN_HEADS:=4}" "${SEQ_LEN:=128}" "${POSITION_EMBEDDING:=rope}"
: "${DROPOUT:=0.0}" "${EP_SIZE:=8}" "${TOPK:=1}" "${MOE_DROP_TOKEN:=false}" "${ACTIVATION_CHECKPOINT:=false}"
: "${TRAIN_ITERS:=150}" "${LR:=3e-3}" "${MIN_LR:=3e-4}" "${WARMUP_ITERS:=10}"
: "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=50}" "${EVAL_ITERS:=4}" "${SAVE_INTERVAL:=50}" "${SPLIT:=90,5,5}"
: "${TOKENIZER_TYPE:=ByteLevelTokenizer}"
if [[ -z "${DATA_PATH:-}" ]]; then
    DATA_PATH="${OUTPUT}/data/text_text_document"
    if [[ ! -f "${DATA_PATH}.idx" ]]; then
        python -m megatron_lazarus.models.text --output "${OUTPUT}/data/text.jsonl"
        python scripts/preprocess_data.py --input "${OUTPUT}/data/text.jsonl" --output-prefix "${OUTPUT}/data/text" \
            --tokenizer-type "${TOKENIZER_TYPE}" --append-eod
    fi
fi
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
set -- --log-unigram-entropy "$@"
# shellcheck source-path=SCRIPTDIR source=pretrain_gpt_moe.sh
. scripts/pretrain_gpt_moe.sh
