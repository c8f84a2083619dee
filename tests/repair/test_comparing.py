"""What a comparison recommends, on cases whose posterior is known, and that it never cheats."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from segcal.evaluation.api import evaluate
from segcal.metrics.nll import nll
from segcal.posthoc.temperature import Temperature
from segcal.repair import comparing
from segcal.repair.comparing import UNCALIBRATED, Entry, compare_methods, planned_steps, recommend
from segcal.repair.fitting import fit_calibrator, plan_fit
from tests.conftest import close
from tests.repair.conftest import cohort

METHODS = ["temperature", "class_region"]


def compared(folders, **options):
    job = plan_fit(folders.predictions, folders.labels)
    options = {"methods": METHODS, "processes": 1, "resamples": 200, **options}
    return compare_methods(job, **options)


@pytest.fixture(scope="module")
def done(shared):
    return compared(shared)


def test_a_repair_that_helps_is_recommended(done):
    assert done.recommendation.method in METHODS
    assert any("NLL over all voxels" in text for text in done.recommendation.reasons)
    before, after = (
        done.comparison.reports[name].summary["metrics"]["nll_all"]["mean"]
        for name in (UNCALIBRATED, done.recommendation.method)
    )
    assert after < before


def test_rows_as_they_are_equal_an_evaluation(done, shared):
    report = evaluate(shared.predictions, shared.labels)
    ours = done.comparison.reports[UNCALIBRATED].cases
    expected = report.cases[ours.columns]
    pd.testing.assert_frame_equal(ours, expected)


def test_no_case_is_calibrated_by_a_fit_that_saw_it(shared, monkeypatch):
    """Every fit of a fold is that of the other cases alone."""
    seen = []
    fit_rows = Temperature.fit_rows

    def spy(self, rows):
        seen.append(set(rows[0].patients.tolist()))
        return fit_rows(self, rows)

    monkeypatch.setattr(Temperature, "fit_rows", spy)
    used = {}
    evaluate_one = comparing._evaluate

    def watch(item, **others):
        used[item.case.name] = item.calibrators["temperature"].value
        return evaluate_one(item, **others)

    monkeypatch.setattr(comparing, "_evaluate", watch)
    compared(shared, methods=["temperature"])
    assert seen == [{i for i in range(6) if i % 5 != fold} for fold in range(5)]
    assert used["case_00"] == used["case_05"] != used["case_01"]


def test_the_cross_validated_numbers_are_those_of_each_folds_calibrator(done, shared, tmp_path):
    rest = [f"case_{i:02d}" for i in (1, 2, 3, 4)]
    for name in rest:
        for folder in ("predictions", "labels"):
            (tmp_path / folder).mkdir(exist_ok=True)
            for file in (shared.root / folder).glob(f"{name}.*"):
                (tmp_path / folder / file.name).symlink_to(file)
    (tmp_path / "predictions" / "dataset.json").symlink_to(shared.predictions / "dataset.json")
    fold = fit_calibrator(tmp_path / "predictions", tmp_path / "labels", method="temperature")
    x = torch.from_numpy(shared.stored("case_00")).log()[None]
    expected = nll(fold.calibrator.apply(x), torch.from_numpy(shared.reference["case_00"])[None])
    got = done.comparison.reports["temperature"].cases.loc["case_00", "nll_all"]
    close(got, expected, rtol=1e-5)


def test_nothing_is_recommended_for_what_is_calibrated(tmp_path):
    right = compared(cohort(tmp_path, sharpened=1.0, cases=7, seed=3))
    assert right.recommendation.method is None
    assert "leave the probabilities as they are" in right.recommendation.reasons[0]


def test_too_few_patients_are_said_to_be_too_few(shared, tmp_path):
    few = compared(cohort(tmp_path, cases=4))
    assert few.recommendation.method is None
    assert "4 patients are too few" in few.recommendation.reasons[0]
    with pytest.raises(ValueError, match="got 1; to compare methods"):
        compared(cohort(tmp_path / "one", cases=1))


def test_what_names_no_patient_is_refused(shared):
    for pattern, message in (
        ("patient[0-9]+", "finds nothing in case_00"),
        ("(", "no regular expression"),
        ("case", "two patients or more, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            compared(shared, patients=pattern)
    job = plan_fit(shared.predictions, shared.labels)
    assert planned_steps(job, METHODS, None, job) == (6, 12, 12)
    assert planned_steps(job, [*METHODS, "local"], None, None) == (12, 15, 6)


def test_pairs_of_cases_are_one_patient(tmp_path, monkeypatch):
    folders = cohort(tmp_path, cases=6)
    for i in range(6):
        for folder, ending in (
            ("predictions", "npz"),
            ("predictions", "nii.gz"),
            ("labels", "nii.gz"),
        ):
            path = tmp_path / folder / f"case_{i:02d}.{ending}"
            path.rename(path.with_name(f"p{i // 2}_{i % 2}.{ending}"))
    seen = []
    fit_rows = Temperature.fit_rows
    monkeypatch.setattr(
        Temperature,
        "fit_rows",
        lambda self, rows: seen.append(set(rows[0].patients.tolist())) or fit_rows(self, rows),
    )
    done = compared(folders, methods=["temperature"], patients="p[0-9]+")
    assert seen == [{1, 2}, {0, 2}, {0, 1}]  # of patients
    assert (done.patients, done.folds) == (3, 3)
    assert {d.n for d in done.comparison.differences if d.metric == "nll_all"} == {3}


def test_other_cases_are_calibrated_by_a_fit_to_all(shared, tmp_path):
    other = cohort(tmp_path, cases=2, seed=9, first=20)
    test = plan_fit(other.predictions, other.labels)
    done = compared(shared, methods=["temperature"], test=test)
    assert list(done.test.reports["temperature"].cases.index) == ["case_20", "case_21"]
    whole = fit_calibrator(shared.predictions, shared.labels, method="temperature")
    assert done.facts["temperature"] == json.loads(json.dumps(whole.calibrator.facts))


def test_pairs_of_other_cases_are_one_patient_too(shared, tmp_path):
    other = cohort(tmp_path, cases=4, seed=9, first=20)
    test = plan_fit(other.predictions, other.labels)
    for pattern, patients in ((None, 4), ("0[0-9]|2", 1)):
        done = compared(shared, methods=["temperature"], test=test, patients=pattern)
        assert {d.n for d in done.test.differences if d.metric == "nll_all"} == {patients}


def test_an_unknown_method_is_refused(shared):
    with pytest.raises(ValueError, match="no post-hoc method platt; there are"):
        compared(shared, methods=["platt"])


def test_methods_that_do_not_fit_so_many_classes_are_left_out(shared, monkeypatch):
    job = plan_fit(shared.predictions, shared.labels)
    every = planned_steps(job, None, None, None)[1]
    monkeypatch.setattr(comparing, "channels_of", lambda job: 117)
    assert planned_steps(job, None, None, None)[1] == every - 2 * 5  # matrix and dirichlet
    with pytest.raises(ValueError, match="no more than 30 classes, got 117"):
        planned_steps(job, ["matrix"], None, None)


def table(nll, ece, dsc=0.8, n=20, seed=0):
    """A row a patient, about these values; patients differ much, methods in them little."""
    patients = np.random.default_rng(0).normal(size=n) * 0.05
    noise = np.random.default_rng(seed + 1).normal(size=(2, n)) * 0.005
    noise[0] -= noise[0].mean()
    columns = {"nll_all": nll + patients + noise[0], "ece_near": ece + noise[1] / 5}
    return pd.DataFrame({**columns, "dsc": dsc + patients})


def advice(n=20, **rows):
    tables = {UNCALIBRATED: table(0.5, 0.1, n=n)}
    tables |= {k: table(*v, n=n, seed=i + 1) for i, (k, v) in enumerate(rows.items())}
    entries = [Entry(UNCALIBRATED), *(Entry(name, name) for name in rows)]
    return recommend(tables, entries, "near")


def test_rules_of_the_recommendation():
    assert advice(a=(0.4, 0.05), b=(0.45, 0.01)).method == "a"  # NLL decides over ECE
    assert advice(a=(0.45, 0.01), b=(0.4, 0.05)).method == "b"
    assert advice(a=(0.4, 0.05), b=(0.399, 0.01)).method == "b"  # at no cost in NLL
    assert advice(a=(0.4, 0.05), b=(0.4, 0.05)).method == "a"  # alike: the simpler
    assert advice(a=(0.4, 0.05), b=(0.35, 0.05)).method == "b"
    assert advice(a=(0.6, 0.01)).method is None  # a worse NLL is not outweighed
    assert advice(a=(0.495, 0.05)).method == "a"
    assert advice(a=(0.5, 0.2)).method is None
    lost = advice(a=(0.4, 0.05, 0.79))
    assert lost.method is None
    assert any("a loses 0.0100 of DSC" in text for text in lost.reasons)


@pytest.mark.parametrize("n", [5, 12])
@pytest.mark.parametrize("methods", [1, 9])
def test_chance_is_rarely_recommended(n, methods):
    """Methods that change nothing but noise: 5 % of the time at the most, and a margin for luck."""
    rng = np.random.default_rng(0)
    taken, runs = 0, 200
    names = [f"m{i}" for i in range(methods)]
    entries = [Entry(UNCALIBRATED), *(Entry(name, name) for name in names)]
    for _ in range(runs):
        tables = {
            name: pd.DataFrame(rng.normal(size=(n, 3)), columns=["nll_all", "ece_near", "dsc"])
            for name in (UNCALIBRATED, *names)
        }
        for one in tables.values():
            one["dsc"] = 0.8
        taken += recommend(tables, entries, "near").method is not None
    assert taken <= 0.05 * runs + 2.5 * np.sqrt(0.05 * 0.95 * runs)
