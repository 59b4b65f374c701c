#!/usr/bin/env bash
# Trains on a real Slurm cluster of virtual nodes, and over pdsh and ssh on hosts with addresses of their own, all of it
# raised on this machine and brought down afterwards. Nodes are powered off, cancelled and preempted, links are cut.
# Needs root and the packages slurm-wlm munge pdsh openssh-server openssh-client iproute2 (apt-get install
# --no-install-recommends …); nothing has to be running or configured. Takes about half an hour on two cores.
#   sudo bash scripts/run_cluster_tests.sh                       everything
#   sudo bash scripts/run_cluster_tests.sh --only array pdsh     some of: array job batch-host pdsh no-ssh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_environment.sh
source scripts/setup_environment.sh

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
exec python -m tests.cluster "$@"
