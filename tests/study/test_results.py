"""Files of a study are read, and what is wrong with them is said."""

from __future__ import annotations

import pandas as pd
import pytest

from segcal.study.results import TRUTH, CellKey, Group, Method, read_results
from tests.study.simulated import Effect, write_simulated

FEW = {"dice_ce": Effect(), "confidence": Effect(0.0, 0.3, 0.9)}
GROUP = Group("phantom", "unet")


@pytest.fixture
def output(tmp_path):
    return write_simulated(
        tmp_path, sets=("phantom",), effects=FEW, seeds=(0, 1), patients=3,
        missing=[("phantom", "unet", "confidence", 1)],
    )  # fmt: skip


def change(path, **columns):
    table = pd.read_csv(path)
    table.assign(**columns).to_csv(path, index=False)


def test_what_there_is(output):
    results = read_results(output)
    assert results.groups == [GROUP]
    assert results.recipes == ["dice_ce", "confidence"]
    assert results.methods(GROUP)[:3] == [
        Method("dice_ce"), Method("dice_ce", "raw", "dice"), Method("dice_ce", "temperature"),
    ]  # fmt: skip
    assert "ece_dilated5" in results.metrics
    assert "kl_all" in results.metrics
    assert "dsc/myocardium" not in results.metrics
    assert results.missing() == ["phantom/unet/confidence/seed_1"]
    assert results.failed() == {}


def test_a_patient_is_the_mean_of_its_cases(output):
    results = read_results(output)
    rows = results.patients(GROUP)[Method("dice_ce")]
    cases = results.cases
    own = cases[
        (cases["recipe"] == "dice_ce") & (cases["repair"] == "raw") & (cases["decision"] == "mask")
        & (cases["seed"] == 1) & (cases["patient"] == "s1 p02")
    ]  # fmt: skip
    assert len(own) == 2
    assert rows.loc[(1, "s1 p02"), "nll_all"] == pytest.approx(own["nll_all"].mean())
    assert len(rows) == 6
    assert Method(TRUTH) in results.patients(GROUP)


def test_failures_have_reasons(tmp_path):
    key = ("phantom", "unet", "confidence", 0)
    write_simulated(tmp_path, sets=("phantom",), effects=FEW, seeds=(0,), failed=[key])
    results = read_results(tmp_path)
    assert results.failed() == {"phantom/unet/confidence/seed_0": "loss is not finite"}
    assert results.missing() == []


def test_names_of_digits_stay_words(tmp_path):
    write_simulated(tmp_path, sets=("27",), effects=FEW, seeds=(0,), patients=2)
    change(tmp_path / "results" / "cases.csv", patient="007", case=range(48))
    results = read_results(tmp_path)
    assert results.groups == [Group("27", "unet")]
    assert set(results.cases["patient"]) <= {"007", "7"}
    assert results.cases["case"].iloc[0] == "0"


def test_folders_may_be_missing(tmp_path):
    write_simulated(tmp_path, sets=("acdc",), effects=FEW, seeds=(0,), folders=False)
    results, key = read_results(tmp_path), CellKey("acdc", "unet", "dice_ce", 0)
    assert results.reliability(key) == {}
    assert results.logits(key) is None
    assert results.log(key) == []
    assert results.result(key) == {}
    assert results.loss("dice_ce") == {}


def test_missing_tables(tmp_path):
    with pytest.raises(ValueError, match=r"cells\.csv: no such file; run the study first"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("name", "columns", "said"),
    [
        ("cases", {"nll_all": "low"}, "column nll_all holds text"),
        ("cases", {"seed": 0.5}, "seed: expected whole numbers"),
        ("cases", {"case": "same", "patient": "same"}, "is repeated"),
        ("cases", {"patient": ""}, "a row without a .*patient"),
        ("cells", {"seed": "first"}, "seed: expected whole numbers"),
    ],
)
def test_damaged_tables(output, name, columns, said):
    path = output / "results" / f"{name}.csv"
    change(path, **columns)
    with pytest.raises(ValueError, match=rf"{name}\.csv: .*{said}"):
        read_results(output)


def test_tables_without_columns_or_rows(output):
    path = output / "results" / "cases.csv"
    table = pd.read_csv(path)
    table.drop(columns="repair").to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"cases\.csv: expected columns .*, lacks repair"):
        read_results(output)
    table[:0].to_csv(path, index=False)
    with pytest.raises(ValueError, match="no cell of the study has ended yet"):
        read_results(output)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"cases\.csv: no table"):
        read_results(output)


def test_infinite_values_are_undefined(output):
    change(output / "results" / "cases.csv", nll_all=float("inf"))
    assert read_results(output).cases["nll_all"].isna().all()


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("reliability.json", '{"raw": [1, 2]}', "reliability"),
        ("reliability.json", '{"raw": {"near": {"count": [1]}}}', "reliability"),
        ("reliability.json", "{", "reliability"),
        ("log.jsonl", '{"epoch": 1}\n{"epo', "log"),
        ("log.jsonl", '{"loss": 1}\n', "log"),
        ("result.json", "[]", "result"),
        ("logits.csv", "a,b\n1,2\n", "logits"),
    ],
)
def test_damaged_files_of_a_cell(output, name, content, read):
    key = CellKey("phantom", "unet", "dice_ce", 0)
    path = output / key.name / name
    path.write_text(content)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        getattr(read_results(output), read)(key)
