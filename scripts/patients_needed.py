"""How many patients tell how temperatures follow the difficulty of a case?

    segcal study acdc --set keep_predictions=true ...
    python scripts/patients_needed.py acdc runs/study_acdc

Neither the validation nor the test patients of a study were trained on. For every training of a
recipe whose predictions were kept, this script draws some of them with a seed, fits `class_region`
and `class_region_case` to these, and measures both on all the others. Unlike in segcal, the slope
of `class_region_case` is chosen here whatever the number of patients, so that its limit can be
judged.

Writes ``SET.csv`` (a row for every draw) into data/results/needed, from which
``publish_study.py page`` makes a table.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import yaml
from repair_ceiling import numbers  # of this folder
from rich.progress import track

from segcal.io.files import whole_file
from segcal.posthoc import class_region
from segcal.posthoc.class_region import ClassRegionTemperature
from segcal.posthoc.rows import Rows
from segcal.repair.fitting import collect, numbered, plan_fit
from segcal.repair.inputs import read_case_logits
from segcal.study.plan import StudyCell, cells, load_study
from segcal.study.preparing import owner_of

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "data" / "results" / "needed"
STUDIES = ROOT / "configs" / "studies"
NUMBERS = (3, 5, 8, 12, 16, 24)
DRAWS = 3
REST = 6
"""Fewest patients to measure on."""
LEAST = 2
"""Fewest patients whose cross-validation chooses a slope."""
METRICS = ("ece_dilated5", "nll_all")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", help="name of a study in configs/studies")
    parser.add_argument("output", type=Path, help="its folder")
    parser.add_argument("--recipe", default="dice_ce")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    config = STUDIES / f"{options.study}.yaml"
    if not config.is_file():
        known = ", ".join(sorted(path.stem for path in STUDIES.glob("*.yaml")))
        raise SystemExit(f"{config}: no such study; expected one of {known}")
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    content = {**content, "output": str(options.output), "recipes": [options.recipe]}
    found = [
        cell
        for cell in cells(load_study(content, options.study))
        if all(any(cell.predictions(part).glob("*.npz")) for part in ("fit", "test"))
    ]
    if not found:
        raise SystemExit(f"{options.output}: holds no predictions of {options.recipe}; run the "
                         "study with --set keep_predictions=true")  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell in found:
        keys = {"network": cell.network, "recipe": cell.recipe, "seed": cell.seed}
        rows.setdefault(cell.set, []).extend(keys | row for row in measured(cell))
    options.results.mkdir(parents=True, exist_ok=True)
    for name, of in rows.items():
        with whole_file(options.results / f"{name}.csv") as temporary:
            pd.DataFrame(of).to_csv(temporary, index=False, float_format="%.5g")


def measured(cell: StudyCell) -> Iterator[dict[str, Any]]:
    """Numbers of both repairs after every draw of patients of a training."""
    parts, owner, read = [], [], []
    for part in ("fit", "test"):
        job = plan_fit(cell.predictions(part), cell.labels(part))
        names = [case.name for case in job.pairing.cases]
        owner += [owner_of(cell, names)[name] for name in names]
        parts += collect(job, ClassRegionTemperature(), processes=1).rows
        read += [read_case_logits(case, job) for case in job.pairing.cases]
    patient = np.array(numbered(owner))
    rows = Rows.joined(parts).of_patients(patient.tolist())
    patients = int(patient.max()) + 1
    draws = [(n, draw) for n in NUMBERS if n <= patients - REST for draw in range(DRAWS)]
    for n, draw in track(draws, f"{cell.set}, seed {cell.seed}"):
        order = np.random.default_rng([cell.seed, n, draw]).permutation(patients)
        held_out = np.isin(patient, order[:n])
        given = rows.of_cases(np.flatnonzero(held_out).tolist())
        found: dict[str, Any] = {"patients": n, "draw": draw}
        for name, per_case in (("group", False), ("case", True)):
            with mock.patch.object(class_region, "FEWEST", LEAST), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # few patients leave some groups empty
                one = ClassRegionTemperature(per_case=per_case).fit_rows([given])
            of = pd.DataFrame([numbers(read[i], one) for i in np.flatnonzero(~held_out)])
            means = of.groupby(patient[~held_out]).mean().mean()
            found |= {f"{metric}_{name}": means[metric] for metric in METRICS}
        yield found | {"slope": one.slope}


if __name__ == "__main__":
    main()
