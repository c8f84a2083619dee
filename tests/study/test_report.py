"""The report of a study: complete, of what there is, and honest where something is missing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from segcal.io.files import read_json
from segcal.study.comparing import compare_study
from segcal.study.report import report
from segcal.study.results import read_results
from segcal.study.tables import (
    duel_table,
    goal_table,
    mean_table,
    overview_table,
    patient_table,
    repair_table,
    rival_table,
    verdict_table,
)
from tests.study.simulated import Effect, write_simulated

EFFECTS = {
    "dice_ce": Effect(),
    "nacl": Effect(-0.02, 0.8, 1.0),
    "nacl@alpha=0.01": Effect(0.0, 0.9, 1.0),
    "nacl@alpha=1": Effect(-0.06, 0.7, 1.3),
    "confidence": Effect(0.004, 0.2, 0.8),
}
TWO = {k: EFFECTS[k] for k in ("dice_ce", "confidence")}
HEADER = {"name": "simulated"}
RESAMPLES = 200


def write(output, **options):
    return report(output, baseline="dice_ce", header=HEADER, resamples=RESAMPLES, **options)


@pytest.fixture(scope="module", autouse=True)
def _small_pictures():
    """Figures in few dots, which are drawn faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segcal.reporting.picture.DPI", 30)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    output = write_simulated(
        tmp_path_factory.mktemp("study"), sets=("acdc", "phantom"), effects=EFFECTS, patients=6,
        failed=[("acdc", "unet", "nacl", 2)],
    )  # fmt: skip
    return output, write(output, forms=["markdown", "latex"])


def test_the_files(whole):
    output, names = whole
    assert all((output / "report" / name).is_file() for name in names)
    expected = {"index.html", "summary.json", "tables.md", "tables.tex", "differences.csv",
                "means.csv", "ranks.csv", "duels.csv", "sensitivity.csv"}  # fmt: skip
    assert expected <= set(names)
    figures = {name.removeprefix("figures/") for name in names if name.startswith("figures/")}
    assert {
        "front.png", "sensitivity_nacl_alpha.png", "differences_acdc_unet.png",
        "reliability_phantom_unet.png", "logits_acdc_unet.png", "multipliers_acdc_unet.png",
        "validation_acdc_unet.png", "ranks_acdc_unet_as_trained.png",
        "ranks_all_sets_and_networks_repaired.png",
    } <= figures  # fmt: skip


def test_the_page_says_what_is_there_and_what_is_not(whole):
    output, _ = whole
    page = (output / "report" / "index.html").read_text()
    for words in (
        "Goals, over all sets and networks", "Floor of the errors", "CRaC poster, ACDC",
        "HD95 in voxels", "What the papers claim", "Sensitivity to nacl.alpha",
        "acdc/unet/nacl/seed_2</b> failed: loss is not finite", "With fewer seeds: nacl (2)",
        "0.877", "true posterior",
    ):  # fmt: skip
        assert words in page, words
    assert read_json(output / "report" / "summary.json")["cases"]["evaluated"] == 29


def test_the_numbers_are_those_of_the_cases(whole):
    output, _ = whole
    cases = pd.read_csv(output / "results" / "cases.csv")
    of = cases[
        (cases["set"] == "acdc") & (cases["repair"] == "raw") & (cases["decision"] == "mask")
    ]
    keys = ["recipe", "seed", "patient"]
    means = of.groupby(keys)["nll_all"].mean().groupby(keys[:2]).mean().groupby("recipe").mean()
    found = pd.read_csv(output / "report" / "differences.csv")
    row = found[
        (found["set"] == "acdc") & (found["metric"] == "nll_all") & (found["baseline"] == "dice_ce")
        & (found["method"] == "confidence")
    ].iloc[0]  # fmt: skip
    assert row["base"] == pytest.approx(means["dice_ce"])
    assert row["difference"] == pytest.approx(means["confidence"] - means["dice_ce"])
    assert row["relative"] == pytest.approx(means["confidence"] / means["dice_ce"] - 1)
    assert row["low"] <= row["difference"] <= row["high"]
    assert row["direction"] == -1
    own = pd.read_csv(output / "report" / "means.csv")
    own = own[(own["set"] == "acdc") & (own["metric"] == "nll_all")].set_index("method")["mean"]
    assert own["nacl"] == pytest.approx(means["nacl"])


