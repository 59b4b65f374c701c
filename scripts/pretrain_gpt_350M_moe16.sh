#!/usr/bin/env bash
# GPT of 350 M dense parameters with 16 experts in every second layer; bf16, 8 GPUs.
# Usage: DATA_PATH=PREFIX [VARIABLE=VALUE …] scripts/pretrain_gpt_350M_moe16.sh [option of pretrain_gpt …]
: "${NAME:=350M_moe16}"
: "${NUM_LAYERS:=24}" "${HIDDEN_SIZE:=1024}" "${NUM_ATTN_HEADS:=16}" "${EP_SIZE:=16}" "${LR:=2.0e-4}" "${MIN_LR:=2.0e-6}"
# shellcheck source-path=SCRIPTDIR source=pretrain_gpt_moe.sh
. "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_moe.sh"
