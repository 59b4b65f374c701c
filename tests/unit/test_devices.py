"""Which devices several nodes on one machine get."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lazarus.elastic.place import PlaceError, divided_devices


def gpus(folder: Path, count: int) -> Path:
    for index in range(count):
        (folder / f"0000:0{index}:00.0").mkdir()
    return folder


def test_visible_devices_are_divided_in_order():
    environment = {"CUDA_VISIBLE_DEVICES": "7,5,GPU-3,1,0", "ZE_AFFINITY_MASK": "0,1,2,3"}
    assert divided_devices(environment, 2, 2) == [
        {"CUDA_VISIBLE_DEVICES": "7,5", "ZE_AFFINITY_MASK": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-3,1", "ZE_AFFINITY_MASK": "2,3"},
    ]


def test_devices_of_the_machine_are_divided_where_nothing_is_said(tmp_path: Path):
    assert divided_devices({}, 2, 1, gpus(tmp_path, 3)) == [{"CUDA_VISIBLE_DEVICES": f"{index}"} for index in (0, 1)]


def test_too_few_devices_are_refused(tmp_path: Path):
    with pytest.raises(PlaceError, match="CUDA_VISIBLE_DEVICES is 4,5; 3 nodes of 1 workers need 3 devices"):
        divided_devices({"CUDA_VISIBLE_DEVICES": "4,5"}, 3, 1)
    with pytest.raises(PlaceError, match="need 4 devices"):
        divided_devices({}, 2, 2, gpus(tmp_path, 3))


@pytest.mark.parametrize(
    "environment", [{"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": ""}]
)
def test_nothing_is_divided_without_devices(environment: dict[str, str], tmp_path: Path):
    assert divided_devices(environment, 2, 4, gpus(tmp_path, 8)) == [{}, {}]


def test_one_node_sees_all(tmp_path: Path):
    assert divided_devices({}, 1, 2, gpus(tmp_path, 8)) == [{}]
    assert divided_devices({}, 2, 2, tmp_path / "none") == [{}, {}]