def test_verdicts(whole):
    output, _ = whole
    comparisons = compare_study(read_results(output), "dice_ce", resamples=RESAMPLES)
    table = verdict_table(comparisons, "dice_ce")
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert rows["confidence"] == ["2 of 2"] * 6
    assert rows["nacl@alpha=1"][3] == "0 of 2"
    assert rows["dice_ce + class_region"][4] == "-"
    bold = [row[0].text for row in table.rows if row[-1].best]
    assert "confidence" in bold
    assert "nacl" not in bold
    goals = {row[0].text: row for row in goal_table(comparisons[0]).rows}
    assert goals["confidence"][1].text.startswith("-8")
    assert goals["confidence"][1].best
    assert "▼" in goals["confidence"][1].text
    assert goals["nacl@alpha=1"][5].text.startswith("-0.0")
    assert not goals["nacl@alpha=1"][5].best


def test_an_overview_has_the_changes_of_every_set(whole):
    output, _ = whole
    comparisons = compare_study(read_results(output), "dice_ce", resamples=RESAMPLES)
    methods = ["confidence", "dice_ce + class_region"]
    table = overview_table(comparisons, "nll_all", methods)
    assert [column.name for column in table.columns] == [
        "method", *(c.group.name for c in comparisons)
    ]  # fmt: skip
    assert [row[0].text for row in table.rows] == methods
    for row in table.rows:
        for comparison, cell in zip(comparisons, row[1:], strict=True):
            change = comparison.change_of[row[0].text, "nll_all"]
            assert float(cell.value) == change.relative
    dsc = overview_table(comparisons, "dsc", methods).rows[0][1]
    assert float(dsc.value) == comparisons[0].change_of["confidence", "dsc"].difference
    few = verdict_table(comparisons, "dice_ce", methods)
    assert [row[0].text for row in few.rows] == methods[::-1]


def test_changes_from_patient_to_patient(whole):
    output, _ = whole
    comparisons = compare_study(read_results(output), "dice_ce", resamples=RESAMPLES)
    table = patient_table(comparisons, "ece_dilated5", ["confidence"])
    assert [row[0].text for row in table.rows] == [c.group.name for c in comparisons]
    for row, c in zip(table.rows, comparisons, strict=True):
        assert row[1].text == "confidence"
        assert float(row[2].value) == c.change_of["confidence", "ece_dilated5"].relative < 0
        before, after = (
            c.tables[name]["ece_dilated5"].groupby("patient").mean()
            for name in ("dice_ce", "confidence")
        )
        assert row[4].text == f"{(after < before).sum()} of {len(before)}"
    assert not patient_table(comparisons, "ece_dilated5", ["no such method"]).rows
    of_all = patient_table(comparisons[:1], "ece_dilated5").rows
    named = [m.name for m in comparisons[0].rows if m.name != "dice_ce"]
    assert [row[1].text for row in of_all] == named


def test_one_repair_against_another(whole):
    output, _ = whole
    comparisons = compare_study(read_results(output), "dice_ce", resamples=RESAMPLES)
    table = repair_table(comparisons, "class_region", "temperature", RESAMPLES)
    recipes = [m for c in comparisons for m in c.rows if m.repair == "class_region"]
    assert [row[1].text for row in table.rows] == [m.recipe for m in recipes]
    first, seeds = comparisons[0], comparisons[0].seeds["dice_ce"]
    means = [
        first.tables[f"dice_ce + {repair}"]["ece_dilated5"].groupby("seed").mean().mean()
        for repair in ("class_region", "temperature")
    ]
    row = table.rows[0]
    assert (row[0].text, row[2].text) == (first.group.name, str(len(seeds)))
    assert float(row[3].value) == pytest.approx(means[0] / means[1] - 1)
    assert "▼" in row[3].text
    assert not repair_table(comparisons, "class_region", "vector").rows


def test_a_recipe_alone_without_repairs(tmp_path):
    """It has two decisions, so there are differences, but no other method to draw."""
    output = write_simulated(tmp_path, sets=("acdc",), effects={"dice_ce": Effect()}, patients=4)
    path = output / "results" / "cases.csv"
    cases = pd.read_csv(path)
    cases[cases["repair"] == "raw"].to_csv(path, index=False)
    assert "index.html" in write(output)


def test_the_true_posterior_is_a_row_and_no_rival(whole):
    output, _ = whole
    phantom = compare_study(read_results(output), "dice_ce", resamples=RESAMPLES)[1]
    *_, last = mean_table(phantom, ["dsc", "kl_all"]).rows
    assert last[0].text == "true posterior"
    assert all(cell.value for cell in last[1:])
    assert last[-1].text == "0.0000"
    assert not any(cell.best for cell in last)
    assert not any(name.startswith("true_posterior") for name, _ in phantom.change_of)
    assert not any(
        "true_posterior" in name for f in phantom.fields for r in f.ranks for name in r.mean
    )


