"""The drawn functions of a constraint."""

from __future__ import annotations

import numpy as np

from segcal.reporting.penalty_functions import plot_penalty_functions
from tests.conftest import close

AT = (-1.0, 0.0, 1.0)
BY_HAND = {  # of lam 1 and rho 2: values, and slopes, at -1, 0 and 1
    "PHR": ([-0.25, 0.0, 2.0], [0.0, 1.0, 3.0]),
    "P2": ([-1 / 3, 0.0, 1 + 2 + 4 / 6], [1 / 9, 1.0, 1 + 4 + 2.0]),
    "P3": ([-1 / 3, 0.0, 1 + 2.0], [1 / 9, 1.0, 1 + 4.0]),
}


def test_curves_by_hand():
    figure = plot_penalty_functions()
    values, slopes = figure.axes[:3], figure.axes[3:]
    assert [axis.get_title() for axis in values] == list(BY_HAND)
    for above, below in zip(values, slopes, strict=True):
        for axis, expected in zip((above, below), BY_HAND[above.get_title()], strict=True):
            (line,) = [one for one in axis.lines if one.get_label() == "lam = 1, rho = 2"]
            close(np.interp(AT, *line.get_data()), expected, atol=1e-12)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "lam = 0.1, rho = 1", "lam = 1, rho = 1", "lam = 1, rho = 2", "lam = 1, rho = 4",
    ]  # fmt: skip
