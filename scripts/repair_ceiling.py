"""How far can temperatures repair a network at all? Fit them to the test patients themselves.

    segcal study acdc --set keep_predictions=true ...
    python scripts/repair_ceiling.py runs/study_acdc --recipe dice_ce --patient 'patient[0-9]+'

For every training of a recipe in the folder of a study whose predictions were kept, calibrators are
fitted to: the validation patients, as a user does; all test patients together; every test patient
alone. All of them are measured on the test patients. The last two know what no user knows: what
they leave is beyond any choice of a temperature for each predicted class and region, for all
patients or for each. A patient's own temperatures are not shrunk.

Writes ``SET.csv`` (means over the cases of every patient) into data/results/ceiling, from which
``publish_study.py page`` makes a table.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.progress import track

from segcal.io.files import whole_file
from segcal.metrics.ece import ece
from segcal.metrics.nll import nll
from segcal.posthoc.calibrator import Calibrator
from segcal.posthoc.class_region import ClassRegionTemperature
from segcal.repair.fitting import collect, numbered, owners, plan_fit
from segcal.repair.inputs import CaseLogits, read_case_logits
from segcal.study.measuring import fit_repairs, near_foreground

RESULTS = Path(__file__).resolve().parent.parent / "data" / "results" / "ceiling"
METHODS = ("temperature", "class_region", "class_region_case")
RAW, ALL, OWN = "raw", "class_region, all test patients", "class_region, every test patient"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", type=Path, help="folder of a study")
    parser.add_argument("--recipe", default="dice_ce")
    parser.add_argument("--patient", metavar="REGEX", help="finds the patient in a case's name")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    folders = sorted(options.study.glob(f"*/*/{options.recipe}/seed_*/test"))
    if not folders:
        raise SystemExit(f"{options.study}: holds no predictions of {options.recipe}; run the "
                         "study with --set keep_predictions=true")  # fmt: skip
    rows: dict[str, list[dict[str, Any]]] = {}
    for folder in folders:
        name, network, _, seed = folder.parent.relative_to(options.study).parts
        labels = options.study / "data" / name / seed / "labels"
        keys = {"network": network, "recipe": options.recipe, "seed": int(seed.split("_")[1])}
        found = (keys | row for row in measured(folder.parent, labels, options.patient))
        rows.setdefault(name, []).extend(found)
    options.results.mkdir(parents=True, exist_ok=True)
    for name, of in rows.items():
        table = pd.DataFrame(of).groupby([*keys, "patient", "repair"], sort=False).mean()
        with whole_file(options.results / f"{name}.csv") as temporary:
            table.to_csv(temporary, float_format="%.4g")
        print(table.groupby(["repair", "seed"], sort=False).mean().unstack().round(4).to_string())


def measured(cell: Path, labels: Path, pattern: str | None) -> Iterator[dict[str, Any]]:
    """Numbers of every test case of a training, by repair."""
    parts = {part: plan_fit(cell / part, labels / part) for part in ("fit", "test")}
    names = {part: [case.name for case in job.pairing.cases] for part, job in parts.items()}
    owner = {part: dict(zip(of, owners(of, pattern), strict=True)) for part, of in names.items()}
    everyone: Mapping[str, Calibrator] = {
        **fit_repairs(METHODS, parts["fit"], owner["fit"]),
        ALL: fit_repairs(["class_region"], parts["test"], owner["test"])["class_region"],
    }
    own = by_patient(parts["test"], owner["test"])
    for case in track(parts["test"].pairing.cases, f"{cell.name}, test cases"):
        read = read_case_logits(case, parts["test"])
        patient = owner["test"][case.name]
        for repair, calibrator in (*everyone.items(), (OWN, own[patient]), (RAW, None)):
            yield {"patient": patient, "repair": repair, **numbers(read, calibrator)}


def by_patient(job: Any, owner: Mapping[str, str]) -> dict[str, Calibrator]:
    """Calibrators that know every patient's labels."""
    (rows,) = collect(job, ClassRegionTemperature(), processes=1).rows
    cases = [case.name for case in job.pairing.cases]
    patient = numbered([owner[name] for name in cases])
    found = {}
    for number, name in sorted({(n, owner[c]) for n, c in zip(patient, cases, strict=True)}):
        chosen = [i for i, n in enumerate(patient) if n == number]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a structure without errors determines no temperature
            one = ClassRegionTemperature(strength=0).fit_rows([rows.of_cases(chosen)])
        found[name] = one
    return found


def numbers(read: CaseLogits, calibrator: Calibrator | None) -> dict[str, float]:
    """ECE near the foreground and NLL of all voxels of a case."""
    logits, labels = read.logits, read.arrays.reference.array
    probs = (
        logits.softmax(1)
        if calibrator is None
        else calibrator.apply(logits, spacing_mm=read.spacing_mm)
    )
    p = probs[0].float().numpy()
    return {"ece_dilated5": ece(p, labels, mask=near_foreground(labels)), "nll_all": nll(p, labels)}


if __name__ == "__main__":
    main()
