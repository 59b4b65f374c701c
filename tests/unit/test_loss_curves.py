"""Reading loss curves back from what runs print."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lazarus.reporting.loss_curves import read_curve, table

LINE = " iteration {:8d}/     100 | consumed samples:   1 | lm loss: {:.6E} | grad norm: 1 |\n"


def test_curves_of_a_folder_and_of_a_file(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "nothing").mkdir()
    (logs / "node0.0.log").write_text("noise\n" + LINE.format(5, 4.0) + LINE.format(10, 3.0))
    (logs / "node1.0.log").write_text(LINE.format(15, 2.002))
    other = tmp_path / "other.log"
    other.write_text("".join(LINE.format(i, loss) for i, loss in ((5, 4.0), (10, 3.0), (15, 2.0), (20, 1.0))))
    run = read_curve(logs)
    assert run == {5: 4.0, 10: 3.0, 15: 2.002}
    lines = table(run, read_curve(other)).splitlines()
    assert lines[3].split() == ["15", "2.002000", "2.000000", "1.0e-03"]
    assert lines[-1] == "largest relative difference of the loss: 1.0e-03"
    with pytest.raises(ValueError, match="holds no line"):
        read_curve(tmp_path / "nothing")
