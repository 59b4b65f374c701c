#!/usr/bin/env bash
# Sets up everything on a fresh machine and pretrains a small GPT-MoE on real text on four local ranks.
# Usage: bash scripts/quickstart.sh [option of pretrain_gpt …]      (OUTPUT=DIR: where to, default output/quickstart)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source-path=SCRIPTDIR source=setup_environment.sh
. scripts/setup_environment.sh

export OUTPUT="${OUTPUT:-output/quickstart}"
# A quickstart shows a run from its first step; it keeps the text it has fetched.
rm -rf "${OUTPUT}/checkpoint"
started=$SECONDS
bash scripts/pretrain_gpt_tiny.sh "$@"
echo
echo "Trained in $((SECONDS - started)) s. Checkpoint: ${OUTPUT}/checkpoint/$(cat "${OUTPUT}/checkpoint/latest")," \
    "$(find "${OUTPUT}/checkpoint" -name '*.safetensors' | wc -l) expert records in its tags."
