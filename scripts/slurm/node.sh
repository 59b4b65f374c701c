# shellcheck shell=bash
# What the Slurm scripts have in common; sourced by them, and run by srun on every node of a job.
# PRETRAIN: the script that starts the training; MIN_NODES, NODES, OUTPUT and LOG_DIR are handed on to it.

: "${PRETRAIN:?run one of the scripts pretrain_*.sbatch instead}" "${OUTPUT:?}" "${DATA_PATH:?set DATA_PATH}"
: "${LOG_DIR:=${OUTPUT}/logs}" "${LAZARUS_POLL_S:=5}"
export LAUNCHER=join LOG_DIR DATA_PATH OUTPUT
ALIVE="${LOG_DIR}/batch-${SLURM_JOB_ID}.alive"
: "${ALIVE_LIMIT_S:=60}"
# Exit status of `lazarus join` when its node was asked to leave.
LEFT=79
asked=""

has_status() {
    grep -qs "\"status\": \"$1\"" "${LOG_DIR}/result.json"
}

# drain PID SIGNAL: the node hands over what only it holds, and leaves. Slurm may tell the process itself, too.
drain() {
    asked="$2"
    echo "$(date +%T) SIG$2: leaving"
    kill -TERM "$1" 2>/dev/null
}

# wait_for PID ACTION...: its exit status; meanwhile the actions, every LAZARUS_POLL_S seconds.
wait_for() {
    local pid="$1" action pause status
    shift
    while kill -0 "${pid}" 2>/dev/null; do
        for action in "$@"; do
            "${action}"
        done
        sleep "${LAZARUS_POLL_S}" &
        pause=$!
        # A trap ends this wait, not the process waited for.
        wait -n "${pid}" "${pause}" 2>/dev/null
        kill "${pause}" 2>/dev/null
    done
    wait "${pid}"
    status=$?
    return "${status}"
}

# Slurm holds back what it has requeued, for about two minutes. One of those who are left ends that.
release() {
    local turn="${LOG_DIR}/released" id reason restarts
    if [[ -n "$(find "${turn}" -newermt '-10 seconds' 2>/dev/null)" ]]; then
        return
    fi
    touch "${turn}" 2>/dev/null
    squeue --noheader --array --me --states=PENDING --name="${SLURM_JOB_NAME}" \
        --Format=JobArrayID:40,Reason:40,RestartCnt:10 2>/dev/null |
        while read -r id reason restarts; do
            if [[ "${reason}" == BeginTime && "${restarts}" -gt 0 ]]; then
                echo "$(date +%T) releasing ${id}, which was requeued"
                scontrol update jobid="${id}" StartTime=now
            fi
        done
}

# Whether this job is still meant to run: not cancelled, nor being requeued by Slurm itself.
is_wanted() {
    [[ "$(squeue --noheader --jobs="${SLURM_JOB_ID}" --Format=State:20 2>/dev/null | tr -d ' ')" == RUNNING ]]
}

# requeue STATUS: come back when there are nodes again; ends this script.
requeue() {
    # shellcheck disable=SC2064  # the status of now
    trap "exit $1" TERM
    echo "$(date +%T) requeue: back when Slurm has nodes again"
    scontrol requeue "${SLURM_JOB_ID}"
    # Slurm ends us now; an exit of our own could come first, and be taken for the job's end.
    sleep 30 &
    wait $!
    exit "$1"
}

# follow_run [requeue] [release]: run this node until the run is complete; its exit status is the script's.
follow_run() {
    local pid status=0 requeue="" actions=()
    if [[ "${1:-}" == requeue ]]; then
        requeue=yes
        shift
    fi
    actions=("$@")
    mkdir -p "${LOG_DIR}"
    bash "${PRETRAIN}" &
    pid=$!
    # shellcheck disable=SC2064  # the process of now
    trap "drain ${pid} TERM" TERM
    # shellcheck disable=SC2064
    trap "drain ${pid} USR1" USR1
    wait_for "${pid}" "${actions[@]}" || status=$?
    if has_status completed; then
        exit 0
    fi
    echo "$(date +%T) node ${SLURMD_NODENAME:-} has ended with status ${status}${asked:+ after SIG${asked}}"
    if [[ -n "${requeue}" && "${status}" == "${LEFT}" ]] && is_wanted; then
        # A departure that nobody has cancelled: preemption, the end of the time limit, a spot notice.
        requeue "${status}"
    fi
    exit $((status ? status : 1))
}

still_here() {
    date +%s >"${ALIVE}" 2>/dev/null
}

# follow_job PID: of the batch script of a job whose step is this srun.
follow_job() {
    # shellcheck disable=SC2064
    trap "drain_step $1 TERM" TERM
    # shellcheck disable=SC2064
    trap "drain_step $1 USR1" USR1
    still_here
    # Its status says nothing: it is 0, too, after the loss of a node.
    wait_for "$1" still_here || true
    rm -f "${ALIVE}"
    if has_status completed; then
        exit 0
    fi
    if { [[ -n "${asked}" ]] || has_status drained; } && is_wanted; then
        requeue 1
    fi
    echo "the run is not complete; see ${LOG_DIR}" >&2
    exit 1
}

drain_step() {
    asked="$2"
    echo "$(date +%T) SIG$2: leaving"
    # srun passes this one on to all tasks; a SIGTERM would end srun.
    kill -USR1 "$1" 2>/dev/null
}

# When the host of the batch script is lost nobody ends the job: it would keep its nodes until its time limit.
end_orphaned_job() {
    local seen waited
    seen="$(cat "${ALIVE}" 2>/dev/null)"
    for ((waited = 0; waited < ALIVE_LIMIT_S; waited++)); do
        # Without the file the batch script has seen the end itself.
        if [[ ! -e "${ALIVE}" || "$(cat "${ALIVE}" 2>/dev/null)" != "${seen}" ]]; then
            return
        fi
        sleep 1
    done
    echo "the run is over, and the host of the batch script is gone: cancelling job ${SLURM_JOB_ID}"
    scancel "${SLURM_JOB_ID}"
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    # Its node may also end alone, while the others train.
    trap 'if [[ -e "${LOG_DIR}/result.json" ]]; then end_orphaned_job; fi' EXIT
    follow_run "$@"
fi
