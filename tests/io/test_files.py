"""Files that are whole or not there."""

from __future__ import annotations

import pytest

from segcal.io.files import read_json, remove_leftovers, whole_file


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


@pytest.mark.parametrize("levels", [101, 900, 100_000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a": ', "}")])
def test_json_that_is_too_deep_is_refused(tmp_path, levels, opened, closed):
    path = tmp_path / "dataset.json"
    path.write_text(opened * levels + "1" + closed * levels)
    with pytest.raises(ValueError, match=r"dataset\.json: (nested more than 100|not a JSON file)"):
        read_json(path)
    path.write_text(opened * 50 + "1" + closed * 50)
    read_json(path)
