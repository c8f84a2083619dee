"""The figure of a training."""

from __future__ import annotations

import matplotlib.pyplot as plt

from segcal.reporting.progress import plot_progress


def test_figure_of_a_training():
    step = {"lam": [[0.1, 0.2], [1.0, 2.0]], "rho": [[0.1] * 2] * 2, "constraint": [[1, 2]] * 2}
    terms = {"base": 1.0, "crac": 0.1}
    records = [
        {"epoch": 0, "train": terms, "val": terms, "ece": 0.2, "crac": step},
        {"epoch": 1, "train": terms, "val": terms, "ece": None},  # no pass over volumes here
    ]
    with plt.rc_context({"font.size": 31.0}):  # as nnU-Net leaves it behind
        axes = plot_progress(records, ["background", "heart"]).axes
        assert plt.rcParams["font.size"] == 31.0
    titles = [ax.get_title() for ax in axes]
    assert titles[2:] == ["crac: multiplier", "crac: penalty parameter", "crac: constraint"]
    assert [ax.get_yscale() for ax in axes[2:]] == ["log", "log", "linear"]
    signs = {**step, "lam": [[-0.1, 0.2], [0.0, 2.0]]}  # of equality constraints
    both = plot_progress([{**records[0], "crac": signs}], ["background", "heart"]).axes
    assert [ax.get_yscale() for ax in both[2:]] == ["linear", "log", "linear"]
    lam = {line.get_label(): line.get_ydata()[0] for line in axes[2].lines}
    assert lam == {"background, inner": 0.1, "heart, inner": 0.2, "background, outer": 1.0,
                   "heart, outer": 2.0}  # fmt: skip
    assert len(axes[0].lines) == 4
    assert max(t.get_fontsize() for ax in axes for t in (ax.title, ax.xaxis.label)) < 20
