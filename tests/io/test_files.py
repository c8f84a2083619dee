"""Files that are whole or not there."""

from __future__ import annotations

import errno

import pandas as pd
import pytest

from segcal.io.files import read_json, remove_leftovers, whole_file
from segcal.io.tables import write_csv
from segcal.io.yaml import read_yaml


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


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError("2 requested, 1 written")]
)
def test_a_full_disk_names_the_file(tmp_path, error):
    with (
        pytest.raises(OSError, match=r"a\.csv: cannot be written: ") as found,
        whole_file(tmp_path / "a.csv"),
    ):
        raise error
    assert str(error) in str(found.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["a: 2020-13-45", "a: " + "9" * 5000])
def test_yaml_that_python_refuses_names_the_file(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"recipe\.yaml: not a YAML file \("):
        read_yaml(path)


def test_formulas_become_text(tmp_path):
    cells = ["=1", "+a", "-b", "@c", "-", "-1.5", "+2e-3", "a=b", 3.5, None]
    table = pd.DataFrame({"x": cells}, index=pd.Index([f"={i}" for i in range(10)], name="case"))
    write_csv(tmp_path / "t.csv", table)
    lines = (tmp_path / "t.csv").read_text().splitlines()[1:]
    assert [line.split(",")[1] for line in lines] == [
        "'=1", "'+a", "'-b", "'@c", "-", "-1.5", "+2e-3", "a=b", "3.5", "",
    ]  # fmt: skip
    assert all(line.startswith("'=") for line in lines)


def test_json_that_python_refuses_names_the_file(tmp_path):
    path = tmp_path / "dataset.json"
    path.write_text('{"labels": ' + "9" * 5000 + "}")
    with pytest.raises(ValueError, match=r"dataset\.json: not a JSON file \("):
        read_json(path)
