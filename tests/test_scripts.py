"""Every script starts and says what it does."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from segcal.datasets.phantom import write_phantom_dataset
from segcal.io.pairing import pair
from segcal.study.results import read_results
from tests.conftest import close
from tests.forks import said
from tests.study.simulated import EFFECTS, write_simulated

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [p for p in sorted(SCRIPTS.rglob("*.py")) if p.stem != "check_wheel"],  # which has no options
    ids=lambda path: path.stem,
)
def test_script_explains_itself(path, tmp_path):
    command = [sys.executable, str(path), "--help"]
    code, (out, err) = said(command, [tmp_path / "out.txt", tmp_path / "err.txt"])
    assert code == 0, err
    assert "usage:" in out.lower()


def renamed_phantoms(folder, names):
    """A data set of phantoms with the names of cases of another one."""
    write_phantom_dataset(folder, train=len(names), test=0)
    for number, name in enumerate(names, 1):
        for kind, ending in (("images", "_0000.nii.gz"), ("labels", ".nii.gz")):
            old = folder / f"{kind}Tr" / f"phantom_{number:03d}{ending}"
            old.rename(old.with_name(f"{name}{ending}"))


def test_repair_study_parts_patients_and_skips_what_is_done(tmp_path):
    pytest.importorskip("monai")
    source, output = tmp_path / "source", tmp_path / "study"
    renamed_phantoms(source, [f"hippocampus_{n:03d}" for n in (1, 2, 3, 4, 7, 8)])
    command = [
        *(sys.executable, str(SCRIPTS / "repair_study.py"), "train", "-o", str(output)),
        *("--hippocampus", str(source), "--recipes", "dice_ce", "--seeds", "4"),
        *("--epochs", "1", "--patients", "1", "1", "1"),
    ]
    files = [tmp_path / "out.txt", tmp_path / "err.txt"]
    code, (out, err) = said(command, files)
    assert code == 0, err
    assert "phantom dice_ce seed 4: fit dsc" in out
    for name, cases in (("phantom", 1), ("hippocampus", 2)):
        for part in ("fit", "test"):
            predictions = output / name / "dice_ce_s4" / part
            found = pair(predictions, output / name / "labels_s4" / part)
            assert len(found.cases) == cases
            with np.load(next(predictions.glob("*.npz"))) as file:
                assert file["probabilities"].dtype == np.float32
    posterior = pair(output / "phantom/posterior_s4/test", output / "phantom/labels_s4/test")
    assert len(posterior.cases) == 1
    (fold,) = json.loads((output / "hippocampus/data_s4/splits_final.json").read_text())
    persons = [{(int(case[-3:]) + 1) // 2 for case in fold[part]} for part in fold]
    assert sorted(len(p) for p in persons) == [1, 1, 1]
    assert set.union(*persons) == {1, 2, 4}
    code, (out, err) = said(command, files)
    assert code == 0, err
    assert out.splitlines() == [
        "phantom dice_ce seed 4: done before",
        "hippocampus dice_ce seed 4: done before",
    ]


def test_repair_study_undoes_what_was_done_to_a_true_posterior(tmp_path, capsys):
    pytest.importorskip("monai")
    script = runpy.run_path(str(SCRIPTS / "repair_study.py"))
    material = replace(script["MATERIALS"]["phantom"], counts=(1, 3, 3))
    folder = tmp_path / "phantom"
    script["prepare"](material, None, folder, 0)
    for recipe, power in (("dice_ce", 2.0), ("svls", 1.0)):  # as of a network that is too sure
        for source in (folder / "posterior_s0").glob("*/*.npz"):
            target = folder / f"{recipe}_s0" / source.parent.name / source.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with np.load(source) as file:
                sharper = file["probabilities"].astype(np.float64) ** power
            np.savez(target, probabilities=(sharper / sharper.sum(0)).astype(np.float32))
        (folder / f"{recipe}_s0" / "done.json").write_text("{}")
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n<!-- retrain -->\nold<!-- /retrain -->\n\nThe end.\n")
    study, published = ["-o", str(tmp_path), "--seeds", "0"], ["--results", str(tmp_path / "few")]
    for command in (
        ["evaluate", "--methods", "temperature", "class_region", *study],
        ["report", *study],
        ["collect", *study, *published],
        ["page", str(page), *published],
    ):
        options = script["_parser"]().parse_args(command)
        options.run(options)
    assert "**phantom, dice_ce** (3 test patients, seeds 0)" in capsys.readouterr().out
    filled = page.read_text()
    assert filled.startswith("# A page\n\n<!-- retrain -->\n\n")
    assert filled.endswith("<!-- /retrain -->\n\nThe end.\n")
    assert "| dice_ce + temperature |" in filled
    assert "old" not in filled
    tables = json.loads((tmp_path / "results" / "tables.json").read_text())
    kl = {
        (row["recipe"], row["method"]): row["mean"]
        for row in tables["posterior"]
        if row["metric"] == "kl_all"
    }
    assert kl["dice_ce", "uncalibrated"] > 0.01
    assert kl["svls", "uncalibrated"] == pytest.approx(0, abs=1e-5)
    assert abs(kl["dice_ce", "temperature"]) < 0.001
    assert abs(kl["dice_ce", "true posterior"]) < 1e-6
    drawn = {(row["method"], row["patients"]): row for row in tables["patients"]}
    assert drawn["temperature", 2]["draws"] == 3
    assert drawn["temperature", 2]["worse"] == 0
    assert {row["metric"] for row in tables["decisions"]} >= {"dsc", "hd95_penalised_mm"}
    assert {row["recipe"] for row in tables["retrain"]} == {"dice_ce", "svls"}


def test_what_is_published_is_what_was_measured(tmp_path):
    script = runpy.run_path(str(SCRIPTS / "publish_study.py"))
    effects = {name: EFFECTS[name] for name in ("dice_ce", "crac", "confidence")}
    study = write_simulated(tmp_path / "study", effects=effects, patients=5)
    measured = read_results(study)
    page, results = tmp_path / "page.md", tmp_path / "results"
    marks = (
        "overview", "verdict", "goals", "means", "duels", "rivals", "ranks", "claims", "studies",
    )  # fmt: skip
    page.write_text("# A page\n" + "".join(f"<!-- {m} -->\nbefore\n<!-- /{m} -->\n" for m in marks))
    options = SimpleNamespace(
        studies=[study], results=results, page=page, baseline="dice_ce", resamples=50
    )
    script["collect"](options)
    files = {"acdc.csv", "acdc_cells.csv", "phantom_small.csv", "phantom_small_cells.csv"}
    assert {path.name for path in results.iterdir()} == files
    collected = {path: pd.read_csv(path) for path in results.iterdir()}
    for path, table in collected.items():  # of another study, and of one that was run anew
        other = table.assign(recipe="other")
        pd.concat([other, table.assign(seed=table["seed"], val_dsc=0.5)]).to_csv(path, index=False)
    script["collect"](options)
    for path, table in collected.items():
        renewed = pd.read_csv(path)
        of_others = renewed.pop("recipe") == "other"
        assert of_others.sum() == len(table)
        again = renewed[~of_others].reset_index(drop=True)
        pd.testing.assert_frame_equal(
            again[[c for c in again if c in table]], table.drop(columns="recipe")
        )
        table.to_csv(path, index=False)
    found = script["published"](results)
    assert found.groups == measured.groups
    for group in measured.groups:
        before, after = measured.patients(group), found.patients(group)
        assert {m for m in before if m.decision == "mask"} <= set(after)
        for method in after:
            for metric in ("dsc", "ece_dilated5", "nll_all"):
                pair_of = after[method][metric].align(before[method][metric], join="outer")
                np.testing.assert_allclose(*pair_of, rtol=1e-3, atol=1e-4)
    script["write_page"](options)
    text = page.read_text()
    assert "\nbefore\n" not in text
    assert text.startswith("# A page\n<!-- overview -->\n")
    assert "| confidence + class\\_region |" in text


def write_losses(output, *, labels: bool) -> None:
    """Write what a study of two losses and three seeds leaves behind, as far as it is published."""
    values = {"accuracy": 0.9, "ece": 0.05, "nll": 0.3}
    if labels:
        values = {"map_class": 0.8, "ace": 0.05, "nll": 0.3, "retrieval_2": 0.4}
    rows = [
        {"set": "one", "method": recipe, "seed": seed, "recipe": recipe, "probabilities": "softmax",
         **{k: v + 0.01 * seed + better for k, v in values.items()}, "last_nll": 0.5}
        for recipe, better in (("ce", 0.0), ("ls", 0.002))
        for seed in (1, 2, 3)
    ]  # fmt: skip
    report, trained = output / "report", output / "one" / "ce" / "seed_1"
    report.mkdir(parents=True)
    trained.mkdir(parents=True)
    pd.DataFrame(rows).to_csv(report / "runs.csv", index=False)
    (report / "summary.json").write_text(json.dumps({"study": {"splits": "seed"}}))
    samples = {"train": 60, "validation": 20, "test": 20}
    (trained / "result.json").write_text(json.dumps({"samples": samples}))


@pytest.mark.parametrize("labels", [False, True])
def test_losses_are_published_with_their_differences(tmp_path, labels):
    script = runpy.run_path(str(SCRIPTS / "publish_losses.py"))
    output, page, results = tmp_path / "study", tmp_path / "page.md", tmp_path / "results"
    write_losses(output, labels=labels)
    kinds, kind = ("labels", "label") if labels else ("classes", "class")
    marks = (kinds, f"{kind}-differences", "samples", "grid_one")
    page.write_text("A page\n" + "".join(f"<!-- {m} -->\nbefore\n<!-- /{m} -->\n" for m in marks))
    for ablation in (None, "grid"):
        script["collect"](SimpleNamespace(studies=[output], results=results, ablation=ablation))
    assert {p.name for p in results.rglob("*.csv")} == {"one.csv", "grid_one.csv"}
    script["write_pages"](SimpleNamespace(pages=[page], results=results))
    text = page.read_text()
    assert "before" not in text
    assert "| ce | **0.320** |" in text  # the mean NLL of three seeds
    assert text.count("| ls | +0.0020 ▲ [+0.0020, +0.0020]") == 2  # in the set, and as an ablation
    assert "| one | 2 | 3 | 60 | 20 | drawn anew for every seed |" in text


def write_predictions(folder, name, network, counts):
    """A study's predictions of phantoms: the true posterior, too sure, in every case differently.

    Args:
        folder: is made; gets `study`, the folder of the study.
        name: of the set.
        network: of the study.
        counts: of phantoms that train, validate and test.
    """
    script = runpy.run_path(str(SCRIPTS / "repair_study.py"))
    material = replace(script["MATERIALS"]["phantom"], counts=counts)
    script["prepare"](material, None, folder, 0)
    study = folder / "study"
    shutil.copytree(folder / "labels_s0", study / "data" / name / "seed_0" / "labels")
    for number, source in enumerate(sorted((folder / "posterior_s0").glob("*/*.npz"))):
        target = study / name / network / "dice_ce" / "seed_0" / source.parent.name / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with np.load(source) as file:
            sharper = file["probabilities"].astype(np.float64) ** (1.5 + number % 3)
        np.savez(target, probabilities=(sharper / sharper.sum(0)).astype(np.float32))
    return study


def test_a_ceiling_is_below_what_validation_patients_allow(tmp_path, monkeypatch):
    pytest.importorskip("monai")
    study = write_predictions(tmp_path, "phantom", "net", (1, 3, 3))
    arguments = ["x", str(study), "--results", str(tmp_path / "results" / "ceiling")]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(SCRIPTS / "repair_ceiling.py"), run_name="__main__")
    path = tmp_path / "results" / "ceiling" / "phantom.csv"
    found = pd.read_csv(path).groupby("repair")["nll_all"].mean()
    everyone, each = (f"class_region, {of}" for of in ("all test patients", "every test patient"))
    assert found[each] < found[everyone] < found["raw"]
    assert found[everyone] <= found["class_region"] + 1e-3
    table = runpy.run_path(str(SCRIPTS / "publish_study.py"))["ceiling_table"](path)
    rows = {row[0].text: row for row in table.rows}
    assert set(rows) == {
        "raw", everyone, each,
        *(f"{name}, validation patients" for name in
          ("temperature", "class_region", "class_region_case")),
    }  # fmt: skip
    change = found[each] / found["raw"] - 1
    assert rows[each][2].extra == f"{100 * change:+.0f} %"
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="holds no predictions of dice_ce"):
        runpy.run_path(str(SCRIPTS / "repair_ceiling.py"), run_name="__main__")


def test_a_slope_is_judged_by_the_number_of_patients(tmp_path, monkeypatch):
    pytest.importorskip("monai")
    study = write_predictions(tmp_path, "phantom_small", "dynunet", (1, 7, 8))
    folder = tmp_path / "results" / "needed"
    monkeypatch.syspath_prepend(SCRIPTS)  # as of a script that is run
    monkeypatch.setattr(sys, "argv", ["x", "phantom_small", str(study), "--results", str(folder)])
    runpy.run_path(str(SCRIPTS / "patients_needed.py"), run_name="__main__")
    found = pd.read_csv(folder / "phantom_small.csv")
    assert found[["patients", "draw"]].values.tolist() == [
        [n, d] for n in (3, 5, 8) for d in range(3)
    ]
    assert (found["slope"] != 0).any()
    alike = found["slope"] == 0
    for metric in ("nll_all", "ece_dilated5"):
        close(found[f"{metric}_case"][alike], found[f"{metric}_group"][alike])
    assert (found["nll_all_case"] < found["nll_all_group"])[found["patients"] == 8].all()
    tables = runpy.run_path(str(SCRIPTS / "publish_study.py"))["needed_tables"](folder)
    assert [[c.name for c in t.columns] for t in tables] == [["set and network", "3", "5", "8"]] * 2
    (row,) = tables[1].rows
    change = 100 * (found["nll_all_case"] / found["nll_all_group"] - 1)[found["patients"] == 8]
    assert row[3].text.startswith(f"{change.mean():+.1f} % [{change.min():+.1f}, ")
    monkeypatch.setattr(sys, "argv", ["x", "phantom_small", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="holds no predictions of dice_ce"):
        runpy.run_path(str(SCRIPTS / "patients_needed.py"), run_name="__main__")
    monkeypatch.setattr(sys, "argv", ["x", "unheard", str(study)])
    with pytest.raises(SystemExit, match=r"unheard\.yaml: no such study; expected one of acdc, "):
        runpy.run_path(str(SCRIPTS / "patients_needed.py"), run_name="__main__")
