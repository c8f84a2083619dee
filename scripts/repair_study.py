"""Does repairing a finished network achieve what training again with a calibration loss does?

The study asks how much each post-hoc method helps, on which networks, and how many patients it
needs; how the segmentation changes if expected Dice decides; and, where the true posterior is
known, whether the probabilities come nearer to it or only look better.

`train` trains small 2-D networks as ``segcal train`` does, with several recipes and seeds, and
predicts as ``segcal predict`` does. The patients of a seed are split into three parts: the first
trains, the second validates the training and later fits a calibrator, and the third only tests. For
phantoms the true posterior is known, and is written too.

`evaluate` fits every method to the second part of the patients and measures it on the third, one
network after the other. `report` makes tables of the results so far. `collect` writes the numbers,
as means by patient, into data/results/repair. `page` makes the same tables from these files and
puts each into a page, between the marks ``<!-- NAME -->`` and ``<!-- /NAME -->``.

    python scripts/repair_study.py train -o study                          # phantoms alone
    python scripts/repair_study.py train -o study --acdc $nnUNet_raw/Dataset027_ACDC \\
        --hippocampus $nnUNet_raw/Dataset004_Hippocampus --seeds 0 1 2
    python scripts/repair_study.py evaluate -o study
    python scripts/repair_study.py report -o study
    python scripts/repair_study.py collect -o study
    python scripts/repair_study.py page docs/do-i-need-to-retrain.md

ACDC and the hippocampus are folders in nnU-Net's raw layout (``segcal convert acdc``). Finished
parts are skipped, and a stopped training continues. The output is, for each SET::

    SET/data_sSEED                     the data set of the training, in nnU-Net's raw layout
    SET/RECIPE_sSEED/training          as of segcal train
    SET/RECIPE_sSEED/{fit,test}        as of segcal predict
    SET/RECIPE_sSEED/done.json         that it is done, and its scores in short
    SET/labels_sSEED/{fit,test}        label maps and dataset.json
    phantom/posterior_sSEED/{fit,test} true posteriors, in the format of predictions
    results/cases/SET_RECIPE_sSEED.csv numbers of every test case by method and decision
    results/draws/SET_sSEED.csv        of calibrators that were fitted to few patients
    results/fits/SET_RECIPE_sSEED.json what the methods say of their fits
    results/*.md, results/tables.json  tables
"""

from __future__ import annotations

import argparse
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from segcal.adapters.monai.experiment import SegmentationExperiment
from segcal.adapters.monai.inference import Predictor, predict_cases
from segcal.adapters.monai.training import SegmentationRun
from segcal.datasets.phantom import write_phantom_dataset
from segcal.evaluation.case import evaluate_mask
from segcal.evaluation.compare import Difference, compare
from segcal.evaluation.job import Job
from segcal.evaluation.settings import EvaluationSettings
from segcal.io.files import read_json, whole_file, write_json, write_text
from segcal.io.pairing import Case
from segcal.io.volumes import read_labels
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.dice import dice
from segcal.metrics.ece import ece
from segcal.metrics.nll import nll
from segcal.metrics.tace import tace
from segcal.posthoc.calibrator import Calibrator
from segcal.posthoc.decision import Offsets, Rule, decide
from segcal.repair.fitting import build_calibrator, collect, plan_fit
from segcal.repair.inputs import CaseLogits, read_case_logits
from segcal.study.measuring import divergence, near_foreground
from segcal.study.preparing import cut_middle, link

PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "results" / "repair"
RECIPES = ("dice_ce", "crac", "svls", "cals")
PARTS = ("fit", "test")
SUBFOLDERS = {"Tr": "fit", "Ts": "test"}
UNCALIBRATED = "uncalibrated"
TRUTH = "true posterior"
PLAIN = "dice_ce"
"""Recipe without a calibration loss, on which all methods are tried."""
POINTWISE = (
    "temperature", "class_region", "class_region_case", "class_region_bias", "vector", "beta",
    "histogram", "isotonic", "matrix", "dirichlet",
)  # fmt: skip
METHODS = (*POINTWISE, "local")
FEW = ("temperature", "class_region", "local")
"""Methods that are tried on networks with a calibration loss."""
DECIDED = ("dice_ce", "svls")
"""Recipes for which decision rules are compared."""
SIZES = (2, 5, 10, 20)
"""Numbers of patients that a calibrator is fitted to."""
DRAWN = ("temperature", "class_region", "vector")
DRAWS = 3
MOST_PATIENTS = 24
"""Number of test patients of a seed that are measured, the first by name."""
MOST_ROWS = 300_000
"""Number of voxels to which each draw is fitted."""
NEAR = "dilated5"
COLUMNS = (
    "nll_all", f"nll_{NEAR}", "ece_fg", "ece_union", f"ece_{NEAR}", "ece_all", "tace_all",
    "cece_all",
)  # fmt: skip


@dataclass(frozen=True)
class Material:
    """A data set and how a small network is trained on it.

    Attributes:
        name: of the set.
        patient: the patient of a case, from its name.
        counts: numbers of patients that train, fit and test; None takes the remaining patients.
        size: of the network's input, in voxels ``(y, x)``.
        epochs: number of passes over the slices.
        spacing_mm: of the network's input, in plane; None keeps the voxels as they are.
        middle_mm: side of the square cut out of the middle of every slice; None cuts nothing.
    """

    name: str
    patient: Callable[[str], str]
    counts: tuple[int, int, int | None]
    size: tuple[int, int]
    epochs: int
    spacing_mm: float | None = None
    middle_mm: float | None = None


