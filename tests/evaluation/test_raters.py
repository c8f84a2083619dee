"""Cases of several raters: found by their names, counted against all of them."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.evaluation.case import evaluate_case
from segcal.evaluation.cohort import evaluate_cohort
from segcal.evaluation.settings import EvaluationSettings
from segcal.evaluation.store import Store
from segcal.evaluation.summary import summarise
from segcal.io.case_patterns import Patterns
from segcal.io.pairing import find_raters, pair, with_samples
from segcal.io.volumes import write_nifti
from segcal.metrics.brier import brier
from segcal.metrics.crps import crps_empirical
from segcal.metrics.ece import ece
from segcal.metrics.nll import nll
from segcal.reproduction.curvas import evaluate_case_curvas
from tests.conftest import close
from tests.evaluation.test_cohort import AB, geometry

SHAPE, MM = (3, 10, 12), (2.0, 1.0, 0.5)


def drawn(seed, raters=3):
    """Probabilities of three classes, and raters who draw from them."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(3, 0.4), SHAPE)
    labels = [(p.cumsum(-1) < rng.random((*SHAPE, 1))).sum(-1).clip(0, 2) for _ in range(raters)]
    return p.transpose(3, 0, 1, 2).astype(np.float32), [x.astype(np.uint8) for x in labels]


@pytest.fixture
def folders(tmp_path):
    """Two cases of three raters, and one of two."""
    for i, name in enumerate(("a", "b", "c")):
        p, raters = drawn(i, 3 if name != "c" else 2)
        (tmp_path / "p").mkdir(exist_ok=True)
        np.savez(tmp_path / "p" / f"{name}.npz", probabilities=p)
        for r, labels in enumerate(raters, 1):
            write_nifti(tmp_path / "gt" / f"{name}_rater{r}.nii.gz", labels, geometry(SHAPE, MM))
    (tmp_path / "gt" / "dataset.json").write_text(
        json.dumps({"labels": {"background": 0, "a": 1, "b": 2}})
    )
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def moved(root, how):
    """The references under other names, in another folder."""
    for path in (root / "gt").glob("*.nii.gz"):
        case, r = path.name.removesuffix(".nii.gz").split("_rater")
        target = root / "moved" / how.format(case=case, rater=r)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return root / "moved"


@pytest.mark.parametrize(
    ("how", "pattern"),
    [
        ("{case}_rater{rater}.nii.gz", None),
        ("rater{rater}/{case}.nii.gz", None),
        ("{case}/annotation_{rater}.nii.gz", "{case}/annotation_{rater}.nii.gz"),
    ],
)
def test_raters_are_found_by_their_names(folders, how, pattern):
    references = moved(folders, how)
    pairing = pair(folders / "p", references, Patterns(None, pattern))
    assert [(case.name, len(case.raters)) for case in pairing.cases] == [
        ("a", 3),
        ("b", 3),
        ("c", 2),
    ]
    for case in pairing.cases:
        assert case.reference == case.raters[0]
        wanted = [
            references / how.format(case=case.name, rater=r + 1) for r in range(len(case.raters))
        ]
        assert list(case.raters) == wanted
    assert not pairing.without_prediction


def test_cases_of_one_label_map_stay_beside_them(folders):
    (folders / "gt" / "c_rater1.nii.gz").rename(folders / "gt" / "c.nii.gz")
    (folders / "gt" / "c_rater2.nii.gz").unlink()
    (folders / "gt" / "b_rater2.nii.gz").unlink()
    (folders / "gt" / "b_rater3.nii.gz").unlink()
    found = {case.name: len(case.raters) for case in pair(folders / "p", folders / "gt").cases}
    assert found == {"a": 3, "b": 0, "c": 0}


def test_ten_raters_are_in_their_order_and_none_twice(tmp_path):
    for r in (1, 2, 10):
        write_nifti(tmp_path / f"a_rater{r}.nii.gz", np.zeros(SHAPE, np.uint8), geometry(SHAPE))
    names = [path.name for path in find_raters(tmp_path)["a"]]
    assert names == ["a_rater1.nii.gz", "a_rater2.nii.gz", "a_rater10.nii.gz"]
    write_nifti(tmp_path / "a_rater1.nii", np.zeros(SHAPE, np.uint8), geometry(SHAPE))
    with pytest.raises(ValueError, match="one case and rater twice: a, 1"):
        find_raters(tmp_path)


def test_rater_is_for_references_alone():
    with pytest.raises(ValueError, match="prediction_pattern"):
        Patterns("{case}_{rater}")
    with pytest.raises(ValueError, match="reference_pattern"):
        Patterns(None, "{rater}")


