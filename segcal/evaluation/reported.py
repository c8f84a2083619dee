"""Lists the metrics that an evaluation reports, with their names, columns and definitions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from segcal.metrics import table
from segcal.metrics.table import CalibrationMetric, Metric, ScopeMetric
from segcal.reproduction.tace_ref import TACE_REF


def calibration_metrics() -> list[CalibrationMetric]:
    """Rows of the calibration errors; the TACE of the CRaC paper follows TACE."""
    rows = list(table.CALIBRATION)
    place = next((i for i, row in enumerate(rows) if row.key == "tace"), len(rows) - 1)
    return [*rows[: place + 1], TACE_REF, *rows[place + 1 :]]


def scope_metrics() -> list[ScopeMetric]:
    """Rows of all numbers of a scope (selection of voxels); the floor of ECE follows ECE."""
    rows = calibration_metrics()
    place = next((i for i, row in enumerate(rows) if row.key == "ece"), len(rows) - 1)
    return [*rows[: place + 1], *table.FLOOR, *rows[place + 1 :]]


def label_means() -> dict[str, str]:
    """Means over the labels of a case by key, each with the key of the number it averages."""
    means = {row.key: row.key for row in table.STRUCTURE if row.mean_of_labels}
    return means | {row.key: row.of for row in table.PENALISED}


def metric_of(column: str) -> Metric | None:
    """Metric that a column of the table of cases belongs to; None if it belongs to none."""
    key = column.split("/")[0]
    named = (
        *table.STRUCTURE, *table.PENALISED, *table.CONFIDENCE, *table.RATERS, table.ENERGY,
    )  # fmt: skip
    found: list[Metric] = [row for row in named if row.key == key]
    for row in (*scope_metrics(), table.BRIER_SOFT):
        if key == row.key if row.scope else key.startswith(f"{row.key}_"):
            found.append(row)
    return max(found, key=lambda row: len(row.key), default=None)


def find_metrics(names: Iterable[str]) -> frozenset[str]:
    """Keys of metrics by their usual names: ``dsc``, ``hd95``, ``HD95 penalised``, ``ece``.

    In a penalised mean of a distance, a structure that was missed or falsely predicted counts as
    the image diagonal.

    Raises:
        ValueError: a name is unknown; the message lists the known names.
    """
    rows = [*table.STRUCTURE, *table.PENALISED, *scope_metrics()]
    keys: dict[str, str] = {}
    for row in rows:
        for name in row.names:
            keys.setdefault(name, row.key)
    asked = [name.strip().lower() for name in names]
    if unknown := [name for name in asked if name not in keys]:
        raise ValueError(
            f"metrics: expected some of {', '.join(row.heading for row in rows)}, got "
            f"{', '.join(map(repr, unknown))}"
        )
    return frozenset(keys[name] for name in asked)


def readable(column: str, unit: str = "mm") -> str:
    """Readable name of a column of the table of cases: ``HD95 penalised (mm)``, ``DSC liver``.

    Args:
        column: column of the table of cases.
        unit: unit of the lengths, ``mm`` or ``px``.
    """
    row = metric_of(column)
    if row is None:
        return column
    key, _, label = column.partition("/")
    parts = (row.heading, key.removeprefix(row.key).removeprefix("_"), label)
    given = row.unit_of(unit)
    return " ".join(part for part in parts if part) + (f" ({given})" if given else "")


def compared_columns(scopes: Sequence[str], asked: Collection[str] | None = None) -> list[str]:
    """Columns of the table of cases that a comparison of methods shows first.

    Args:
        scopes: scopes of the evaluation.
        asked: keys of the metrics; for a distance, the mean in which a miss counts as the image
            diagonal is compared. None uses the metrics that every comparison has.
    """

    def is_of(row: Metric) -> bool:
        return row.compared if asked is None else row.key in asked

    means = label_means()
    of_case = [row.key for row in table.STRUCTURE if row.key in means and is_of(row)]
    of_case += [
        row.key for row in table.PENALISED if is_of(row) or (asked is not None and row.of in asked)
    ]
    return of_case + [
        row.column(scope)
        for row in scope_metrics()
        for scope in scopes
        if is_of(row) and row.is_of(scope)
    ]


def definitions(rows: Iterable[Metric], **asked: float | str) -> dict[str, str]:
    """Meanings by key; rows with the same meaning share an entry.

    Args:
        rows: rows of the metrics.
        asked: values for the braces in their meanings.
    """
    keys: dict[str, list[str]] = {}
    for row in rows:
        keys.setdefault(row.meaning, []).append(row.key)
    return {", ".join(of): meaning.format(**asked) for meaning, of in keys.items()}
