"""Numbers printed in papers, and how their protocol differs from a study's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import model_validator

from segcal.io.yaml import Strict, read_yaml, validated

__all__ = ["Claim", "Published", "PublishedTable", "load_published"]

FILE = Path(__file__).with_name("published.yaml")


class PublishedColumn(Strict):
    """A metric of a paper.

    Attributes:
        paper: the paper's name of the metric.
        ours: nearest column of a study.
        difference: how the two metrics differ.
    """

    paper: str
    ours: str
    difference: str


class PublishedTable(Strict):
    """A table of a paper.

    Attributes:
        title: its name.
        source: where it is printed.
        sets: beginnings of the names of the study's sets that it belongs to.
        columns: metrics.
        rows: numbers by recipe, in the order of the columns.
        protocol: known differences from a study.
    """

    title: str
    source: str
    sets: tuple[str, ...]
    columns: tuple[PublishedColumn, ...]
    rows: dict[str, tuple[float, ...]]
    protocol: tuple[str, ...]

    @model_validator(mode="after")
    def _complete(self) -> PublishedTable:
        for recipe, numbers in self.rows.items():
            if len(numbers) != len(self.columns):
                raise ValueError(
                    f"rows.{recipe}: expected {len(self.columns)} numbers, got {len(numbers)}"
                )
        return self

    def belongs_to(self, sets: Sequence[str]) -> list[str]:
        """Sets of a study that it belongs to."""
        return [name for name in sets if name.lower().startswith(self.sets)]


class Claim(Strict):
    """What a paper says about a method.

    Attributes:
        recipe: of segcal.
        claim: in short.
        source: where the paper says it, and on which data.
    """

    recipe: str
    claim: str
    source: str


class Published(Strict):
    """All tables and claims."""

    tables: tuple[PublishedTable, ...]
    claims: tuple[Claim, ...]


def load_published(path: Path = FILE) -> Published:
    """Read the papers' numbers.

    Raises:
        ValueError: the file is damaged.
    """
    return validated(read_yaml(path), Published, path.name)