def test_duels_count_both_sides(whole):
    output, _ = whole
    comparisons = compare_study(read_results(output), "dice_ce", resamples=RESAMPLES)
    table = duel_table(comparisons, "as trained", "ece_dilated5")
    names = [column.name for column in table.columns][1:]
    cells = {
        (row[0].text, name): cell.text
        for row in table.rows
        for name, cell in zip(names, row[1:], strict=True)
    }
    assert cells["confidence", "dice_ce"] == "2"
    assert cells["dice_ce", "confidence"] == "0"
    assert cells["dice_ce", "dice_ce"] == ""
    for recipe, other, expected in (
        ("confidence", "dice_ce", "2 : 0 of 2"),
        ("dice_ce", "confidence", "0 : 2 of 2"),
    ):
        rivals = rival_table(comparisons, recipe)
        assert {row[0].text for row in rivals.rows} == {r[0].text for r in table.rows} - {recipe}
        column = [c.name for c in rivals.columns].index("ECE near, as trained")
        (cell,) = (row[column] for row in rivals.rows if row[0].text == other)
        assert cell.text == expected
        assert cell.best == (recipe == "confidence")


def test_a_report_replaces_the_one_before(tmp_path):
    write_simulated(tmp_path, sets=("acdc",), effects=TWO, seeds=(0,), patients=2, folders=False)
    names = write(tmp_path, forms=["markdown", "latex"])
    assert set(write(tmp_path)) == set(names) - {"tables.md", "tables.tex"}
    assert not (tmp_path / "report" / "tables.md").exists()


def test_foreign_files_are_not_overwritten(tmp_path):
    write_simulated(tmp_path, sets=("acdc",), effects=TWO, seeds=(0,), patients=2)
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "index.html").write_text("mine")
    with pytest.raises(ValueError, match=r"index\.html: was not written by segcal"):
        write(tmp_path)


def test_an_unknown_baseline(tmp_path):
    write_simulated(tmp_path, sets=("acdc",), effects=TWO, seeds=(0,), patients=2, folders=False)
    with pytest.raises(ValueError, match="baseline: expected a recipe of the study, dice_ce, conf"):
        report(tmp_path, baseline="dice", header=HEADER)


@pytest.mark.parametrize(
    "options",
    [
        {"seeds": (3,), "patients": 1, "cases": 1},
        {"seeds": (0, 1), "patients": 1},
        {"folders": False, "networks": ("unet", "dynunet"), "seeds": (0, 1)},
        {"missing": [("acdc", "unet", "dice_ce", s) for s in range(3)]},
        {"missing": [("acdc", "unet", "confidence", s) for s in range(3)]},
        {"missing": [("acdc", "unet", "dice_ce", 0), ("acdc", "unet", "confidence", 1),
                     ("acdc", "unet", "confidence", 2), ]},
    ],
)  # fmt: skip
def test_little_is_enough(tmp_path, options):
    write_simulated(tmp_path, **{"sets": ("acdc",), "effects": TWO, "patients": 3, **options})
    assert "index.html" in write(tmp_path, forms=["latex"])


def test_undefined_metrics(tmp_path):
    write_simulated(tmp_path, sets=("acdc",), effects=TWO, patients=3, folders=False)
    path = tmp_path / "results" / "cases.csv"
    table = pd.read_csv(path)
    table["nll_all"] = np.nan
    table.loc[table["patient"] == "p01", "ece_dilated5"] = np.nan
    table.loc[table["recipe"] == "confidence", "tace_all"] = np.nan
    table.drop(columns="hd95_penalised_mm").to_csv(path, index=False)
    write(tmp_path, forms=["markdown"])
    (comparison,) = compare_study(read_results(tmp_path), "dice_ce", resamples=RESAMPLES)
    assert comparison.change_of["confidence", "ece_dilated5"].patients == 2
    assert ("confidence", "nll_all") not in comparison.change_of
    table = mean_table(comparison, ["dsc", "tace_all", "nll_all"])
    assert [c.name for c in table.columns] == ["method", "DSC", "DSC, dice", "TACE all"]
    assert table.rows[-1][-1].text == "-"


def test_without_any_difference_in_dsc(tmp_path):
    """All methods the same: nothing is bold or beyond chance, and no figure fails."""
    write_simulated(tmp_path, sets=("acdc",), effects={"dice_ce": Effect(), "ce": Effect()},
                    patients=3, folders=False)  # fmt: skip
    path = tmp_path / "results" / "cases.csv"
    table = pd.read_csv(path)
    table.assign(dsc=0.0, ece_dilated5=0.0, nll_all=0.0).to_csv(path, index=False)
    write(tmp_path)
    (comparison,) = compare_study(read_results(tmp_path), "dice_ce", resamples=RESAMPLES)
    change = comparison.change_of["ce", "dsc"]
    assert (change.difference, change.p_holm, change.direction) == (0.0, 1.0, 0)
