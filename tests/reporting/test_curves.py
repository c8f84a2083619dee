"""Curves over the epochs."""

from __future__ import annotations

from segcal.reporting.curves import multipliers, plot_multipliers


def test_multipliers_are_found_by_what_they_are():
    """A recipe of the user's own is not called like its penalty."""
    line = {"epoch": 0, "val": {"cals": 0.1}, "cals": {"lam": [[0.1, 0.2]], "rho": [[1.0, 1.0]]}}
    assert multipliers(line) == [0.1, 0.2]
    assert multipliers({"epoch": 0, "val": {"nacl": 0.1}}) is None
    figure = plot_multipliers({"mine": [[line, line]]}, ["a", "b"], "title")
    (axis,) = figure.axes
    assert axis.get_title() == "mine"
    assert [line.get_ydata().tolist() for line in axis.lines if line.get_label() in "ab"] == [
        [0.1, 0.1], [0.2, 0.2],
    ]  # fmt: skip
