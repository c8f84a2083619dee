"""Makes the report as one HTML page that needs no network: tables, pictures, definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from segcal.reporting.picture import Picture
from segcal.reporting.tables import Table


@dataclass(frozen=True)
class Section:
    """A heading with the notes, table and pictures under it."""

    title: str
    notes: Sequence[str] = field(default_factory=tuple)
    table: Table | None = None
    pictures: Sequence[Picture] = field(default_factory=tuple)


def table_section(table: Table, *notes: str, pictures: Sequence[Picture] = ()) -> Section:
    """Put a table under its title."""
    return Section(table.title, notes, table, pictures)


def render(
    title: str,
    summary: Mapping[str, Any],
    sections: Sequence[Section],
    parts: Sequence[str] = (),
) -> str:
    """Return the page.

    Args:
        title: heading.
        summary: content of ``summary.json``.
        sections: sections between the heading and the definitions.
        parts: names of folders beside the page that have a page of their own.
    """
    environment = Environment(
        loader=PackageLoader("segcal.reporting", ""), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        title=title,
        predictions=summary["predictions"],
        references=summary["references"],
        created=summary["created"],
        version=summary["versions"]["segcal"],
        cases=summary["cases"],
        conventions=summary["conventions"],
        sections=sections,
        parts=[(name, f"{quote(name)}/index.html") for name in parts],
    )
