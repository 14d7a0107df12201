"""Reads of verified files: any views in ascending order, each block verified and read once."""

import random

import pytest
import torch

from dstrat.checkpoint.portable import reader as reader_module
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.format import BLOCK, FileRecord, block_checksums
from dstrat.checkpoint.portable.load import load
from dstrat.checkpoint.portable.local_files import DiskFile
from dstrat.checkpoint.portable.reader import VerifiedFile
from dstrat.errors import CheckpointError

SIZE = 3 * BLOCK + 12_345


@pytest.fixture(scope="module")
def content():
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def open_file(content, tmp_path):
    def open_file(data=content, *, verifies=True):
        path = tmp_path / "file"
        path.write_bytes(data)
        record = FileRecord(size=SIZE, checksums=block_checksums([memoryview(content)]))
        return VerifiedFile(path, record, verifies=verifies)

    return open_file


def some_ranges(draw):
    """Return ascending ranges: neighbors, gaps of any size, overlaps, and empty ones."""
    ranges, position = [], draw.choice([0, 1, BLOCK - 1, BLOCK])
    while position < SIZE and len(ranges) < 2000:
        size = draw.choice([0, 1, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
        end = min(SIZE, position + size)
        ranges.append((position, end))
        position = draw.choice([end, end, end + 1, end + 5000, end + BLOCK, (position + end) // 2])
    return ranges


@pytest.mark.parametrize("verifies", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_views_get_the_bytes_of_their_positions(content, open_file, seed, verifies):
    draw, file = random.Random(seed), open_file(verifies=verifies)
    for _ in range(3):  # later ones meet verified blocks
        ranges = some_ranges(draw)
        buffers = [bytearray(end - begin) for begin, end in ranges]
        file.read([(begin, memoryview(buffer)) for (begin, _), buffer in zip(ranges, buffers, strict=True)])
        assert [bytes(buffer) for buffer in buffers] == [content[begin:end] for begin, end in ranges]


def test_more_views_than_the_system_takes_at_once_are_filled(content, open_file):
    buffers = [bytearray(100) for _ in range(5000)]
    open_file().read([(100 * number, memoryview(buffer)) for number, buffer in enumerate(buffers)])
    assert b"".join(buffers) == content[:500_000]


@pytest.mark.parametrize("wrong", [0, BLOCK - 1, BLOCK + 600, 2 * BLOCK - 1])
def test_a_wrong_byte_is_found_if_it_is_in_a_block_that_is_read(content, open_file, wrong):
    damaged = bytearray(content)
    damaged[wrong] ^= 1
    file, block = open_file(bytes(damaged)), wrong // BLOCK * BLOCK
    pieces = [(block + 500, memoryview(bytearray(10))), (block + 900, memoryview(bytearray(10)))]
    with pytest.raises(CheckpointError, match=f"wrong bytes between {block} and {block + BLOCK}"):
        file.read(pieces)
    intact = (block + BLOCK) % (2 * BLOCK)
    file.read([(intact + 500, memoryview(bytearray(10)))])


def test_a_file_that_becomes_shorter_is_damaged(open_file, content, tmp_path):
    file = open_file()
    (tmp_path / "file").write_bytes(content[: BLOCK + 5])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        file.read([(0, memoryview(bytearray(BLOCK))), (BLOCK, memoryview(bytearray(BLOCK)))])


@pytest.mark.parametrize(("count", "elements"), [(300, 25_000), (3, 10_000_000)], ids=["many", "large"])
def test_a_load_reads_each_byte_of_a_file_once(tmp_path, monkeypatch, count, elements):
    tensors = {f"layer.{number}": torch.randn(elements) for number in range(count)}
    PortableCheckpointIO().save_checkpoint({"state_dict": tensors}, tmp_path / "checkpoint")
    sizes = []

    class CountingFile(DiskFile):
        def read_into(self, views, position):
            sizes.append(super().read_into(views, position))
            return sizes[-1]

    class CountingStorage:
        open_file = staticmethod(CountingFile)

    with PortableCheckpointIO()._open(tmp_path / "checkpoint") as folder:
        storage_of = reader_module.storage_of
        counted = {".safetensors": CountingStorage()}
        monkeypatch.setattr(reader_module, "storage_of", lambda path: counted.get(path.suffix) or storage_of(path))
        loaded = load(folder, rank=0, world_size=1)["state_dict"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert sum(sizes) == (tmp_path / "checkpoint" / "rank-00000.safetensors").stat().st_size