def test_calibration_is_against_the_shares(tmp_path):
    p, raters = drawn(0)
    settings = EvaluationSettings(chosen=("all", "fg"))
    vote = np.stack([np.mean([one == k for one in raters], axis=0) for k in range(3)])
    row = evaluate_case(
        p.argmax(0), vote.argmax(0), spacing_mm=MM, structures=AB, probabilities=p, raters=raters,
        settings=settings,
    ).row  # fmt: skip
    confidence, share = p.max(0), np.take_along_axis(vote, p.argmax(0)[None], 0)[0]
    index = np.ceil(confidence * 15).astype(int)
    soft = sum(abs((confidence - share)[index == m].sum()) for m in range(1, 16)) / p[0].size
    close(row["ece_all"], soft, atol=1e-6)
    close(row["brier_soft_all"], ((p - vote) ** 2).sum(0).mean(), atol=1e-6)
    close(row["brier_all"], np.mean([brier(p, one) for one in raters]), atol=1e-6)
    close(row["nll_all"], np.mean([nll(p, one) for one in raters]), atol=1e-6)
    for r, one in enumerate(raters, 1):
        close(row[f"ece_all/rater{r}"], ece(p, one), atol=1e-6)
    any_of = np.max(raters, axis=0) > 0
    assert row["voxels_fg"] == any_of.sum()
    close(row["brier_soft_fg"], ((p - vote) ** 2).sum(0)[any_of].mean(), atol=1e-6)


def test_raters_of_one_mind_are_one(tmp_path):
    p, (one, *_) = drawn(1)
    options = {"spacing_mm": MM, "structures": AB, "probabilities": p}
    alone = evaluate_case(p.argmax(0), one, **options).row
    several = evaluate_case(p.argmax(0), one, raters=[one, one, one], **options).row
    for key, value in alone.items():
        if key.startswith(("aece_", "tace_", "aurc", "excess")) and key != "tace_ref":
            continue  # 360 voxels are cut elsewhere than 1080
        torch.testing.assert_close(several[key], value, rtol=1e-9, atol=1e-9, equal_nan=True)
    close(several["brier_soft_all"], alone["brier_all"])


def test_regions_of_raters():
    rng = np.random.default_rng(0)
    p = rng.random((2, *SHAPE))
    raters = [rng.integers(0, 3, SHAPE) for _ in range(2)]
    regions = (AB[0].__class__("whole", (1, 2), 0), AB[0].__class__("core", (2,), 1))
    row = evaluate_case(
        raters[0], raters[0], spacing_mm=MM, structures=regions, probabilities=p, regions=True,
        raters=raters, settings=EvaluationSettings(chosen=("all",)),
    ).row  # fmt: skip
    wanted = []
    for one in regions:
        share = np.mean([np.isin(y, one.labels) for y in raters], axis=0)
        wanted.append(2 * ((p[one.channel] - share) ** 2).mean())
    close(row["brier_soft_all"], np.mean(wanted), atol=1e-6)


def test_what_is_ignored_by_one_is_ignored_by_all(folders):
    p, raters = drawn(0)
    ignored = np.zeros(SHAPE, bool)
    ignored[0] = True
    raters[1][ignored] = 9
    write_nifti(folders / "gt" / "a_rater2.nii.gz", raters[1], geometry(SHAPE, MM))
    labels = {"labels": {"background": 0, "a": 1, "b": 2, "ignore": 9}}
    (folders / "gt" / "dataset.json").write_text(json.dumps(labels))
    assert (
        run(folders / "p", folders / "gt", "-o", folders / "out", "--bootstrap", 0).exit_code == 0
    )
    row = pd.read_csv(folders / "out" / "cases.csv").set_index("case").loc["a"]
    assert row["voxels_all"] == (~ignored).sum()
    close(row["ece_all/rater1"], ece(p, raters[0], mask=~ignored), atol=1e-6)
    volumes = [(y[~ignored] == 1).sum() / 1000 for y in raters]
    close(row["crps_raters_ml/a"], crps_empirical(volumes, p[1][~ignored].sum() / 1000), atol=1e-6)


