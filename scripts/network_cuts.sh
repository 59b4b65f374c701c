#!/usr/bin/env bash
# Cuts the network of training jobs in two and heals it, and checks which side goes on. Needs root: every host is a
# network namespace of its own, and so is the switch between them; the machine's own network is not touched.
#   sudo bash scripts/network_cuts.sh                all cuts, a table in the end
#   sudo bash scripts/network_cuts.sh --only 0 1     some of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_environment.sh
source scripts/setup_environment.sh

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
exec python -m tests.cluster.network_cuts "$@"
