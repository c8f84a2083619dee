"""The published evaluation, against numbers of the published program and cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.ece import ece
from segcal.reproduction import crac
from segcal.reproduction.crac import error_between_edges, tace_ref, tcece
from segcal.reproduction.marginloss import CONVENTIONS, evaluate_case_marginloss
from tests.conftest import close

CALIBRATION = ("ece_fg", "cece_fg", "aece_fg", "nll_fg", "tace_ref")
PUBLISHED = {"ece": crac.ece, "cece": crac.classwise_ece, "aece": crac.aece, "tace": tcece}
CASES = {
    "plain": 0,
    "top label missing": 1,
    "prediction misses a label": 2,
    "saturated, probabilities of 0": 3,
    "uniform probabilities, one slice": 4,
}


def evaluate(logits, labels):
    """Row of logits ``(slices, K, H, W)`` and labels ``(slices, H, W)``."""
    probs = torch.softmax(logits, 1)
    return evaluate_case_marginloss(
        logits.argmax(1).numpy(),
        labels.numpy().astype(np.int64),
        labels={k: f"label {k}" for k in range(1, logits.shape[1])},
        probabilities=probs.movedim(1, 0).numpy(),
    )


@pytest.mark.parametrize("i", CASES.values(), ids=CASES)
def test_rows_of_the_published_program(golden, i):
    g = golden("marginloss")
    row = evaluate(g[f"logits_{i}"], g[f"labels_{i}"])
    k = g[f"logits_{i}"].shape[1]
    for key, name in (("dsc", "dsc"), ("hd95_pooled_voxels", "hd")):
        expected = g[f"{name}_{i}"][1:]
        found = [row[f"{key}/label {c}"] for c in range(1, k)]
        assert found == expected.tolist()
        assert row[key] == float(expected.numpy().mean())
    expected = dict(zip(CALIBRATION, g[f"calibration_{i}"].tolist(), strict=True))
    if i == CASES["saturated, probabilities of 0"]:  # the program has logits where p is 0
        assert row["nll_fg"] < expected.pop("nll_fg")
    assert {key: row[key] for key in expected} == expected
    close(row["soft_brier_fg"], g[f"brier_{i}"], rtol=1e-6)  # float32 sums, not rounded


def test_errors_before_the_rounding(golden):
    g = golden("marginloss")
    for i in CASES.values():
        p, y = torch.softmax(g[f"logits_{i}"], 1), g[f"labels_{i}"].long()
        p, y = p.movedim(1, -1)[y > 0].T[None], y[y > 0][None]
        raw = g[f"raw_{i}"][[0, 1, 2, 4]]
        found = [PUBLISHED[name](p, y) for name in ("ece", "cece", "aece", "tace")]
        close(found, raw, rtol=1e-5, atol=1e-6)  # float32 sums there


def test_golden_calibration_in_float64(golden):
    g = golden("calibration_metrics")
    p, y = torch.softmax(g["logits"], 1), g["labels"]
    for scope, mask in (("all", torch.ones_like(y, dtype=torch.bool)), ("fg", y > 0)):
        kept = p.movedim(1, -1)[mask].T[None], y[mask][None]
        names = {"ece": "ece15", "cece": "cece15", "aece": "aece15", "tace": "tcece15_t1e-3"}
        for name, column in names.items():
            expected = float(g[f"{column}_{scope}"])
            if name == "tace":
                found = tcece(*kept, mask=torch.ones_like(kept[1]).bool())
            else:
                found = PUBLISHED[name](*kept)
            assert abs(found - expected) <= 1e-12
    row = evaluate(g["logits"], y)
    for key, column in zip(
        CALIBRATION, ("ece15", "cece15", "aece15", "nll", "tcece15_t1e-3"), strict=True
    ):
        assert row[key] == float(np.round(float(g[f"{column}_fg"]), 4))
    assert abs(row["soft_brier_fg"] - float(g["seg_brier_crac"])) <= 1e-12


@pytest.mark.parametrize("axes", [2, 3])
def test_golden_overlap(golden, axes):
    g = golden("surface")
    a, b = (g[f"{x}{axes}"].numpy().astype(int) for x in "ab")
    row = evaluate_case_marginloss(b, a, labels={1: "organ"})
    assert row["hd95_pooled_voxels/organ"] == float(g[f"hd95_medpy_{axes}_iso"])
    assert row["dsc/organ"] == float(np.round(float(g[f"dc_medpy_{axes}"]), 4))
    assert set(row) == {"dsc", "dsc/organ", "hd95_pooled_voxels", "hd95_pooled_voxels/organ"}


def test_empty_structures():
    """A miss scores HD 0, a false alarm DSC 1 and HD 0; the mean over labels takes both."""
    reference, prediction = np.zeros((3, 6, 6), dtype=int), np.zeros((3, 6, 6), dtype=int)
    reference[1, 2:4, 2:4] = 1
    prediction[0, 0, :] = 2
    labels = {1: "missed", 2: "false alarm", 3: "in neither"}
    row = evaluate_case_marginloss(prediction, reference, labels=labels)
    assert [row[f"dsc/{name}"] for name in labels.values()] == [0, 1, 1]
    assert [row[f"hd95_pooled_voxels/{name}"] for name in labels.values()] == [0, 0, 0]
    close(row["dsc"], 2 / 3)


@pytest.mark.parametrize("voxels", [0, 1])
def test_too_few_foreground_voxels_for_the_published_program(voxels):
    reference = np.zeros((2, 4, 4), dtype=int)
    reference[0, 0, :voxels] = 1
    probabilities = np.full((2, 2, 4, 4), 0.5)
    row = evaluate_case_marginloss(
        reference, reference, labels={1: "organ"}, probabilities=probabilities
    )
    assert all(np.isnan(row[key]) for key in (*CALIBRATION, "soft_brier_fg"))
    assert row["dsc"] == 1


def test_every_key_is_said_in_words(golden):
    g = golden("marginloss")
    row = evaluate(g["logits_0"], g["labels_0"])
    assert {key.split("/")[0] for key in row} == set(CONVENTIONS) - {"scope fg"}


def test_no_bin_holds_0_or_more_than_1_and_edges_are_sharp():
    """Bins (0, .5] and (.5, 1]: 0 and 1.00001 count in n alone, a hair above .5 is in the second.

    Of the five, one is wrong in the first bin, gap .5, and one right in the second, gap about .5.
    """
    p = torch.tensor([0.0, 1.00001, 0.5, 0.5 + 1e-7, 1.0])
    hits = torch.tensor([True, False, False, True, True])
    edges = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    close(error_between_edges(p, hits, edges), (0.5 + 0.5) / 5, rtol=1e-6)
    assert np.isnan(error_between_edges(p[:0], hits[:0], edges))
    assert error_between_edges(p[:2], hits[:2], edges) == 0


def test_probabilities_of_0_are_in_no_bin_of_the_classwise_error():
    """The label is class 1, surely called class 0: the p_1 = 0 of the miss has no bin."""
    p = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    y = torch.tensor([[1, 1]])
    # class 0: 1.0 in the last bin and never true; class 1: 0 is in no bin, 1.0 is right
    close(crac.classwise_ece(p, y), (0.5 + 0.0) / 2)
    close(classwise_ece(p, y), (0.5 + 0.5 + 0.0) / 3)


TOP = 1.01666666667 / 2  # in two bins: (1 - 14/15 + .95) / 2
BOTH = 0.88333333333 / 2  # in one bin: (14/15 + .95 - 1) / 2


@pytest.mark.parametrize(
    ("published", "ours", "own"),
    [
        (crac.ece, ece, TOP),
        (crac.classwise_ece, classwise_ece, (TOP + BOTH) / 2),
        (tcece, tace_ref, (TOP + BOTH) / 2),
    ],
)
def test_a_hair_above_an_edge(published, ours, own):
    """Confidences 14/15 and a hair, right, and .95, wrong, share a bin in the published code.

    Here the first counts as on the edge, in the bin below. Class 1 has one bin either way.
    """
    hair = torch.nextafter(torch.linspace(0, 1, 16)[14], torch.tensor(1.0))
    top = torch.stack([hair, torch.tensor(0.95)])
    p, y = torch.stack([top, 1 - top])[None], torch.tensor([[0, 1]])
    everything = torch.ones(1, 2, dtype=torch.bool)
    close(published(p, y, mask=everything), BOTH, rtol=1e-6)
    close(ours(p, y, mask=everything), own, rtol=1e-6)


@pytest.mark.parametrize("metric", PUBLISHED.values(), ids=PUBLISHED)
def test_undefined_without_voxels(metric):
    p, y = torch.full((1, 2, 4), 0.5), torch.ones(1, 4, dtype=torch.long)
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    assert np.isnan(metric(p, y, mask=nothing))


def test_refuses():
    label_map = np.zeros((3, 4, 4), dtype=int)
    with pytest.raises(ValueError, match="expected one shape of 2 or 3 axes"):
        evaluate_case_marginloss(label_map, label_map[:2], labels={1: "organ"})
    with pytest.raises(ValueError, match="at least one foreground label"):
        evaluate_case_marginloss(label_map, label_map, labels={})
    with pytest.raises(ValueError, match="expected 0 to 1"):
        evaluate_case_marginloss(
            label_map,
            label_map + 255,
            labels={1: "organ"},
            probabilities=np.full((2, 3, 4, 4), 0.5),
        )
