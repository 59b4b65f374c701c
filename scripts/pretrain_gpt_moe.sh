#!/usr/bin/env bash
# What the pretrain_gpt_*.sh scripts have in common; they set the sizes and source this file.
# Every upper-case variable can be set from the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${NAME:?run one of the pretrain_gpt_*.sh scripts instead}"
: "${DS_CONFIG:=configs/ds_config_gpt_${NAME}.json}"
: "${NUM_GPUS:=8}" "${HOSTFILE:=}" "${DEEPSPEED_ARGS:=}" "${MASTER_PORT:=29500}" "${SPOT:=}" "${MAX_NODES:=}"
: "${TRAIN_SCRIPT:=scripts/pretrain_gpt.py}"
# HOSTFILE: pdsh and ssh; DEEPSPEED_ARGS: more options, such as --no_ssh --node_rank N --master_addr HOST
# LAUNCHER=join: this host's node, of NUM_GPUS ranks, of a job that starts with NODES such hosts (scripts/slurm);
# LAUNCHER=lazarus or deepspeed-elastic: NODES local nodes of NUM_GPUS/NODES ranks each, of which MIN_NODES must survive;
# with a HOSTFILE deepspeed-elastic makes every host a node, or several of RANKS_PER_NODE ranks
: "${LAUNCHER:=deepspeed}" "${NODES:=${NUM_GPUS}}" "${MIN_NODES:=1}" "${RANKS_PER_NODE:=}"

: "${NUM_LAYERS:=12}" "${HIDDEN_SIZE:=768}" "${NUM_ATTN_HEADS:=12}" "${SEQ_LEN:=2048}"
: "${POSITION_EMBEDDING:=learned_absolute}" "${DROPOUT:=0.1}"
: "${EP_SIZE:=8}" "${TOPK:=1}" "${EXPERT_INTERVAL:=2}" "${MLP_TYPE:=standard}" "${MLC:=0.01}"
: "${MOE_DROP_TOKEN:=true}" "${MOE_TRAIN_CAP_FACTOR:=1.0}" "${MOE_EVAL_CAP_FACTOR:=1.0}" "${MOE_MIN_CAP:=4}"

: "${TRAIN_ITERS:=100000}" "${LR:=4.5e-4}" "${MIN_LR:=4.5e-6}" "${LR_DECAY_STYLE:=cosine}"
: "${WARMUP_ITERS:=$((TRAIN_ITERS / 100))}" "${WEIGHT_DECAY:=0.1}" "${ADAM_BETA2:=0.95}" "${SEED:=1234}"
: "${LOG_INTERVAL:=10}" "${EVAL_INTERVAL:=1000}" "${EVAL_ITERS:=10}" "${SAVE_INTERVAL:=1000}"
: "${ACTIVATION_CHECKPOINT:=true}"

: "${DATA_PATH:?set DATA_PATH to the prefix of a data set written by scripts/preprocess_data.py}"
: "${TOKENIZER_TYPE:=GPT2BPETokenizer}" "${TOKENIZER_MODEL:=}" "${VOCAB_FILE:=}" "${MERGE_FILE:=}" "${SPLIT:=949,50,1}"
: "${OUTPUT:=output/${NAME}}" "${CHECKPOINT_PATH:=${OUTPUT}/checkpoint}" "${TENSORBOARD_DIR:=}"

RESULT="" STATUS=0
case "${LAUNCHER}" in
lazarus)
    LAUNCH=(lazarus run --nnodes "${MIN_NODES}:${NODES}" --local-nodes "${NODES}" --nproc-per-node "$((NUM_GPUS / NODES))"
        --config "${DS_CONFIG}" --log-dir "${LOG_DIR:=${OUTPUT}/logs}")
    ;;
join)
    LAUNCH=(lazarus join --min-nodes "${MIN_NODES}" --start-nodes "${NODES}" --nproc-per-node "${NUM_GPUS}"
        --config "${DS_CONFIG}" --log-dir "${LOG_DIR:=${OUTPUT}/logs}")
    if [[ -n "${MAX_NODES}" ]]; then
        LAUNCH+=(--max-nodes "${MAX_NODES}")
    fi
    if [[ -n "${SPOT}" ]]; then
        LAUNCH+=(--spot "${SPOT}")
    fi
    ;;
