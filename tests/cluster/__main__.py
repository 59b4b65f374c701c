"""``bash scripts/run_cluster_tests.sh``: real Slurm, real pdsh, on hosts and nodes simulated on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from tests.cluster import slurm_runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = list(slurm_runs.RUNS)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--keep", type=Path, help="a folder for all that the runs write; default: one that goes away")
    arguments = parser.parse_args()
    if os.geteuid():
        print(
            "run_cluster_tests: it starts slurmd and makes network namespaces: it must be root",
            file=sys.stderr,
        )
        return 2
    # So that everything is brought down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        data = slurm_runs.prepare_data(folder)
        reference = slurm_runs.undisturbed(folder / "undisturbed", data)
        print(f"undisturbed: {len(reference)} losses, the last {list(reference.values())[-1]:.4f}", flush=True)
        failed = slurm_runs.run_all(folder, arguments.only, data, reference)
    print(f"{len(arguments.only) - len(failed)} passed, {len(failed)} failed {' '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