def _before_frame(case: str) -> str:
    return case.split("_frame", maxsplit=1)[0]


def _subject(case: str) -> str:
    """Cases 2k - 1 and 2k of the hippocampus are the two sides of one person."""
    number = re.search(r"\d+$", case)
    return case if number is None else str((int(number[0]) + 1) // 2)


MATERIALS = {
    material.name: material
    for material in (
        # 5 volumes for 600 steps: a network that knows them by heart
        Material("phantom", str, (5, 12, 12), (64, 64), 120),
        Material("hippocampus", _subject, (8, 10, None), (64, 48), 14),
        Material("acdc", _before_frame, (30, 20, 40), (128, 128), 21, 1.5, 192.0),
    )
}


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    training = commands.add_parser("train", help="train, and predict all other patients")
    training.set_defaults(run=train)
    training.add_argument("--acdc", type=Path, metavar="FOLDER", help="nnU-Net raw layout")
    training.add_argument("--hippocampus", type=Path, metavar="FOLDER", help="nnU-Net raw layout")
    training.add_argument("--epochs", type=int, help="in place of each set's own number")
    training.add_argument(
        "--patients", nargs=3, type=int, metavar=("TRAIN", "FIT", "TEST"),
        help="in place of each set's own numbers",
    )  # fmt: skip
    training.add_argument("--checkpoint", choices=("last", "best"), default="last")
    evaluation = commands.add_parser("evaluate", help="fit every method, and measure it")
    evaluation.set_defaults(run=evaluate)
    evaluation.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME")
    reporting = commands.add_parser("report", help="make tables of what was measured")
    reporting.set_defaults(run=report)
    reporting.add_argument("--resamples", type=int, default=2000, help="of the bootstrap")
    collecting = commands.add_parser("collect", help="write the numbers for data/results")
    collecting.set_defaults(run=publish)
    paging = commands.add_parser("page", help="put tables into a page")
    paging.set_defaults(run=write_page, threads=1)
    paging.add_argument("page", type=Path)
    paging.add_argument("--resamples", type=int, default=2000, help="of the bootstrap")
    for command in (collecting, paging):
        command.add_argument("--results", type=Path, default=PUBLISHED, metavar="FOLDER")
    for command in (training, evaluation, reporting, collecting):
        command.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
        command.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME")
        command.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
        command.add_argument("--threads", type=int, default=1, help="of torch")
    return parser


def train(options: argparse.Namespace) -> None:
    """Train and predict with every recipe on every set, seed by seed."""
    sources = {"phantom": None, "hippocampus": options.hippocampus, "acdc": options.acdc}
    for seed in options.seeds:
        for name, material in MATERIALS.items():
            source = sources[name]
            if source is None and name != "phantom":
                continue
            if options.patients is not None:
                material = replace(material, counts=tuple(options.patients))
            if options.epochs is not None:
                material = replace(material, epochs=options.epochs)
            prepare(material, source, options.output / name, seed)
            for recipe in options.recipes:
                work(material, options.output / name, recipe, seed, options.checkpoint)


# Data.


def prepare(material: Material, source: Path | None, folder: Path, seed: int) -> None:
    """Write the data set of a seed, and beside it the label maps by part, if they do not exist.

    Args:
        material: the data set.
        source: folder in nnU-Net's raw layout; None generates phantoms.
        folder: of the set.
        seed: of the split of patients.
    """
    root = folder / f"data_s{seed}"
    if not root.exists():
        temporary = folder / f".data_s{seed}"
        shutil.rmtree(temporary, ignore_errors=True)
        if source is None:
            _generate(material, temporary, seed)
        else:
            _draw(material, source, temporary, seed, folder / "middle")
        temporary.rename(root)
    fold = read_json(root / "splits_final.json")[0]
    names = {"fit": fold["val"], "test": fold["test"]}
    for part, subset in (("fit", "Tr"), ("test", "Ts")):
        link(
            (root / f"labels{subset}" / f"{case}.nii.gz" for case in names[part]),
            folder / f"labels_s{seed}" / part,
        )
        _copy(root / "dataset.json", folder / f"labels_s{seed}" / part)
        if (root / "posteriorTr").is_dir():
            link(
                (root / f"posterior{subset}" / f"{case}.npz" for case in names[part]),
                folder / f"posterior_s{seed}" / part,
            )
            _copy(root / "dataset.json", folder / f"posterior_s{seed}" / part)


def _generate(material: Material, root: Path, seed: int) -> None:
    train_count, fit_count, test_count = material.counts
    write_phantom_dataset(root, train=train_count + fit_count, test=test_count or 12, seed=seed)
    _write_split(root, [p.name[:-7] for p in sorted((root / "labelsTr").iterdir())], train_count)


def _draw(material: Material, source: Path, root: Path, seed: int, middle: Path) -> None:
    """Split the patients of both folders of a data set again."""
    files = {
        label.name[:-7]: (source / f"images{subset}" / f"{label.name[:-7]}_0000.nii.gz", label)
        for subset in SUBFOLDERS
        for label in sorted((source / f"labels{subset}").glob("*.nii.gz"))
    }
    patients: dict[str, list[str]] = {}
    for case in sorted(files):
        patients.setdefault(material.patient(case), []).append(case)
    order = [list(patients)[i] for i in np.random.default_rng(seed).permutation(len(patients))]
    train_count, fit_count, test_count = material.counts
    left = order[train_count + fit_count :]
    groups = (
        order[:train_count],
        order[train_count : train_count + fit_count],
        left if test_count is None else left[:test_count],
    )
    cases = [[case for patient in group for case in patients[patient]] for group in groups]
    for subset, chosen in (("Tr", cases[0] + cases[1]), ("Ts", cases[2])):
        pairs = [_middle(files[case], middle, material.middle_mm) for case in chosen]
        link((image for image, _ in pairs), root / f"images{subset}")
        link((label for _, label in pairs), root / f"labels{subset}")
    _copy(source / "dataset.json", root)
    _write_split(root, cases[0] + cases[1], len(cases[0]))


def _write_split(root: Path, names: list[str], train_count: int) -> None:
    test = [p.name[:-7] for p in sorted((root / "labelsTs").iterdir())]
    fold = {"train": names[:train_count], "val": names[train_count:], "test": test}
    write_json(root / "splits_final.json", [fold])


def _middle(pair: tuple[Path, Path], folder: Path, side_mm: float | None) -> tuple[Path, Path]:
    """Image and label map of a case, cut to the middle of the slices."""
    if side_mm is None:
        return pair
    image, label = (folder / path.name for path in pair)
    for source, target in zip(pair, (image, label), strict=True):
        cut_middle(source, target, side_mm, label=target is label)
    return image, label


def _copy(file: Path, folder: Path) -> None:
    """Copy a small file, which may be read-only, so that it can be replaced."""
    shutil.copyfile(file, folder / file.name)


# Training and prediction.


def work(material: Material, folder: Path, recipe: str, seed: int, checkpoint: Any) -> None:
    """Train, predict and print the result; do nothing if that is done."""
    output = folder / f"{recipe}_s{seed}"
    done = output / "done.json"
    name = f"{material.name} {recipe} seed {seed}"
    if done.exists():
        print(f"{name}: done before", flush=True)
        return
    experiment = experiment_of(material, folder / f"data_s{seed}", output, recipe, seed)
    start = time.perf_counter()
    try:
        trained = SegmentationRun(experiment, resume=True).run()
    except FloatingPointError as error:
        print(f"{name}: diverged ({error})", flush=True)
        return
    middle = time.perf_counter()
    predictor = Predictor(experiment, checkpoint)
    predict_cases(predictor, predictor.cases(None, validation=True), output / "fit", "npz")
    predict_cases(predictor, predictor.cases(None), output / "test", "npz")
    end = time.perf_counter()
    scores = {part: score(output / part, folder / f"labels_s{seed}" / part) for part in PARTS}
    record = {
        "epochs": trained.epochs,
        "best_epoch": trained.best_epoch,
        "train_s": round(middle - start, 1),
        "predict_s": round(end - middle, 1),
        **scores,
    }
    write_json(done, record)
    shown = "; ".join(
        f"{part} " + " ".join(f"{key} {value:.4f}" for key, value in scores[part].items())
        for part in PARTS
    )
    seconds = f"{record['train_s']:.0f} + {record['predict_s']:.0f} s"
    print(f"{time.strftime('%H:%M:%S')} {name}: {shown}; {seconds}", flush=True)


def experiment_of(
    material: Material, root: Path, output: Path, recipe: str, seed: int
) -> SegmentationExperiment:
    """The experiment that ``segcal train`` would read from a file."""
    spacing = None
    if material.spacing_mm is not None:
        spacing = [None, material.spacing_mm, material.spacing_mm]
    content = {
        "summary": f"{material.name}, a small network for studies of calibrators",
        "recipe": recipe,
        "data": {
            "root": root,
            "split": {"fold": 0},
            "size": material.size,
            "spacing_mm": spacing,
        },
        "network": {
            "target": "monai.networks.nets.UNet",
            "args": {"channels": [16, 32, 64, 128], "strides": [2, 2, 2], "num_res_units": 1},
        },
        "optimizer": {"target": "torch.optim.Adam", "args": {"lr": 1e-3}},
        "scheduler": {
            "target": "torch.optim.lr_scheduler.CosineAnnealingLR",
            "args": {"T_max": material.epochs},
        },
        "training": {"epochs": material.epochs, "batch_size": 8, "seed": seed, "device": "cpu"},
        "output": str(output / "training"),
    }
    return SegmentationExperiment.model_validate(content)


def score(predictions: Path, labels: Path) -> dict[str, float]:
    """Means over cases: ``dsc`` over the classes, ``ece`` and ``nll`` over all voxels."""
    rows = []
    classes = len(read_json(labels / "dataset.json")["labels"])
    for path in sorted(predictions.glob("*.npz")):
        reference = read_labels(labels / f"{path.stem}.nii.gz").array.astype(np.int64)
        with np.load(path) as file:
            probs = file["probabilities"]
        overlaps = [dice(probs.argmax(0), reference, k) for k in range(1, classes)]
        overlap = float(np.nanmean(overlaps)) if np.isfinite(overlaps).any() else np.nan
        rows.append((overlap, ece(probs, reference), nll(probs, reference)))
    return dict(zip(("dsc", "ece", "nll"), np.nanmean(rows, axis=0).tolist(), strict=True))


# Evaluation.


def evaluate(options: argparse.Namespace) -> None:
    """Measure every finished network that has no results yet, then calibrators of few patients."""
    networks = [
        Measuring(options.output, material, recipe, seed, tuple(options.methods))
        for seed in options.seeds
        for material in MATERIALS.values()
        for recipe in options.recipes
    ]
    networks = [one for one in networks if (one.predictions / "done.json").exists()]
    for one in networks:
        _timed(f"{one.name}: measured", one.measure)
    for one in networks:
        if one.recipe == PLAIN:
            _timed(f"{one.name}: few patients", one.draw)


def _timed(what: str, function: Callable[[], bool]) -> None:
    start = time.perf_counter()
    if function():
        seconds = time.perf_counter() - start
        print(f"{time.strftime('%H:%M:%S')} {what}, {seconds:.0f} s", flush=True)


@dataclass(frozen=True)
class Measuring:
    """A network whose probabilities are repaired and measured.

    Attributes:
        output: folder of the study.
        material: what it was trained on.
        recipe: it was trained with.
        seed: of its data and training.
        wanted: methods, of which those for this recipe are tried.
    """

    output: Path
    material: Material
    recipe: str
    seed: int
    wanted: tuple[str, ...] = METHODS

    @property
    def name(self) -> str:
        return f"{self.material.name}_{self.recipe}_s{self.seed}"

    @property
    def predictions(self) -> Path:
        return self.output / self.material.name / f"{self.recipe}_s{self.seed}"

    @property
    def results(self) -> Path:
        return self.output / "results"

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(m for m in self.wanted if self.recipe == PLAIN or m in FEW)

    def job(self, part: str, predictions: str | None = None) -> Job:
        folder = self.output / self.material.name
        made = folder / f"{predictions or self.recipe}_s{self.seed}" / part
        return plan_fit(made, folder / f"labels_s{self.seed}" / part)

    def patient(self, case: str) -> str:
        """Patient with the seed for phantoms, since phantoms of different seeds share names."""
        same = self.material.patient(case)
        return f"s{self.seed} {same}" if self.material.name == "phantom" else same

    def few(self, job: Job) -> list[Case]:
        """Test cases that are measured."""
        cases = job.pairing.cases
        patients = dict.fromkeys(self.patient(case.name) for case in cases)
        chosen = set(list(patients)[:MOST_PATIENTS])
        return [case for case in cases if self.patient(case.name) in chosen]

    def measure(self) -> bool:
        """Measure the network; return whether there was something to measure."""
        target = self.results / "cases" / f"{self.name}.csv"
        if target.exists():
            return False
        job = self.job("fit")
        calibrators = fit_all(self.methods, job)
        offsets = self.offsets(job, calibrators)
        found = list(self.measured(calibrators, offsets))
        write_json(self.results / "fits" / f"{self.name}.json", facts_of(calibrators, offsets))
        write_csv(target, found)
        return True

    def draw(self) -> bool:
        """Measure calibrators that are fitted to few patients, likewise."""
        target = self.results / "draws" / f"{self.material.name}_s{self.seed}.csv"
        if target.exists():
            return False
        write_csv(target, self.drawn())
        return True

    def offsets(self, job: Job, calibrators: Mapping[str, Calibrator]) -> dict[str, Offsets]:
        """Offsets of the decision, chosen on the patients that the calibrators are fitted to."""
        if self.recipe not in DECIDED:
            return {}

        def pairs(calibrator: Calibrator | None) -> Iterator[tuple[Any, Any]]:
            for case in job.pairing.cases:
                read = read_case_logits(case, job)
                yield repaired(read, calibrator), read.held_out.labels[0]

        return {
            method: Offsets().fit(pairs(calibrators.get(method)))
            for method in (UNCALIBRATED, "class_region")
        }

    def measured(
        self, calibrators: Mapping[str, Calibrator], offsets: Mapping[str, Offsets]
    ) -> Iterator[dict[str, Any]]:
        """A row for every test case, method and decision."""
        job = self.job("test")
        cases = self.few(job)
        truth, posteriors = job, {}
        if (self.output / self.material.name / f"posterior_s{self.seed}").is_dir():
            truth = self.job("test", "posterior")
            posteriors = {case.name: case for case in truth.pairing.cases}
        for case in cases:
            read = read_case_logits(case, job)
            known = None
            if posteriors:
                known = repaired(read_case_logits(posteriors[case.name], truth), None)
            probs = {UNCALIBRATED: repaired(read, None)}
            probs |= {name: repaired(read, one) for name, one in calibrators.items()}
            if known is not None and self.recipe == PLAIN:
                probs[TRUTH] = known
            rules: dict[str, dict[str, Rule | Offsets]] = {}
            if self.recipe in DECIDED:
                rules = {name: {"dice": "dice", "offsets": of} for name, of in offsets.items()}
                rules[TRUTH] = {"dice": "dice"}
            owner = {"case": case.name, "patient": self.patient(case.name)}
            for row in rows_of(read, probs, rules, known, job.settings):
                yield {**owner, **row}

    def drawn(self) -> list[dict[str, Any]]:
        """Means over patients for calibrators that were fitted to some of the patients."""
        job = self.job("fit")
        (rows,) = collect(job, build_calibrator(DRAWN[0]), processes=1).rows
        owner = [self.patient(case.name) for case in job.pairing.cases]
        patients = list(dict.fromkeys(owner))
        fits: dict[tuple[str, int, int], Calibrator | None] = {(UNCALIBRATED, 0, 0): None}
        for size in (size for size in SIZES if size <= len(patients)):
            for draw in range(DRAWS if size < len(patients) else 1):
                order = np.random.default_rng([self.seed, size, draw]).permutation(len(patients))
                chosen = {patients[i] for i in order[:size]}
                some = rows.of_cases([i for i, of in enumerate(owner) if of in chosen])
                some = some.thinned(MOST_ROWS)
                for method in DRAWN:
                    fits[method, size, draw] = build_calibrator(method).fit_rows([some])
        test = self.job("test")
        found = []
        for case in self.few(test):
            read = read_case_logits(case, test)
            reference = read.arrays.reference.array
            near = near_foreground(reference)
            for (method, size, draw), calibrator in fits.items():
                p = repaired(read, calibrator)
                found.append({
                    "method": method, "patients": size, "draw": draw,
                    "patient": self.patient(case.name),
                    "nll_all": nll(p, reference), f"nll_{NEAR}": nll(p, reference, mask=near),
                    f"ece_{NEAR}": ece(p, reference, mask=near),
                })  # fmt: skip
        table = pd.DataFrame(found)
        keys = ["method", "patients", "draw"]
        by_patient = table.groupby([*keys, "patient"], sort=False).mean()
        means = by_patient.groupby(keys, sort=False).mean().reset_index()
        return [dict(row) for row in means.to_dict("records")]


def fit_all(methods: Iterable[str], job: Job) -> dict[str, Calibrator]:
    """Fit methods to a job; methods that treat voxels separately share one sample of voxels."""
    rows = collect(job, build_calibrator(POINTWISE[0]), processes=1).rows
    found = {}
    for method in methods:
        one = build_calibrator(method)
        own = rows if method in POINTWISE else collect(job, one, processes=1).rows
        found[method] = one.fit_rows(own)
    return found


def facts_of(
    calibrators: Mapping[str, Calibrator], offsets: Mapping[str, Offsets]
) -> dict[str, Any]:
    small = ("temperature", "class_region")
    fits = {name: {"facts": one.facts, "taken": one.improved} for name, one in calibrators.items()}
    for name in small:
        if name in calibrators:
            fits[name]["learned"] = calibrators[name].state()["learned"]
    chosen = {name: {"values": one.values, "facts": one.facts} for name, one in offsets.items()}
    return {"methods": fits, "offsets": chosen}


def write_csv(path: Path, rows: Any, **form: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as temporary:
        pd.DataFrame(rows).to_csv(temporary, index=False, **form)


def repaired(read: CaseLogits, calibrator: Calibrator | None) -> NDArray[Any]:
    if calibrator is None:
        assert read.arrays.probabilities is not None
        return read.arrays.probabilities
    return calibrator.apply(read.logits, spacing_mm=read.spacing_mm)[0].numpy()


def rows_of(
    read: CaseLogits,
    probs: Mapping[str, NDArray[Any]],
    rules: Mapping[str, Mapping[str, Rule | Offsets]],
    known: NDArray[Any] | None,
    settings: EvaluationSettings,
) -> Iterator[dict[str, Any]]:
    """Metrics of a case by method and decision.

    Args:
        read: the case.
        probs: by method.
        rules: decision rules by method, in addition to argmax; their surfaces are measured too.
        known: the true posterior, or None.
        settings: of the evaluation.
    """
    reference, structures = read.arrays.reference.array, read.arrays.structures
    near = near_foreground(reference)
    masks: list[tuple[NDArray[Any], dict[str, float]]] = []
    for method, p in probs.items():
        row = calibration(p, reference, near)
        if known is not None:
            kl = divergence(known, p)
            row |= {"kl_all": float(kl.mean()), f"kl_{NEAR}": float(kl[near].mean())}
        if method not in rules:
            labels = p.argmax(0)
            overlaps = [dice(labels, reference, one.labels[0]) for one in structures]
            defined = [one for one in overlaps if np.isfinite(one)]
            row["dsc"] = float(np.mean(defined)) if defined else np.nan
            yield {"method": method, "decision": "argmax", **row}
            continue
        for name, rule in ({"argmax": "argmax"} | dict(rules[method])).items():
            labels = decide(p, rule)
            of_mask = next((of for mask, of in masks if np.array_equal(mask, labels)), None)
            if of_mask is None:
                of_mask = evaluate_mask(
                    labels, reference, spacing_mm=read.spacing_mm, structures=structures,
                    settings=settings,
                )  # fmt: skip
                masks.append((labels, of_mask))
            numbers = {key: of_mask[key] for key in ("dsc", "hd95_penalised_mm")}
            yield {"method": method, "decision": name, **row, **numbers}


def calibration(
    p: NDArray[Any], reference: NDArray[Any], near: NDArray[np.bool_]
) -> dict[str, float]:
    """The columns of ``segcal evaluate`` that this study uses."""
    foreground = reference != 0
    scopes = {"fg": foreground, "union": foreground | (p.argmax(0) != 0), NEAR: near, "all": None}
    found = {f"ece_{scope}": ece(p, reference, mask=mask) for scope, mask in scopes.items()}
    found |= {f"nll_{scope}": nll(p, reference, mask=scopes[scope]) for scope in ("all", NEAR)}
    found |= {"tace_all": tace(p, reference), "cece_all": classwise_ece(p, reference)}
    return {key: found[key] for key in COLUMNS}


# Report.


SMALL = "Small 2-D networks (0.2 million weights, minutes of training): no state of the art."
PARTS_SAID = (
    "Calibrators, decision offsets and their strengths were chosen on the fit patients alone, and "
    f"measured on test patients that neither training nor fit has seen ({MOST_PATIENTS} a seed at "
    "most)."
)
READING = (
    "Means over patients; a patient is the mean of its volumes and of the seeds that test it. "
    "Differences are paired by patient, with 95 % bootstrap intervals over patients (not over "
    "trainings). ▼ and ▲: lower and higher than {baseline} with the interval beyond 0."
)
METRIC_NAMES = {
    "dsc": "DSC", "nll_all": "NLL all", f"nll_{NEAR}": "NLL near", "ece_fg": "ECE fg",
    "ece_union": "ECE union", f"ece_{NEAR}": "ECE near", "ece_all": "ECE all",
    "tace_all": "TACE all", "cece_all": "CECE all", "hd95_penalised_mm": "HD95 penalised (mm)",
    "kl_all": "KL all", f"kl_{NEAR}": "KL near",
}  # fmt: skip
Entry = tuple[str, str, str]
"""Recipe, method, decision."""
Tables = dict[Entry, pd.DataFrame]


@dataclass(frozen=True)
class Results:
    """All that was measured.

    Attributes:
        cases: a row for every set, recipe, seed, method, decision and test case or patient.
        draws: a row for every set, seed, method, number of patients and draw.
        resamples: of the bootstrap.
    """

    cases: pd.DataFrame
    draws: pd.DataFrame
    resamples: int

    def sets(self) -> list[str]:
        return [name for name in MATERIALS if name in set(self.cases["set"])]

    def tables(self, name: str, entries: Sequence[Entry]) -> tuple[Tables, list[int]]:
        """Rows by entry, one per patient, for the seeds that every entry has; and these seeds."""
        of_set = self.cases[self.cases["set"] == name]
        keys = ["recipe", "method", "decision"]
        groups = {key: part for key, part in of_set.groupby(keys) if key in entries}
        groups = {key: groups[key] for key in entries if key in groups}
        if not groups:
            return {}, []
        seeds = sorted(set.intersection(*(set(part["seed"]) for part in groups.values())))
        found = {}
        for key, part in groups.items():
            part = part[part["seed"].isin(seeds)]
            by_seed = part.groupby(["patient", "seed"]).mean(numeric_only=True)
            found[key] = by_seed.groupby("patient").mean()
        return found, seeds


@dataclass(frozen=True)
class Section:
    """A table in Markdown, and its content as plain data."""

    title: str
    text: str
    data: list[dict[str, Any]]


def report(options: argparse.Namespace) -> None:
    """Write tables of the results."""
    folder = options.output / "results"
    sections = sections_of(Results(*measured(options), options.resamples))
    texts = [f"## {one.title}\n\n{one.text}\n" for one in sections.values()]
    for (key, _), text in zip(sections.items(), texts, strict=True):
        (folder / f"{key}.md").write_text(text)
    (folder / "all.md").write_text("\n".join(texts))
    write_json(folder / "tables.json", {key: one.data for key, one in sections.items()})
    print("\n".join(texts))


def measured(options: argparse.Namespace) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Results of test cases and of draws, for the networks asked for."""
    folder = options.output / "results"
    cases = _read(folder / "cases", options)
    if cases.empty:
        raise SystemExit(f"{folder}: has no results yet; run evaluate")
    return cases, _read(folder / "draws", options)


def publish(options: argparse.Namespace) -> None:
    """Write the numbers for the tables; a patient is represented by the mean of its cases."""
    cases, draws = measured(options)
    keys = ["set", "recipe", "seed", "method", "decision", "patient"]
    patients = cases.drop(columns="case").groupby(keys, sort=False).mean().reset_index()
    for name, table in (("cases", patients), ("draws", draws)):
        write_csv(options.results / f"{name}.csv", table, float_format="%.5g")


def write_page(options: argparse.Namespace) -> None:
    """Put the tables that are made of the collected numbers between their marks."""
    cases = pd.read_csv(options.results / "cases.csv", dtype={"patient": str})
    draws = pd.read_csv(options.results / "draws.csv")
    text = options.page.read_text(encoding="utf-8")
    for name, one in sections_of(Results(cases, draws, options.resamples)).items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = marks.sub(lambda m, one=one: f"{m[1]}\n{one.text}\n\n{m[2]}", text)
    write_text(options.page, text)


def sections_of(results: Results) -> dict[str, Section]:
    """Every table, by the name of its marks."""
    return {
        "methods": methods_section(results),
        "decisions": decisions_section(results),
        "patients": patients_section(results),
        "posterior": posterior_section(results),
        "retrain": retrain_section(results),
    }


def _read(folder: Path, options: argparse.Namespace) -> pd.DataFrame:
    parts = []
    for path in sorted(folder.glob("*.csv")):
        name, seed = path.stem.rsplit("_s", 1)
        name, _, recipe = name.partition("_")
        if int(seed) in options.seeds and (recipe or PLAIN) in options.recipes:
            keys = {"set": name, "recipe": recipe or PLAIN, "seed": int(seed)}
            parts.append(pd.read_csv(path, dtype={"patient": str}).assign(**keys))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def methods_section(results: Results) -> Section:
    """Every method on every recipe, each against the same network uncalibrated."""
    blocks, data = [], []
    metrics = ["dsc", *COLUMNS]
    for name in results.sets():
        for recipe in RECIPES:
            methods = (UNCALIBRATED, *(METHODS if recipe == PLAIN else FEW))
            tables, seeds = results.tables(name, [(recipe, m, "argmax") for m in methods])
            if not tables:
                continue
            found = compared(tables, results.resamples)
            data += records(name, tables, found, seeds)
            title = f"**{name}, {recipe}** ({_counted(tables, seeds)})"
            labels = {key: key[1] for key in tables}
            blocks.append(f"{title}\n\n{values_table(tables, found, metrics, labels, 'method')}")
            if recipe == PLAIN:
                shown = ["nll_all", f"ece_{NEAR}", "tace_all"]
                blocks.append(differences_table(tables, found, shown, labels, "method"))
    text = f"{SMALL} {PARTS_SAID} {READING.format(baseline='uncalibrated')} NLL in nats; near is "
    text += "within 5 voxels of the labelled foreground. TACE leaves out probabilities up to "
    text += "0.001, so that it rises with a method that sends more of the background below; "
    text += "classwise ECE (CECE) leaves out none. Of files without logits, matrix and dirichlet "
    text += "are one method."
    return Section("Post-hoc methods", "\n\n".join([text, *blocks]), data)


def decisions_section(results: Results) -> Section:
    """Label maps by argmax, expected Dice and offsets."""
    blocks, data = [], []
    for name in results.sets():
        for recipe in DECIDED:
            bases = (UNCALIBRATED, "class_region", *((TRUTH,) if recipe == PLAIN else ()))
            entries = [(recipe, m, d) for m in bases for d in ("argmax", "dice", "offsets")]
            tables, seeds = results.tables(name, entries)
            if not tables:
                continue
            found = compared(tables, results.resamples)
            data += records(name, tables, found, seeds)
            labels = {key: f"{key[1]}, {key[2]}" for key in tables}
            title = f"**{name}, {recipe}** ({_counted(tables, seeds)})"
            shown = ["dsc", "hd95_penalised_mm"]
            blocks.append(
                f"{title}\n\n{values_and_differences(tables, found, shown, labels, 'decision')}"
            )
    text = f"{SMALL} {PARTS_SAID} {READING.format(baseline='argmax')} Temperatures change no "
    text += "argmax, so that the first row is also that of class_region. A missed or invented "
    text += "structure costs the image diagonal in HD95."
    return Section("Decisions", "\n\n".join([text, *blocks]), data)


def patients_section(results: Results) -> Section:
    """Table of calibrators that were fitted to few patients."""
    lines, data = [], []
    for name in results.sets():
        of_set = results.draws[results.draws["set"] == name] if len(results.draws) else []
        if not len(of_set):
            continue
        before = of_set[of_set["method"] == UNCALIBRATED].set_index("seed")
        for (method, size), part in of_set.groupby(["method", "patients"], sort=False):
            base = before.loc[part["seed"]]
            change = part["nll_all"].to_numpy() - base["nll_all"].to_numpy()
            row = {
                "set": name, "method": method, "patients": int(size), "draws": len(part),
                "seeds": sorted(set(part["seed"].tolist())), "worse": float((change > 0).mean()),
                "nll_change": change.tolist(),
                **{k: part[k].tolist() for k in ("nll_all", f"nll_{NEAR}", f"ece_{NEAR}")},
            }  # fmt: skip
            data.append(row)
            if method == UNCALIBRATED:
                row["patients"], share, difference = 0, "", ""
            else:
                share = f"{int((change > 0).sum())}/{len(part)}"
                difference = _spread(change, "+.4f")
            lines.append(
                f"| {name} | {method} | {size or ''} | {len(part)} | {_spread(part['nll_all'])} | "
                f"{difference} | {_spread(part[f'ece_{NEAR}'])} | {share} |"
            )
    text = f"{SMALL} {PARTS_SAID} {PLAIN}; patients drawn with a seed from those of the fit, "
    text += f"{DRAWS} draws (one of all of them) for each training seed. Means over draws and "
    text += f"seeds of the mean over test patients (least to greatest). Fitted to {MOST_ROWS:,} "
    text += "voxels at most, drawn with a seed. Worse: draws after which "
    text += "the test NLL was higher than uncalibrated."
    head = "| set | method | patients | draws | NLL all | change of NLL | ECE near | worse |\n"
    head += "|---|---|--:|--:|---|---|---|--:|\n"
    return Section("How many patients", f"{text}\n\n{head}" + "\n".join(lines), data)


def posterior_section(results: Results) -> Section:
    """KL from the true posterior, where it is known."""
    blocks, data = [], []
    for name in results.sets():
        if "kl_all" not in results.cases:
            break
        if results.cases.loc[results.cases["set"] == name, "kl_all"].isna().all():
            continue
        for recipe in RECIPES:
            methods = (UNCALIBRATED, *(METHODS if recipe == PLAIN else FEW))
            methods += (TRUTH,) if recipe == PLAIN else ()
            tables, seeds = results.tables(name, [(recipe, m, "argmax") for m in methods])
            if not tables:
                continue
            found = compared(tables, results.resamples)
            data += records(name, tables, found, seeds)
            labels = {key: key[1] for key in tables}
            title = f"**{name}, {recipe}** ({_counted(tables, seeds)})"
            shown = [
                "kl_all",
                f"kl_{NEAR}",
                "nll_all",
                f"ece_{NEAR}",
                "ece_fg",
                "tace_all",
                "cece_all",
            ]
            blocks.append(f"{title}\n\n{values_table(tables, found, shown, labels, 'method')}")
    text = f"{SMALL} {PARTS_SAID} {READING.format(baseline='uncalibrated')} KL in nats a voxel, "
    text += "from the true posterior to the prediction (probabilities below 1e-12 count as this). "
    text += "ECE and TACE of the true posterior are the noise of finite cases, and in fg, which is "
    text += "chosen by the label, they are not least for it."
    return Section("Against the true posterior", "\n\n".join([text, *blocks]), data)


def retrain_section(results: Results) -> Section:
    """Repair of the plain network against networks with a calibration loss."""
    repair = (PLAIN, "class_region", "argmax")
    entries = [
        repair,
        (PLAIN, UNCALIBRATED, "argmax"),
        (PLAIN, "temperature", "argmax"),
        (PLAIN, "class_region", "dice"),
        (PLAIN, "local", "argmax"),
        *((recipe, m, "argmax") for recipe in RECIPES if recipe != PLAIN for m in
          (UNCALIBRATED, "class_region")),
    ]  # fmt: skip
    blocks, data = [], []
    for name in results.sets():
        tables, seeds = results.tables(name, entries)
        if repair not in tables or not seeds:
            continue
        found = compared(tables, results.resamples)
        data += records(name, tables, found, seeds)
        labels = {
            (recipe, method, decision): recipe
            + ("" if method == UNCALIBRATED else f" + {method}")
            + (", dice decision" if decision == "dice" else "")
            for recipe, method, decision in tables
        }
        title = f"**{name}** ({_counted(tables, seeds)})"
        shown = ["dsc", "nll_all", f"ece_{NEAR}", "tace_all"]
        blocks.append(
            f"{title}\n\n{values_and_differences(tables, found, shown, labels, 'network')}"
        )
    text = f"{SMALL} {PARTS_SAID} {READING.format(baseline=f'{PLAIN} + class_region')} All of the "
    text += "networks of a seed were trained on the same patients, for as many steps."
    return Section("Do I need to retrain?", "\n\n".join([text, *blocks]), data)


Found = dict[tuple[Entry, str], Difference]


def compared(tables: Tables, resamples: int) -> Found:
    """Differences between every entry and the first, by entry and metric."""
    if len(tables) < 2:
        return {}
    named = {"\t".join(key): rows for key, rows in tables.items()}
    differences = compare(named, resamples=resamples)
    keys = dict(zip(named, tables, strict=True))
    return {(keys[one.method], one.metric): one for one in differences}


def records(name: str, tables: Tables, found: Found, seeds: list[int]) -> list[dict[str, Any]]:
    """Means and differences from the first entry, ready for JSON."""
    rows = []
    for key, table in tables.items():
        for metric in table:
            one = found.get((key, str(metric)))
            values = table[metric].dropna()
            if len(values):
                rows.append({
                    "set": name, "recipe": key[0], "method": key[1], "decision": key[2],
                    "metric": metric, "patients": len(values), "seeds": seeds,
                    "mean": float(values.mean()), "difference": one and one.mean,
                    "ci95": one and one.ci95, "baseline": one and one.baseline.split("\t"),
                })  # fmt: skip
    return rows


def values_table(
    tables: Tables, found: Found, metrics: Sequence[str], labels: Mapping[Entry, str], head: str
) -> str:
    """Means, with a mark where they differ from the first row."""
    lines = [_head([head, *(METRIC_NAMES[m] for m in metrics)])]
    for key, table in tables.items():
        cells = [_value(table, m) + _mark(found.get((key, m))) for m in metrics]
        lines.append(f"| {labels[key]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences_table(
    tables: Tables, found: Found, metrics: Sequence[str], labels: Mapping[Entry, str], head: str
) -> str:
    """Differences from the first row, with intervals."""
    lines = [_head([head, *(f"Δ {METRIC_NAMES[m]}" for m in metrics)])]
    for key in list(tables)[1:]:
        cells = [_difference(found.get((key, m))) for m in metrics]
        lines.append(f"| {labels[key]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def values_and_differences(
    tables: Tables, found: Found, metrics: Sequence[str], labels: Mapping[Entry, str], head: str
) -> str:
    """Means, and beside them the differences from the first row."""
    names = [text for m in metrics for text in (METRIC_NAMES[m], "Δ (95 %)")]
    lines = [_head([head, *names])]
    for key, table in tables.items():
        cells = [
            text for m in metrics
            for text in (_value(table, m) + _mark(found.get((key, m))),
                         _difference(found.get((key, m))))
        ]  # fmt: skip
        lines.append(f"| {labels[key]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _head(names: Sequence[str]) -> str:
    return f"| {' | '.join(names)} |\n|---|{'--:|' * (len(names) - 1)}"


def _value(table: pd.DataFrame, metric: str) -> str:
    if metric not in table or table[metric].isna().all():
        return ""
    digits = _digits(metric)
    return f"{round(float(table[metric].mean()), digits) + 0.0:.{digits}f}"  # never -0.0000


def _difference(one: Difference | None) -> str:
    if one is None or one.mean is None:
        return ""
    digits = _digits(one.metric)
    if one.mean == 0 and one.ci95 in (None, (0.0, 0.0)):
        return "0"
    text = f"{one.mean:+.{digits}f}"
    if one.ci95 is not None:
        text += f" ({one.ci95[0]:+.{digits}f} to {one.ci95[1]:+.{digits}f})"
    return text


def _digits(metric: str) -> int:
    return 2 if metric.endswith("mm") else 4


def _mark(one: Difference | None) -> str:
    if one is None or one.ci95 is None:
        return ""
    return " ▼" if one.ci95[1] < 0 else " ▲" if one.ci95[0] > 0 else ""


def _spread(values: Any, form: str = ".4f") -> str:
    v = np.asarray(values, dtype=np.float64)
    return f"{v.mean():{form}} ({v.min():{form}} to {v.max():{form}})"


def _counted(tables: Tables, seeds: list[int]) -> str:
    n = len(next(iter(tables.values())))
    return f"{n} test patients, seeds {', '.join(map(str, seeds))}"


if __name__ == "__main__":
    main()