deepspeed | deepspeed-elastic)
    LAUNCH=(deepspeed --num_gpus "${NUM_GPUS}" --master_port "${MASTER_PORT}")
    if [[ -n "${HOSTFILE}" ]]; then
        read -r -a MORE <<<"${DEEPSPEED_ARGS}"
        LAUNCH=(deepspeed --hostfile "${HOSTFILE}" --master_port "${MASTER_PORT}" "${MORE[@]}")
    fi
    if [[ "${LAUNCHER}" == deepspeed-elastic ]]; then
        : "${LOG_DIR:=${OUTPUT}/logs}"
        RESULT="${LOG_DIR}/result.json"
        LAUNCH+=(--module megatron_lazarus.launch --min-nodes "${MIN_NODES}" --log-dir "${LOG_DIR}")
        if [[ -z "${HOSTFILE}" ]]; then
            : "${RANKS_PER_NODE:=$((NUM_GPUS / NODES))}"
        fi
        if [[ -n "${RANKS_PER_NODE}" ]]; then
            LAUNCH+=(--ranks-per-node "${RANKS_PER_NODE}")
        fi
        # That of an earlier run must not be taken for this one's.
        rm -f "${RESULT}"
    fi
    ;;
*)
    echo "LAUNCHER is '${LAUNCHER}'; it must be deepspeed, deepspeed-elastic, lazarus or join" >&2
    exit 2
    ;;
esac

OPTIONS=(
    --num-layers "${NUM_LAYERS}" --hidden-size "${HIDDEN_SIZE}" --num-attention-heads "${NUM_ATTN_HEADS}"
    --seq-length "${SEQ_LEN}" --max-position-embeddings "${SEQ_LEN}" --position-embedding-type "${POSITION_EMBEDDING}"
    --hidden-dropout "${DROPOUT}" --attention-dropout "${DROPOUT}"
    --num-experts "${EP_SIZE}" --topk "${TOPK}" --expert-interval "${EXPERT_INTERVAL}" --mlp-type "${MLP_TYPE}"
    --moe-loss-coeff "${MLC}" --moe-min-capacity "${MOE_MIN_CAP}"
    --moe-train-capacity-factor "${MOE_TRAIN_CAP_FACTOR}" --moe-eval-capacity-factor "${MOE_EVAL_CAP_FACTOR}"
    --train-iters "${TRAIN_ITERS}" --lr "${LR}" --min-lr "${MIN_LR}" --lr-decay-style "${LR_DECAY_STYLE}"
    --lr-warmup-iters "${WARMUP_ITERS}" --weight-decay "${WEIGHT_DECAY}" --adam-beta2 "${ADAM_BETA2}" --seed "${SEED}"
    --log-interval "${LOG_INTERVAL}" --eval-interval "${EVAL_INTERVAL}" --eval-iters "${EVAL_ITERS}"
    --save "${CHECKPOINT_PATH}" --load "${CHECKPOINT_PATH}" --save-interval "${SAVE_INTERVAL}"
    --split "${SPLIT}" --tokenizer-type "${TOKENIZER_TYPE}"
    --deepspeed --deepspeed_config "${DS_CONFIG}"
)
if [[ "${MOE_DROP_TOKEN}" != true ]]; then
    OPTIONS+=(--disable-moe-token-dropping)
fi
if [[ "${ACTIVATION_CHECKPOINT}" == true ]]; then
    OPTIONS+=(--recompute-granularity full)
fi
if [[ -n "${TOKENIZER_MODEL}" ]]; then
    OPTIONS+=(--tokenizer-model "${TOKENIZER_MODEL}")
fi
if [[ -n "${VOCAB_FILE}" ]]; then
    OPTIONS+=(--vocab-file "${VOCAB_FILE}" --merge-file "${MERGE_FILE}")
fi
if [[ -n "${TENSORBOARD_DIR}" ]]; then
    OPTIONS+=(--tensorboard-dir "${TENSORBOARD_DIR}")
fi

# DATA_PATH may hold several words: WEIGHT PREFIX WEIGHT PREFIX …
read -r -a DATA_WORDS <<<"${DATA_PATH}"
mkdir -p "${OUTPUT}"
if [[ "${LAUNCHER}" == join ]]; then
    # In this process: signals are for it, and its exit status tells what has become of the node.
    exec "${LAUNCH[@]}" "${TRAIN_SCRIPT}" "${OPTIONS[@]}" --data-path "${DATA_WORDS[@]}" "$@"
fi
"${LAUNCH[@]}" "${TRAIN_SCRIPT}" "${OPTIONS[@]}" --data-path "${DATA_WORDS[@]}" "$@" 2>&1 |
    tee -a "${OUTPUT}/pretrain_gpt_${NAME}.log" || STATUS=$?

# The deepspeed command also ends with status 0 when its launcher was killed, or while other hosts still train, and with
# another one when a host was lost that the others did without.
if [[ -n "${RESULT}" ]]; then
    if [[ ! -f "${RESULT}" ]]; then
        echo "the job has no result: ${RESULT} is missing" >&2
        exit 1
    fi
    STATUS=0
    lazarus status --log-dir "${LOG_DIR}" || STATUS=$?
fi
exit "${STATUS}"
