"""ACDC (MICCAI 2017): cine MRI of the heart, end-diastole and end-systole of every patient.

O. Bernard et al., IEEE Transactions on Medical Imaging 37(11), 2018. The affine of all files says
1 mm. The voxel size in the header is right, and the written files have it in both places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from segcal.datasets.raw import Plan, RawCase, Skipped, deal
from segcal.io.sources import Source

__all__ = ["Info", "parse_info", "plan_acdc", "read_infos"]

DATASET_ID = 27
NAME = "ACDC"
DATASET = {
    "name": NAME,
    "description": "Short-axis cine MRI of the heart at end-diastole and end-systole",
    "reference": "https://www.creatis.insa-lyon.fr/Challenge/acdc/",
    "licence": "CC BY-NC-SA 4.0",
    "citation": "O. Bernard, A. Lalande, C. Zotti, F. Cervenansky, et al.: Deep learning "
    "techniques for automatic MRI cardiac multi-structures segmentation and diagnosis: is the "
    "problem solved? IEEE Transactions on Medical Imaging 37(11), 2514-2525, 2018. "
    "doi:10.1109/TMI.2018.2837502",
    "channel_names": {"0": "cineMRI"},
    "labels": {"background": 0, "RV": 1, "MLV": 2, "LVC": 3},
    "file_ending": ".nii.gz",
}
FOLDS = 5
TENTHS = 10
"""Number of parts, since the papers split patients 70 : 10 : 20."""
UNKNOWN = "unknown"
FRAME = re.compile(
    r"(?:.*/)?(training|testing)/(?:.*/)?(patient\d+)_frame(\d+)(_gt)?\.nii(?:\.gz)?"
)
INFO = re.compile(r"(?:.*/)?(training|testing)/(?:.*/)?(patient\d+)/Info\.cfg")


@dataclass(frozen=True)
class Info:
    """Content of ``Info.cfg`` on a patient.

    Attributes:
        frames: numbers of the frames at end-diastole and end-systole, as far as stated.
        group: DCM, HCM, MINF, NOR or RV; ``unknown`` if not stated.
    """

    frames: tuple[int, ...]
    group: str


def read_infos(sources: Mapping[str, Source]) -> dict[str, Info]:
    """Content of every ``Info.cfg``, by patient."""
    infos = {}
    for name, source in sources.items():
        if match := INFO.fullmatch(name):
            with source.opened() as path:
                infos[match[2]] = parse_info(path.read_text(encoding="utf-8", errors="replace"))
    return infos


def parse_info(text: str) -> Info:
    """Frames and group from the lines ``key: value`` of an ``Info.cfg``."""
    values = {
        key.strip(): value.strip()
        for key, colon, value in (line.partition(":") for line in text.splitlines())
        if colon
    }
    stated = [values.get(key, "") for key in ("ED", "ES")]
    frames = tuple(int(number) for number in stated if number.isdecimal())
    return Info(frames, values.get("Group") or UNKNOWN)


def plan_acdc(
    names: Iterable[str], infos: Mapping[str, Info], *, split: str = "nnunet", seed: int = 0
) -> Plan:
    """Plan which file becomes which case.

    Args:
        names: names of all files.
        infos: content of ``Info.cfg`` by patient.
        split: ``nnunet`` uses all patients in ``training`` for training, in 5 folds, and those in
            ``testing`` for testing. ``paper`` splits the patients in ``training`` 70 : 10 : 20 into
            training, validation (one fold) and test, and leaves ``testing`` out. Both are
            stratified by group.
        seed: random seed of the split.

    Raises:
        ValueError: the files are not ACDC's, the split is unknown, or there are too few patients.
    """
    if split not in ("nnunet", "paper"):
        raise ValueError(f"split: expected nnunet or paper, got {split!r}")
    subsets, files = _files(names)
    training = sorted(patient for patient, subset in subsets.items() if subset == "training")
    groups = {p: infos[p].group if p in infos else UNKNOWN for p in training}
    counts: dict[str, int] = {}
    if split == "paper":
        if len(training) < TENTHS:
            raise ValueError(
                f"split paper: expected at least {TENTHS} patients in training, got {len(training)}"
            )
        tenths = deal(groups, TENTHS, seed)
        validation, test = [tenths[7]], {*tenths[8], *tenths[9]}
        if testing := len(subsets) - len(training):
            counts["patients in testing, which the split of the papers leaves out"] = testing
    else:
        validation = deal(groups, min(FOLDS, len(training)), seed) if len(training) > 1 else []
        test = set(subsets) - set(training)
    cases: list[RawCase] = []
    skipped: list[Skipped] = []
    for patient in sorted({*training, *test}):
        found = _patient(
            patient, files[patient], infos.get(patient), "Ts" if patient in test else "Tr"
        )
        cases += [one for one in found if isinstance(one, RawCase)]
        skipped += [one for one in found if isinstance(one, Skipped)]
    if unlabelled := sum(case.label is None for case in cases):
        counts["test cases without a label"] = unlabelled
    of = {case.name: case.name.split("_")[0] for case in cases if case.subset == "Tr"}
    splits = tuple(
        {
            "train": [name for name, patient in of.items() if patient not in fold],
            "val": [name for name, patient in of.items() if patient in fold],
        }
        for fold in validation
    )
    settings = {"split": split, "seed": seed}
    return Plan("acdc", tuple(cases), DATASET, tuple(skipped), counts, splits, settings)


def _files(
    names: Iterable[str],
) -> tuple[dict[str, str], dict[str, dict[tuple[int, bool], list[str]]]]:
    """Folder of each patient, and its files by frame and whether they are labels."""
    subsets: dict[str, str] = {}
    files: dict[str, dict[tuple[int, bool], list[str]]] = {}
    for name in sorted(names):
        match = FRAME.fullmatch(name)
        if match is None:
            continue
        subset, patient, frame, label = match.groups()
        if subsets.setdefault(patient, subset) != subset:
            raise ValueError(f"{patient}: expected in training or testing, found in both")
        files.setdefault(patient, {}).setdefault((int(frame), bool(label)), []).append(name)
    if "training" not in subsets.values():
        raise ValueError(
            "expected ACDC's training/patient001/patient001_frame01.nii.gz, found no such file"
        )
    return subsets, files


def _patient(
    patient: str, files: Mapping[tuple[int, bool], list[str]], info: Info | None, subset: str
) -> list[RawCase | Skipped]:
    """The cases of a patient, or the reason why they are left out."""
    there = sorted({frame for frame, _ in files})
    frames = info.frames if info else ()
    if len(frames) != 2:
        if len(there) != 2:
            reason = f"no Info.cfg says which of the frames {there} are end-diastole and -systole"
            return [Skipped(patient, reason)]
        frames = (there[0], there[1])
    found: list[RawCase | Skipped] = []
    for frame in sorted(set(frames)):
        name = f"{patient}_frame{frame:02d}"
        images, labels = files.get((frame, False), []), files.get((frame, True), [])
        if twice := next((kind for kind in (images, labels) if len(kind) > 1), None):
            found.append(Skipped(name, f"occurs twice: {' and '.join(twice)}"))
        elif not images:
            found.append(Skipped(name, f"it has no image; there are frames {there}"))
        elif not labels and subset == "Tr":
            found.append(Skipped(name, "it has no label map (_gt)"))
        else:
            found.append(RawCase(name, subset, (images[0],), labels[0] if labels else None))
    return found
