"""``lazarus plan``: what the documentation shows, the JSON form, every input format, refusals."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_lazarus.cli import main
from megatron_lazarus.planning.plan import Placement, Plan
from megatron_lazarus.planning.planner import make_plan

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "planning.md"
SMALL = ["--nodes", "4", "--slots", "3", "--min-replicas", "2"]


def examples() -> list[tuple[str, str]]:
    """(command, output) of every block of the document that starts with a command."""
    blocks = DOCUMENT.read_text().split("```")[1::2]
    return [
        tuple(block.strip("\n").removeprefix("$ lazarus ").split("\n", 1))  # type: ignore[misc]
        for block in blocks
        if block.strip("\n").startswith("$ lazarus plan")
    ]


def test_document_has_examples():
    assert len(examples()) >= 3


@pytest.mark.parametrize(("command", "output"), examples())
def test_example_prints_what_the_document_shows(command, output, capsys):
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.strip("\n") == output


def test_json_holds_the_plan(capsys):
    assert (
        main(["plan", "--zipf", "1", "--layers", "2", "--experts", "5", "--ranks-per-node", "2", "--json", *SMALL]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    shares = 1 / np.arange(1, 6)
    loads = np.tile(np.floor(1e6 * shares / shares.sum()), (2, 1))
    plan = make_plan(loads, [0, 0, 1, 1, 2, 2, 3, 3], [2, 1] * 4, 2)
    assert report["nodes"] == 4
    assert report["digest"] == plan.digest()
    for layer, placement in zip(report["layers"], plan.layers, strict=True):
        pairs = zip(placement.slots[::2], placement.slots[1::2], strict=True)
        assert layer["nodes"] == [list(one + two) for one, two in pairs]
        assert layer["replicas"] == placement.replica_counts().sum(axis=1).tolist()
    assert set(report["survival"]) == {"plan", "paper MRO", "spread", "compact"}
    assert all(len(curve) == 5 for curve in report["survival"].values())


def test_every_format_gives_the_same_plan(tmp_path, capsys):
    loads = np.array([[40, 30, 20, 10], [1, 2, 3, 4]])
    np.savetxt(tmp_path / "loads.csv", loads, delimiter=",", fmt="%d")
    np.savez(tmp_path / "loads.npz", loads=loads)
    (tmp_path / "loads.json").write_text(json.dumps(loads.tolist()))
    outputs = set()
    for suffix in ("csv", "npz", "json"):
        assert main(["plan", "--loads", str(tmp_path / f"loads.{suffix}"), *SMALL]) == 0
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1


def test_bytes_to_migrate_from_the_current_plan(tmp_path, capsys):
    """The current plan is the new one with one replica exchanged: two records cross nodes, or none if mapped away."""
    (tmp_path / "loads.csv").write_text("5,5,5,5\n")
    arguments = ["plan", "--loads", str(tmp_path / "loads.csv"), "--nodes", "2", "--slots", "2", "--min-replicas", "1"]
    assert main([*arguments, "--json"]) == 0
    new = json.loads(capsys.readouterr().out)["layers"][0]["nodes"]
    current = {"nodes": 2, "layers": [{"nodes": [[new[0][0], new[1][0]], [new[0][1], new[1][1]]]}]}
    (tmp_path / "current.json").write_text(json.dumps(current))
    assert main([*arguments, "--json", "--current", str(tmp_path / "current.json"), "--record-bytes", "1000"]) == 0
    moved = json.loads(capsys.readouterr().out)["migration"]
    assert moved["between_nodes_bytes"] == 2000
    assert moved["missing_records"] == 0


def test_plot_is_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plan", "--zipf", "1", "--experts", "6", "--plot", str(tmp_path / "out.png"), *SMALL]) == 0
    picture = (tmp_path / "out.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--zipf", "1", *SMALL], "--zipf needs --experts"),
        (["--zipf", "-1", "--experts", "4", *SMALL], "--zipf is -1.0; it must be from 0 to 20"),
        (["--zipf", "1", "--experts", "40", *SMALL], "slots gives 12 slots for 40 experts"),
        (["--zipf", "1", "--experts", "4", *SMALL[:-1], "5"], "min_replicas is 5; it must be an integer from 1 to 4"),
        (["--zipf", "1", "--experts", "4", "--domains", "a,b", *SMALL], "domains has no entry for nodes [2, 3]"),
        (["--zipf", "1", "--experts", "4", "--weights", "1,1,1,0", *SMALL], "weights[3] is 0.0"),
        (["--loads", "nowhere.csv", *SMALL], "nowhere.csv"),
        (["--loads", "loads.txt", *SMALL], "its suffix must be .csv, .npz or .json"),
    ],
)
def test_refusals_name_the_argument(arguments, says, capsys):
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_plan_round_trips_through_json():
    plan = Plan((Placement(2, ((0,), (1, 0))),), (0, 3))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
