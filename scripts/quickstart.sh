#!/usr/bin/env bash
# Sets up everything on a fresh machine, pretrains a small GPT-MoE on real text on four local nodes, kills one of them
# in the middle, takes it back later, and compares the result with an undisturbed run.
# Usage: bash scripts/quickstart.sh [option of pretrain_gpt …]      (OUTPUT=DIR: where to, default output/quickstart)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source-path=SCRIPTDIR source=setup_environment.sh
. scripts/setup_environment.sh

output="${OUTPUT:-output/quickstart}"
export TRAIN_ITERS="${TRAIN_ITERS:-100}" NUM_GPUS=4 SAVE_INTERVAL=50 EVAL_INTERVAL=50 LOG_INTERVAL=5
# A quickstart shows runs from their first step; it keeps the text it has fetched.
rm -rf "${output}/undisturbed" "${output}/disturbed"
mkdir -p "${output}"
started=$SECONDS

echo "== 1. An undisturbed run, under the deepspeed command"
export OUTPUT="${output}/undisturbed"
if [[ -d "${output}/data" ]]; then
    mkdir -p "${OUTPUT}" && mv "${output}/data" "${OUTPUT}/data"
fi
LAUNCHER=deepspeed MASTER_PORT="${MASTER_PORT:-29500}" bash scripts/pretrain_gpt_tiny.sh "$@" 2>&1 |
    grep --line-buffered -Ev '^\[[0-9-]+ [0-9:,]+\]'
mv "${OUTPUT}/data" "${output}/data"

echo
echo "== 2. The same on four nodes of one rank; node2 is killed in the middle and comes back later"
export OUTPUT="${output}/disturbed" DATA_PATH="${output}/data/text_text_document"
export LOG_DIR="${OUTPUT}/logs"
log="${LOG_DIR}/node0.0.log"
mkdir -p "${LOG_DIR}"
touch "${log}"
LAUNCHER=lazarus NODES=4 bash scripts/pretrain_gpt_tiny.sh "$@" &
job=$!
# The process that is stopped in the end is tail: cut then writes what it still holds.
tail -n +1 -F "${log}" 2>/dev/null > >(stdbuf -oL cut -c1-230) &
viewer=$!
trap 'kill ${job} ${viewer} 2>/dev/null || true' EXIT

# reach ITERATION: waits until the log shows it, at most five minutes
reach() {
    for _ in $(seq 600); do
        if grep -q "^ iteration *$1/" "${log}"; then
            return
        fi
        kill -0 "${job}" 2>/dev/null || break
        sleep 0.5
    done
    echo "quickstart: the run has not come to iteration $1; see ${LOG_DIR}" >&2
    exit 1
}

reach $((TRAIN_ITERS * 3 / 10 / 5 * 5))
agent="$(pgrep -f "elastic.agent --node node2 .*$(realpath "${LOG_DIR}")" | head -n 1)"
echo "== kill -9 of node2: processes ${agent} $(pgrep -P "${agent}" | tr '\n' ' ')"
# shellcheck disable=SC2046  # one word a process
kill -KILL "${agent}" $(pgrep -P "${agent}")
reach $((TRAIN_ITERS * 4 / 10 / 5 * 5))
echo "== node2 comes back: lazarus add-node"
lazarus add-node --node node2 --log-dir "${LOG_DIR}" >"${LOG_DIR}/returned.txt" 2>&1 &
returned=$!
wait "${job}"
# On a slow machine the run may be over before the returned node has loaded its libraries; the report tells.
wait "${returned}" || echo "quickstart: node2 did not get back in before the run ended"
sleep 0.5
kill "${viewer}" 2>/dev/null || true
trap - EXIT

echo
echo "== 3. What happened"
lazarus report --log-dir "${LOG_DIR}"
echo
python -m megatron_lazarus.reporting.loss_curves "${LOG_DIR}" "${output}/undisturbed/pretrain_gpt_tiny.log"
grep -h "unigram entropy" "${LOG_DIR}"/*.log
echo "Checkpoint: ${OUTPUT}/checkpoint/$(cat "${OUTPUT}/checkpoint/latest"). Took $((SECONDS - started)) s."
