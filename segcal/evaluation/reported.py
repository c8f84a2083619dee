"""What an evaluation reports: the rows of the metrics, and one of a paper beside its namesake."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from segcal.metrics import table
from segcal.metrics.table import CalibrationMetric, Metric, ScopeMetric
from segcal.reproduction.crac import TACE_REF


def calibration_metrics() -> list[CalibrationMetric]:
    """Rows of the calibration errors; what CRaC calls TACE follows TACE."""
    rows = list(table.CALIBRATION)
    place = next((i for i, row in enumerate(rows) if row.key == "tace"), len(rows) - 1)
    return [*rows[: place + 1], TACE_REF, *rows[place + 1 :]]


def scope_metrics() -> list[ScopeMetric]:
    """Rows of all numbers of a scope; the floor of ECE follows ECE."""
    rows = calibration_metrics()
    place = next((i for i, row in enumerate(rows) if row.key == "ece"), len(rows) - 1)
    return [*rows[: place + 1], *table.FLOOR, *rows[place + 1 :]]


def label_means() -> dict[str, str]:
    """Means over the labels of a case, and of which number of a label, by key."""
    means = {row.key: row.key for row in table.STRUCTURE if row.mean_of_labels}
    return means | {row.key: row.of for row in table.PENALISED}


def metric_of(column: str) -> Metric | None:
    """Row that a column of the table of cases belongs to; None if it is of no metric."""
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
    """Keys of metrics by what people call them: ``dsc``, ``hd95``, ``HD95 penalised``, ``ece``.

    Raises:
        ValueError: a name of none, with those there are.
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
    """Name of a column of the table of cases for people: ``HD95 penalised (mm)``, ``DSC liver``.

    Args:
        column: of the table of cases.
        unit: of the lengths, ``mm`` or ``px``.
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
        scopes: of the evaluation.
        asked: keys of the metrics; of a distance, the mean in which a miss costs the diagonal is
            compared. None takes those that every comparison has.
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
    """Meanings by key; rows of one meaning share an entry.

    Args:
        rows: of the metrics.
        asked: what the braces in their meanings stand for.
    """
    keys: dict[str, list[str]] = {}
    for row in rows:
        keys.setdefault(row.meaning, []).append(row.key)
    return {", ".join(of): meaning.format(**asked) for meaning, of in keys.items()}
