"""The table of a data set of a study."""

from __future__ import annotations

import pytest

from segcal.classify.study_report import TrialResult, _set_table


def run(multilabel):
    outcomes = {"softmax": {"metrics": {}}}
    return TrialResult(
        set="set", recipe="ce", seed=0, multilabel=multilabel, names=("a",), samples={"test": 4},
        tested=0, notes=(), outcomes=outcomes, last={"softmax": {}}, metric="nll", best=0.0,
        records=[],
    )  # fmt: skip


@pytest.mark.parametrize("multilabel", [True, False])
def test_only_labels_have_links_to_speak_of(multilabel):
    caption = _set_table("set", [run(multilabel)]).caption
    assert ("link" in caption) == multilabel
    assert caption.startswith("Test samples, mean ± standard deviation over 1 seed (4 test).")
