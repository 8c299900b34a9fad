"""A file is written as a whole or not at all."""

from __future__ import annotations

import os

import pytest

from gpu import folders


def test_a_failure_leaves_the_earlier_file(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    folders.write_whole(file, "first")
    file.chmod(0o640)
    folders.write_whole(file, b"second")
    assert file.read_text() == "second" and (os.name == "nt" or file.stat().st_mode & 0o777 == 0o640)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as error:
        folders.write_whole(file, "third")
    assert error.value.filename == str(file)
    assert file.read_text() == "second" and [f.name for f in tmp_path.iterdir()] == ["a.json"]


def test_a_pipe_is_written_to():
    if not os.path.isdir("/dev/fd"):
        return
    read, write = os.pipe()
    folders.write_whole(f"/dev/fd/{write}", "text")
    os.close(write)
    with open(read, "rb") as file:
        assert file.read() == b"text"
