"""Files as they are written, against what the safetensors library reads."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_lazarus.checkpoint import deepspeed_layout, writer
from megatron_lazarus.checkpoint.image import PAGE, FileImage, page_aligned
from megatron_lazarus.checkpoint.manifest import Manifest
from megatron_lazarus.checkpoint.memory import HostBuffer
from megatron_lazarus.checkpoint.restore import read_dense
from megatron_lazarus.checkpoint.writer import write_bytes, write_image

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


class Flags:
    """``fcntl`` of a file system that takes data past the page cache, whatever the one of this machine can."""

    F_GETFL, F_SETFL = fcntl.F_GETFL, fcntl.F_SETFL

    @staticmethod
    def fcntl(file: Stubborn, command: int, flags: int = 0) -> int:
        if command == Flags.F_SETFL:
            file.flags = flags
        return file.flags


class Stubborn(io.FileIO):
    """Takes one page directly, then fails with ``direct``; through the page cache with ``cached``, unless that is 0."""

    direct, cached = errno.EINVAL, 0
    flags = 0
    failures: ClassVar[list[int]] = []

    def write(self, data: Any) -> int:
        is_direct = bool(self.flags & os.O_DIRECT)
        if is_direct and not self.tell():
            return super().write(memoryview(data)[:PAGE])
        if error := self.direct if is_direct else self.cached:
            self.failures.append(self.tell())
            raise OSError(error, os.strerror(error))
        return super().write(data)


@pytest.fixture
def stubborn(monkeypatch: pytest.MonkeyPatch) -> type[Stubborn]:
    class File(Stubborn):
        failures: ClassVar[list[int]] = []

    def open_file(path: str, mode: str, buffering: int) -> Stubborn:
        assert (mode, buffering) == ("xb", 0)
        return File(path, "x")

    monkeypatch.setattr(writer, "fcntl", Flags)
    monkeypatch.setattr(writer, "open", open_file, raising=False)
    return File


def test_any_tensors(tmp_path: Path) -> None:
    check(tmp_path, FileImage.of(TENSORS), TENSORS)


def test_a_file_system_that_cannot_take_it_directly(tmp_path: Path, stubborn: type[Stubborn]) -> None:
    check(tmp_path, FileImage.of(TENSORS), TENSORS)
    assert stubborn.failures == [PAGE], "the page cache is used after the first refusal, for the rest"


@pytest.mark.parametrize(
    ("direct", "cached", "failures"), [(errno.ENOSPC, 0, 1), (errno.EIO, 0, 1), (errno.EINVAL, errno.EINVAL, 2)]
)
def test_other_errors_are_not_taken_for_that(
    tmp_path: Path, stubborn: type[Stubborn], direct: int, cached: int, failures: int
) -> None:
    stubborn.direct, stubborn.cached = direct, cached
    with pytest.raises(OSError, match=os.strerror(direct)):
        write_image(str(tmp_path), "file", FileImage.of(TENSORS))
    assert len(stubborn.failures) == failures
    assert os.listdir(tmp_path) == []


def test_all_of_it_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine that stops keeps of a file without it is anybody's guess."""
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    image = FileImage.of(TENSORS)
    write_image(str(tmp_path), "file", image)
    write_bytes(str(tmp_path), "other", b"12345")
    assert flushed == [image.size, 5]


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
    """Also a larger one, and a smaller one, whose files are laid out where the larger one's data still are."""
    buffer = HostBuffer()
    for turn, names in enumerate((["half"], list(TENSORS), ["half", "steps"], ["weight"])):
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
    assert len(shards) == 4
    assert all(entry.bytes < (3 << 19) + (1 << 20) for entry in shards)
    read = read_dense(str(tmp_path), Manifest("tag", 0, 3, {}, files))
    assert read["step"] == 3
    assert read["module"].keys() == state["module"].keys()
    for name, tensor in state["module"].items():
        assert torch.equal(read["module"][name], tensor)
