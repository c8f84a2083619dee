"""``segcal check``: what would stop an evaluation, in seconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.evaluate import say_labels
from segcal.commands.reading_options import (
    OPTIONS,
    DatasetJson,
    Labels,
    PredictionPattern,
    ReferencePattern,
    known_labels,
    source_of,
)


def check(
    predictions: Annotated[Path, typer.Argument(help="Folder of predictions, or one file.")],
    references: Annotated[Path, typer.Argument(help="Folder of label maps, or one file.")],
    dataset_json: DatasetJson = None,
    labels: Labels = None,
    prediction_pattern: PredictionPattern = None,
    reference_pattern: ReferencePattern = None,
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="How far a prediction may lie off its reference, in voxels."),
    ] = 1e-2,
) -> None:
    """List what would stop segcal evaluate, from file names and headers alone.

    Example: segcal check predictions labelsTs

    It looks at pairs, sizes, positions and numbers of channels. Only the evaluation itself reads
    the values of voxels.

    Exit code 0: nothing is wrong. 1: something is. 2: wrong usage.
    """
    from segcal.evaluation.check import check_case, count_channels, oddities
    from segcal.evaluation.labels import find_labels
    from segcal.io.case_patterns import Patterns
    from segcal.io.pairing import find_reader, pair

    console = open_console()
    with user_errors(OPTIONS):
        patterns = Patterns(prediction_pattern, reference_pattern)
        pairing = pair(predictions, references, patterns)
        if pairing.note:
            say(console, pairing.note)
        known = find_labels(known_labels(dataset_json, labels), predictions, references)
        say_labels(console, known)
        label_set = known.label_set
        reader = find_reader(predictions)
        found = {
            case.name: check_case(case, label_set, reader=reader, tolerance=tolerance)
            for case in pairing.cases
        }
        if label_set is None:  # nothing says how many channels there should be
            channels = {case.name: count_channels(case) for case in pairing.cases}
            counts = Counter(n for n in channels.values() if n is not None)
            usual = counts.most_common(1)[0][0] if counts else None
            for name, n in channels.items():
                if n not in (None, usual):
                    found[name].append(f"{n} channels, where most predictions have {usual}")
    wrong = {name: problems for name, problems in found.items() if problems}
    for name, problems in wrong.items():
        for problem in problems:
            say(console, f"{name}: {problem}{source_of(known.label_set, problem)}", "red")
    for case in pairing.cases:
        for note in oddities(case, label_set):
            say(console, f"Note on {case.name}: {note}", "yellow")
    for names, what in (
        (pairing.without_prediction, "references without a prediction"),
        (pairing.without_reference, "predictions without a reference"),
    ):
        if names:
            say(console, f"{len(names)} {what}: {', '.join(names)}", "yellow")
    if others := len(pairing.of_other_folds):
        say(console, f"{others} references left out: other folds validate on their cases")
    good = len(found) - len(wrong)
    say(console, f"{good} of {len(found)} cases can be evaluated, as far as headers tell.")
    if wrong or pairing.without_prediction:
        raise typer.Exit(1)
