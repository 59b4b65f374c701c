"""Files as they are written, against what the safetensors library reads."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_lazarus.checkpoint import deepspeed_layout, writer
from megatron_lazarus.checkpoint.image import PAGE, FileImage, page_aligned
from megatron_lazarus.checkpoint.manifest import Manifest
from megatron_lazarus.checkpoint.memory import HostBuffer
from megatron_lazarus.checkpoint.restore import read_dense
from megatron_lazarus.checkpoint.writer import write_image

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.arange(7, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.5),
    "weight": torch.randn(1000, 700),
    "turned": torch.randn(5, 9).t(),
    "steps": torch.arange(11),
    "double": torch.randn(3, dtype=torch.float64),
}


def check(folder: Path, image: FileImage, tensors: dict[str, Tensor]) -> None:
    entry = write_image(str(folder), "file", image)
    data = (folder / "file").read_bytes()
    assert (entry.bytes, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    read = load_file(folder / "file")
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Files whose first write is cut short, and which then refuse direct writes as a file system may: EINVAL."""
    refused: list[int] = []

    class Refusing(io.FileIO):
        def write(self, data: Any) -> int:
            if fcntl.fcntl(self, fcntl.F_GETFL) & os.O_DIRECT:
                if self.tell():
                    refused.append(self.tell())
                    raise OSError(errno.EINVAL, "Invalid argument")
                return super().write(memoryview(data)[:PAGE])
            return super().write(data)

    @contextlib.contextmanager
    def new_file(path: str) -> Iterator[io.FileIO]:
        with Refusing(path, "x") as file:
            yield file

    monkeypatch.setattr(writer, "_new_file", new_file)
    return refused


def test_any_tensors(tmp_path: Path) -> None:
    check(tmp_path, FileImage.of(TENSORS), TENSORS)


def test_a_file_system_that_cannot_take_it_directly(tmp_path: Path, refusing: list[int]) -> None:
    check(tmp_path, FileImage.of(TENSORS), TENSORS)
    assert refusing == [PAGE], "the page cache is used after the first refusal, for the rest"


def test_other_errors_are_not_taken_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: io.FileIO, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        write_image(str(tmp_path), "file", FileImage.of(TENSORS))
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        write_image(str(tmp_path), "file", FileImage.of(TENSORS))
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_giving_up_leaves_nothing(tmp_path: Path) -> None:
    def between() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_image(str(tmp_path), "file", FileImage.of(TENSORS), between)
    assert os.listdir(tmp_path) == []


def test_a_buffer_serves_one_save_after_another(tmp_path: Path) -> None:
    """Also a smaller one, whose files are laid out where the larger one's data still are."""
    buffer = HostBuffer()
    for turn, names in enumerate((list(TENSORS), ["half", "steps"], ["weight"])):
        files = {f"{name}-{index}": {name: TENSORS[name]} for index, name in enumerate(names)}
        for name, image in buffer.images(files).items():
            for key, tensor in files[name].items():
                image.tensors[key].copy_(tensor)
            assert image.memory.data_ptr() % PAGE == image.memory.numel() % PAGE == 0
            assert not image.memory[image.size :].any(), "what follows the end is written too, for a moment"
            folder = tmp_path / f"{turn}-{name}"
            folder.mkdir()
            check(folder, image, files[name])


def test_items_and_tensors_are_aligned() -> None:
    image = FileImage.of(TENSORS)
    data = bytes(image.memory.tolist()[: image.size])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 64 == 0
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])], "safetensors allows no gaps"
    assert spans[-1][1] + 8 + length == image.size
    for name, entry in header.items():
        assert entry["data_offsets"][0] % TENSORS[name].element_size() == 0


def test_pages() -> None:
    for size in (0, 1, PAGE, 5 * PAGE + 1):
        memory = page_aligned(size)
        assert memory.numel() == size
        assert size == 0 or memory.data_ptr() % PAGE == 0


def test_an_imported_dense_part_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_layout, "_PIECE", 1 << 20)
    monkeypatch.setattr(deepspeed_layout, "_FILE", 3 << 19)
    state = {"module": {**TENSORS, "large": torch.randn(1 << 19)}, "step": 3}
    (tmp_path / "tag").mkdir()
    files = deepspeed_layout._write_dense(str(tmp_path / "tag"), state)
    shards = [entry for entry in files if entry.name.endswith(".safetensors")]
    assert len(shards) > 2
    assert all(entry.bytes < (3 << 19) + 4096 for entry in shards)
    read = read_dense(str(tmp_path), Manifest("tag", 0, 3, {}, files))
    assert read["step"] == 3
    assert read["module"].keys() == state["module"].keys()
    for name, tensor in state["module"].items():
        assert torch.equal(read["module"][name], tensor)
