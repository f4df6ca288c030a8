"""A shard file is what `torch.distributed.checkpoint` reads, holds no byte too many, and is never written in part."""

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_air.checkpoint.holdings import saved_bytes
from lightning_air.checkpoint.manifest import digest_file
from lightning_air.checkpoint.shard_file import Item, write_shard_file
from tests.kit.ranks import run_ranks, values


def items() -> list[Item]:
    large = torch.arange(100_000.0)
    return [
        Item((MetadataIndex("a", (0,)), MetadataIndex("tied", (0,))), torch.arange(5, dtype=torch.int16)),
        Item((MetadataIndex("object"),), saved_bytes({"n": [1, "x"]})),
        Item((MetadataIndex("view", (2,)),), large[7:9]),
        Item((MetadataIndex("transposed", (0, 0)),), torch.arange(6.0).view(2, 3).t()),
        Item((MetadataIndex("parameter", ()),), torch.nn.Parameter(torch.tensor(3.0))),
        Item((MetadataIndex("empty", (0,)),), torch.empty(0)),
        Item((MetadataIndex("conjugate", (0,)),), torch.tensor([1 + 2j]).conj()),
    ]


def test_each_entry_loads_from_its_place_and_the_digest_is_the_files(tmp_path: Path) -> None:
    written = write_shard_file(tmp_path / "on-disk", "__0_0.distcp", items())
    content = (tmp_path / "on-disk").read_bytes()
    end = 0
    found: dict[str, Any] = {}
    for index, info in written.entries:
        assert info.relative_path == "__0_0.distcp"
        found[index.fqn] = torch.load(io.BytesIO(content[info.offset : info.offset + info.length]), weights_only=True)
        assert info.offset == end or index.fqn == "tied"
        end = info.offset + info.length
    assert end == len(content) == written.record.num_bytes
    assert written.record == digest_file(tmp_path / "on-disk")
    assert found["tied"].tolist() == found["a"].tolist() == [0, 1, 2, 3, 4]
    assert found["object"] == {"n": [1, "x"]}
    assert found["view"].tolist() == [7.0, 8.0]
    assert found["transposed"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert type(found["parameter"]) is torch.Tensor
    assert found["conjugate"].tolist() == [1 - 2j]
    assert len(content) < 20_000  # the storages of the views are not in it


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "shard").write_bytes(b"another's")
    with pytest.raises(FileExistsError, match=r"while writing __0_0\.distcp"):
        write_shard_file(tmp_path / "shard", "__0_0.distcp", items())
    assert (tmp_path / "shard").read_bytes() == b"another's"


def test_a_kernel_that_takes_a_part_only_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_shard_file(tmp_path / "whole", "s", items())
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[: max(1, len(view) // 2)]))
    assert write_shard_file(tmp_path / "parts", "s", items()) == whole
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def open_files() -> set[str]:
    return {str(entry.resolve()) for entry in Path("/proc/self/fd").iterdir() if "shard" in str(entry.resolve())}


def write_too_much(path: str) -> tuple[str, int | None, list[str]]:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    before = open_files()
    with pytest.raises(OSError, match="File too large") as caught:
        write_shard_file(Path(path), "__1_0.distcp", [Item((MetadataIndex("w", (0,)),), torch.ones(100_000))])
    return str(caught.value), caught.value.errno, sorted(open_files() - before)


def test_a_disk_that_takes_no_more_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    ((message, number, left_open),) = values(run_ranks(write_too_much, 1, args=(str(tmp_path / "shard"),)))
    assert number == errno.EFBIG
    assert "while writing __1_0.distcp" in message
    assert str(tmp_path / "shard") in message
    assert left_open == []


def test_the_users_own_saves_keep_their_checksums(tmp_path: Path) -> None:
    assert get_crc32_options()
    write_shard_file(tmp_path / "a", "a", items())
    assert get_crc32_options()
    seen: list[bool] = []

    def without() -> None:
        set_crc32_options(False)
        write_shard_file(tmp_path / "b", "b", items())
        seen.append(get_crc32_options())
        set_crc32_options(True)

    thread = threading.Thread(target=without)
    thread.start()
    thread.join()
    assert seen == [False]
