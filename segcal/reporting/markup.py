"""Prints tables as LaTeX (booktabs) and as Markdown, to paste into a paper or a README."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from segcal.reporting.tables import Table

FILES = {"markdown": "tables.md", "latex": "tables.tex"}
"""File name of every format."""
_LATEX = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
        "|": r"\textbar{}", '"': "''", "↑": r"$\uparrow$", "↓": r"$\downarrow$",
        "[": "{[}", "]": "{]}",  # at the start of a row it would be an argument of \\
    }
)  # fmt: skip
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~&$])")
_MINUS = re.compile(r"(?<![^\s\[])-(?=\d)")


def latex(text: str) -> str:
    """Escape plain text for LaTeX, with minus signs set in maths."""
    return minus(" ".join(text.split()).translate(_LATEX))


def minus(text: str) -> str:
    """Set the minus signs of numbers in maths."""
    return _MINUS.sub("$-$", text)


def markdown(text: str) -> str:
    """Escape plain text for a cell of a Markdown table."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def render_tables(tables: Sequence[Table], form: str) -> str:
    """Print tables in one file.

    Args:
        tables: tables to print.
        form: format, a key of ``FILES``.
    """
    environment = Environment(
        loader=PackageLoader("segcal.reporting", ""), autoescape=False,  # noqa: S701 - no HTML
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(latex=latex, minus=minus, markdown=markdown)
    return environment.get_template(f"{FILES[form]}.j2").render(tables=tables)
