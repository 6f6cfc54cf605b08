"""The page cache as the lab sees it: dropped, filled, counted."""

import os

import pytest

from moelab.lab import oscache

MB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    for name in ("a.safetensors", "b.safetensors", "c.txt"):
        (tmp_path / name).write_bytes(os.urandom(2 * MB))
    return tmp_path


def test_a_folder_is_its_tensors(folder):
    files = [folder / "a.safetensors", folder / "b.safetensors"]
    assert oscache.tensor_files(folder) == files
    assert oscache.tensor_files(str(folder / "c.txt")) == [folder / "c.txt"]


def test_dropped_pages_are_read_again(folder):
    for file in oscache.tensor_files(folder):
        with file.open("rb") as written:
            os.fsync(written.fileno())
    if oscache.cached_nbytes(folder) is None:
        pytest.skip("this system does not say what is cached")
    assert oscache.cached_nbytes(folder) == 4 * MB
    how = oscache.drop_pages(folder)
    left = oscache.cached_nbytes(folder)
    if not how.startswith("POSIX") or left == 4 * MB:
        pytest.skip(f"pages cannot be dropped here ({how})")
    before = oscache.disk_read_nbytes()
    for file in oscache.tensor_files(folder):
        file.read_bytes()
    assert oscache.cached_nbytes(folder) == 4 * MB
    if before is not None:
        assert oscache.disk_read_nbytes() - before >= 4 * MB - left
    assert oscache.cached_nbytes(folder / "c.txt") == 2 * MB  # was left alone


def test_an_empty_file_says_nothing(tmp_path):
    (tmp_path / "empty.safetensors").touch()
    assert oscache.cached_nbytes(tmp_path) is None
