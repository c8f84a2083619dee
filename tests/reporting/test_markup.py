"""The same table in three languages: escaped names, marks of the best, nothing lost."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from segcal.evaluation.compare import SharedMean
from segcal.evaluation.settings import EvaluationSettings
from segcal.reporting.markup import latex, markdown, render_tables
from segcal.reporting.tables import Cell, Column, Table, method_table

NASTY = r"""[a] & b_1 | 50 % {x} $y$ #2 ~ ^ \end{document} <i> `c` *d* "e" """.strip()
CONVENTIONS = EvaluationSettings().conventions()


def means(metric, *values, n=4):
    return [
        SharedMean(metric, f"m{i}", n, v, None if v is None else (v - 0.01, v + 0.01))
        for i, v in enumerate(values)
    ]


def best(table, column):
    (index,) = [i for i, c in enumerate(table.columns) if c.name == column]
    return [row[index].text for row in table.rows if row[index].best]


def test_escapes_by_hand():
    assert latex("a_b & 5 % of $x") == r"a\_b \& 5 \% of \$x"
    assert latex("\\") == r"\textbackslash{}"
    assert latex("[0.1, -0.2] ↓") == r"{[}0.1, $-$0.2{]} $\downarrow$"
    assert latex("T1-weighted\nGd") == "T1-weighted Gd"
    assert markdown("a_b|c*<d>\n`e`") == r"a\_b\|c\*\<d\> \`e\`"


def test_best_values_are_marked():
    table = method_table(
        [*means("dsc", 0.9001, 0.9004, 0.8), *means("ece_all", 0.02, 0.01, None),
         *means("ece_fg", 0.1, 0.1, 0.1), *means("tace_all", None, 0.5, None)],
        CONVENTIONS,
    )  # fmt: skip
    assert best(table, "DSC") == ["0.900", "0.900"]  # alike as printed
    assert best(table, "ECE all") == ["0.0100"]
    assert best(table, "ECE fg") == []  # all alike
    assert best(table, "TACE all") == []  # nothing to compare with
    assert [row[2].text for row in table.rows] == ["0.0200", "0.0100", "-", "4"]
    assert table.columns[1].heading == "DSC\N{NO-BREAK SPACE}↑"
    hd = method_table(means("hd95_penalised_mm", 10.0, 9.0), CONVENTIONS)
    assert hd.columns[1].heading == "HD95 penalised (mm)\N{NO-BREAK SPACE}↓"
    assert best(hd, "HD95 penalised") == ["9.00"]


def nasty_table():
    columns = [Column("label"), Column("x", "what it means", "mm", "↓"), Column("y")]
    rows = [
        [Cell(NASTY), Cell("-1.50", extra="[-2.00, -1.00]", best=True), Cell("-")],
        [Cell("plain"), Cell("2.00"), Cell("inf")],
    ]
    return Table("nasty", "A_title", columns, rows, "100 % of it.")


def test_markdown_has_a_row_for_a_row():
    lines = render_tables([nasty_table(), nasty_table()], "markdown").splitlines()
    assert lines.count("## A\\_title") == 2
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 * 4
    for line in table:
        assert len(re.findall(r"(?<!\\)\|", line)) == 4  # three cells, whatever the name
    assert table[0] == "| label | x (mm) ↓ | y |"
    assert "| **-1.50** [-2.00, -1.00] | - |" in table[2]
    assert "- x: what it means" in lines


def test_latex_has_a_row_for_a_row():
    text = render_tables([nasty_table()], "latex")
    body = text[text.index(r"\midrule") : text.index(r"\bottomrule")].splitlines()[1:]
    assert len(body) == 2
    for line in body:
        assert len(re.findall(r"(?<!\\)&", line)) == 2
        assert line.endswith(r" \\")
    assert r"\textbf{$-$1.50} [$-$2.00, $-$1.00] & - \\" in body[0]
    assert r"label & x (mm) $\downarrow$ & y \\" in text
    assert r"\begin{tabular}{@{}lrr@{}}" in text


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no pdflatex")
def test_latex_compiles(tmp_path):
    (tmp_path / "tables.tex").write_text(render_tables([nasty_table()], "latex"), encoding="utf-8")
    (tmp_path / "a.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs,graphicx}"
        r"\begin{document}\input{tables}\end{document}"
    )
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
