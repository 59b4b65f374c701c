#!/usr/bin/env bash
# GPT of 1.3 B dense parameters with 12 experts in every second layer; bf16, 8 GPUs.
# Usage: DATA_PATH=PREFIX [VARIABLE=VALUE …] scripts/pretrain_gpt_1.3B_moe12.sh [option of pretrain_gpt …]
: "${NAME:=1.3B_moe12}"
: "${NUM_LAYERS:=24}" "${HIDDEN_SIZE:=2048}" "${NUM_ATTN_HEADS:=16}" "${EP_SIZE:=12}" "${LR:=1.2e-4}" "${MIN_LR:=1.0e-6}"
# shellcheck source-path=SCRIPTDIR source=pretrain_gpt_moe.sh
. "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_moe.sh"
