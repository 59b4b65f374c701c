"""``bash scripts/run_cluster_tests.sh``: real Slurm, real pdsh, on nodes and hosts simulated on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from megatron_lazarus.reporting.loss_curves import read_curve
from tests.cluster import host_runs, slurm, slurm_runs
from tests.cluster.network import NetworkError
from tests.cluster.runs import prepare_data, undisturbed
from tests.cluster.slurm import SlurmError

Case = Callable[[Path, Path, Mapping[int, float]], None]
CASES: Mapping[str, Case] = {
    **{name: partial(slurm_runs.run_on_slurm, name) for name in slurm_runs.RUNS},
    **{name: partial(host_runs.run_on_hosts, name) for name in host_runs.RUNS},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="run_cluster_tests", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--keep", type=Path, help="a folder for all that the runs write; default: one that goes away")
    arguments = parser.parse_args()
    if os.geteuid():
        print("run_cluster_tests: it starts slurmd and makes network namespaces: it must be root", file=sys.stderr)
        return 2
    try:
        slurm.require_programs()
        host_runs.require_programs()
    except (SlurmError, NetworkError) as error:
        print(f"run_cluster_tests: {error}", file=sys.stderr)
        return 2
    # So that everything is brought down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        failed = _run(arguments.only, folder)
    print(f"{len(arguments.only) - len(failed)} passed, {len(failed)} failed {' '.join(failed)}".rstrip())
    return int(bool(failed))


def _run(names: list[str], folder: Path) -> list[str]:
    """Returns those that failed."""
    data = prepare_data(folder)
    place = folder / "undisturbed"
    reference = read_curve(place / "logs") if (place / "logs" / "result.json").exists() else undisturbed(place, data)
    print(f"undisturbed: {max(reference)} iterations, last loss {reference[max(reference)]:.4f}", flush=True)
    failed = []
    for name in names:
        place = folder / name
        place.mkdir()
        try:
            CASES[name](place, data, reference)
            print(f"{name}: passed", flush=True)
        except (AssertionError, SlurmError, NetworkError, subprocess.SubprocessError) as error:
            failed.append(name)
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
            for path in sorted([*place.glob("*.log"), *place.glob("logs/*.out")]):
                print(f"-- {path.name}\n{path.read_text(errors='replace')[-1500:]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
