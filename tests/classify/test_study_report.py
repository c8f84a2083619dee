"""The table of a data set of a study."""

from __future__ import annotations

import pytest

from segcal.classify.study_report import TrialResult, _set_table


def run(multilabel):
    outcomes = {"softmax": {"metrics": {}}}
    return TrialResult(
        "set", "ce", 0, multilabel, ("a",), {"test": 4}, (), outcomes, {"softmax": {}}, "nll", []
    )


@pytest.mark.parametrize("multilabel", [True, False])
def test_only_labels_have_links_to_speak_of(multilabel):
    caption = _set_table("set", [run(multilabel)]).caption
    assert ("link" in caption) == multilabel
    assert caption.startswith("Test samples, mean ± standard deviation over 1 seed (4 test).")
