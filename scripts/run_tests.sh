#!/usr/bin/env bash
# Runs the tests, on a fresh machine after installing what they need. Arguments are pytest's:
#   bash scripts/run_tests.sh                       what every change must pass
#   bash scripts/run_tests.sh --extensive           everything: many more faults, much longer
#   bash scripts/run_tests.sh tests/unit -k records
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup_environment.sh
source scripts/setup_environment.sh

# The tests limit themselves; should one hang all the same, this shows where.
exec python -X faulthandler -m pytest -o faulthandler_timeout=300 "$@"
