"""Files that are whole or not there."""

from __future__ import annotations

import pytest

from segcal.io.files import remove_leftovers, whole_file


def test_a_failed_write_keeps_the_file_before(tmp_path):
    path = tmp_path / "model.pth"
    path.write_text("before")

    def half() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_write_are_removed_and_nothing_else(tmp_path):
    kept = [tmp_path / ".segcal-demo", tmp_path / "model.pth"]
    for path in kept:
        path.write_text("kept")
    writing = whole_file(tmp_path / "model.pth")
    temporary = writing.__enter__()  # and never left, as after SIGKILL
    assert temporary.exists()
    remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == kept
