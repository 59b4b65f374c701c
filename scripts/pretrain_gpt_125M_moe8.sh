#!/usr/bin/env bash
# GPT of 125 M dense parameters with 8 experts in every second layer; bf16, 8 GPUs.
# Usage: DATA_PATH=PREFIX [VARIABLE=VALUE …] scripts/pretrain_gpt_125M_moe8.sh [option of pretrain_gpt …]
: "${NAME:=125M_moe8}"
: "${NUM_LAYERS:=12}" "${HIDDEN_SIZE:=768}" "${NUM_ATTN_HEADS:=12}" "${EP_SIZE:=8}" "${LR:=4.5e-4}" "${MIN_LR:=4.5e-6}"
# shellcheck source-path=SCRIPTDIR source=pretrain_gpt_moe.sh
. "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_moe.sh"