def test_the_report_of_several_raters(folders):
    done = run(folders / "p", folders / "gt", "-o", folders / "out", "--compat", "curvas")
    assert done.exit_code == 0, done.output
    rows = pd.read_csv(folders / "out" / "cases.csv").set_index("case")
    summary = json.loads((folders / "out" / "summary.json").read_text())
    assert rows["raters"].tolist() == [3, 3, 2]
    assert summary["raters"]["cases"] == 3
    of_a = summary["raters"]["classes"]["a"]
    close(of_a["crps_raters_ml"]["mean"], rows["crps_raters_ml/a"].mean())
    close(summary["raters"]["ece"]["all"]["rater3"]["mean"], rows["ece_all/rater3"].mean())
    assert summary["raters"]["ece"]["all"]["rater3"]["n"] == 2
    for i, name in enumerate(("a", "b", "c")):
        p, raters = drawn(i, int(rows.loc[name, "raters"]))
        published = evaluate_case_curvas(
            p.argmax(0), raters, p, labels={1: "a", 2: "b"}, voxel_mm3=1.0
        )
        for key, value in published.items():
            assert rows.loc[name, f"curvas_{key}"] == pytest.approx(value, nan_ok=True)
    page = (folders / "out" / "index.html").read_text()
    assert "Agreement with several raters" in page
    assert "By the rules of curvas" in page
    for key in ("dsc_agreed", "crps_gaussian_ml", "brier_soft", "curvas crps_mm3"):
        assert f"<dt>{key}</dt>" in page
    assert "energy distance" not in page[: page.index("<dl>")]


def test_label_maps_of_several_raters(folders):
    for i, name in enumerate("abc"):
        (folders / "p" / f"{name}.npz").unlink()
        write_nifti(folders / "p" / f"{name}.nii.gz", drawn(i)[1][0], geometry(SHAPE, MM))
    cohort = evaluate_cohort(pair(folders / "p", folders / "gt"))
    assert not cohort.failed
    assert cohort.rows["dsc_agreed/1"].tolist() == [1, 1, 1]
    assert cohort.rows["confidence_disagreed/1"].isna().all()
    assert cohort.rows.loc[["a", "b"], "crps_raters_ml/1"].min() > 0
    assert summarise(cohort)["raters"]["ece"] == {}


def test_samples(folders):
    for i, name in enumerate("abc"):
        for s, labels in enumerate(drawn(i)[1][:2], 1):
            target = folders / "samples" / f"sample{s}" / f"{name}.nii.gz"
            write_nifti(target, labels, geometry(SHAPE, MM))
    options = ("-o", folders / "out", "--samples", folders / "samples", "--bootstrap", 0)
    assert run(folders / "p", folders / "gt", *options).exit_code == 0
    rows = pd.read_csv(folders / "out" / "cases.csv").set_index("case")
    close(rows.loc["c", ["energy_distance/a", "energy_distance/b"]].tolist(), [0.0, 0.0], atol=1e-9)
    assert (rows.loc[["a", "b"], "energy_distance/a"] > 0).all()
    assert "energy distance" in (folders / "out" / "index.html").read_text()
    (folders / "samples" / "sample2" / "b.nii.gz").unlink()
    with pytest.raises(ValueError, match="two samples or more of every case"):
        with_samples(pair(folders / "p", folders / "gt"), folders / "samples")


def test_the_challenge_needs_raters(folders):
    (folders / "gt" / "c_rater2.nii.gz").unlink()
    done = run(folders / "p", folders / "gt", "-o", folders / "out", "--compat", "curvas")
    assert done.exit_code == 2
    assert "c_rater1.nii.gz" in done.output


def test_a_rater_who_lies_elsewhere_is_told_by_check(folders):
    write_nifti(folders / "gt" / "b_rater2.nii.gz", np.zeros((3, 10, 9), np.uint8),
                geometry((3, 10, 9), MM))  # fmt: skip
    done = CliRunner().invoke(app, ["check", str(folders / "p"), str(folders / "gt")])
    assert done.exit_code == 1
    assert "b_rater2.nii.gz: does not lie on the reference" in done.output.replace("\n", "")
    done = run(folders / "p", folders / "gt", "-o", folders / "out", "--bootstrap", 0)
    assert done.exit_code == 1
    assert "FAILED b:" in done.output


def test_a_changed_rater_is_evaluated_anew(folders):
    pairing = pair(folders / "p", folders / "gt")
    store = Store(folders / "store", "making")
    before = evaluate_cohort(pairing, store=store).rows
    assert all(store.holds(case) for case in pairing.cases)
    other = np.zeros(SHAPE, np.uint8)
    other[0, :3] = 1
    write_nifti(folders / "gt" / "a_rater3.nii.gz", other, geometry(SHAPE, MM))
    assert [store.holds(case) for case in pairing.cases] == [False, True, True]
    after = evaluate_cohort(pairing, store=store).rows
    assert before.loc["a", "ece_all"] != after.loc["a", "ece_all"]
    assert before.loc["b"].equals(after.loc["b"])
