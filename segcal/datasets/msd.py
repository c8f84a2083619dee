"""Medical Segmentation Decathlon: ten tasks, each with a ``dataset.json`` that lists its files.

Other data sets use the same kind of list, some with validation cases or labels of test cases.
A. L. Simpson et al., arXiv:1902.09063; M. Antonelli et al., Nature Communications 13:4128 (2022).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from segcal.datasets.raw import Plan, RawCase, Skipped, one_fold
from segcal.io.files import case_name, read_json
from segcal.io.label_sets import read_label_set
from segcal.io.sources import Source

__all__ = ["Task", "plan_msd", "read_task", "task_name"]

KEPT = ("name", "description", "reference", "licence", "release")
CITATION = (
    "M. Antonelli, A. Reinke, S. Bakas, K. Farahani, et al.: The Medical Segmentation Decathlon. "
    "Nature Communications 13, 4128, 2022."
)
FILE = re.compile(r"dataset(_\d+)?\.json")
"""File name of the list; MONAI's list of BTCV is ``dataset_0.json``."""
LISTS = ("training", "validation", "test")
TASK = re.compile(r"Task(\d+)_(\w+)")


@dataclass(frozen=True)
class Task:
    """Content of the ``dataset.json`` of a task.

    Attributes:
        folder: folder that holds it, as in the names of sources; empty for the outermost folder.
        labels: label value of each name, background 0.
        content: whole content of the file.
    """

    folder: str
    labels: dict[str, int]
    content: dict[str, Any]


def read_task(sources: Mapping[str, Source]) -> Task:
    """Read the ``dataset.json`` of a task.

    Raises:
        ValueError: there is none or more than one, or it is not of the Decathlon.
    """
    found = [name for name in sources if FILE.fullmatch(PurePosixPath(name).name)]
    if len(found) != 1:
        raise ValueError(
            "expected the folder of one task, TaskNN_Name, with its dataset.json; found "
            + (f"{len(found)}: {', '.join(found[:3])}" if found else "none")
        )
    with sources[found[0]].opened() as path:
        content = read_json(path)
        label_set = read_label_set(path)
    if not isinstance(content.get("training"), list) or not isinstance(
        content.get("modality"), dict
    ):
        raise ValueError(
            f"{found[0]}: expected a dataset.json of the Decathlon, with 'modality' and a list "
            "'training'"
        )
    values = sorted(label_set.names)
    if label_set.regions or values != list(range(len(values))):
        raise ValueError(
            f"{found[0]}: nnU-Net needs labels 0, 1, 2, ... without gaps, got {values}"
        )
    if sorted(content["modality"]) != sorted(str(c) for c in range(len(content["modality"]))):
        raise ValueError(
            f"{found[0]}: 'modality' must number the channels 0, 1, ..., got "
            f"{sorted(content['modality'])}"
        )
    names = {**label_set.names, 0: "background"}
    return Task(posixpath.dirname(found[0]), {names[k]: k for k in values}, content)


def task_name(task: Task, root: str) -> tuple[int | None, str]:
    """Number and name of a task: from its folder ``TaskNN_Name``, else the name in its list.

    Args:
        task: result of :func:`read_task`.
        root: name of the outermost folder, or archive.
    """
    match = TASK.match(posixpath.basename(task.folder) or root)
    if match:
        return int(match[1]), match[2]
    return None, re.sub(r"\W", "", str(task.content.get("name", ""))) or "Decathlon"


def plan_msd(names: Collection[str], task: Task) -> Plan:
    """Plan which file becomes which case.

    Cases in the list ``validation`` become training cases, which the only fold holds out; without a
    label they become test cases.

    Args:
        names: names of all files.
        task: result of :func:`read_task`.
    """
    cases: list[RawCase] = []
    skipped: list[Skipped] = []
    validation: set[str] = set()
    used: set[str] = set()
    for listed, entry in _entries(task.content):
        parts = entry if isinstance(entry, dict) else {"image": entry}
        optional = listed == "test" or (listed == "validation" and "label" not in parts)
        files = {
            kind: _place(task.folder, parts.get(kind, f"its {kind}"))
            for kind in ("image", "label")
            if kind in parts or not optional
        }
        used |= set(files.values())
        name = case_name(PurePosixPath(files["image"]))
        needed = [file for kind, file in files.items() if kind == "image" or not optional]
        missing = [file for file in needed if file not in names]
        if name is None:
            skipped.append(Skipped(str(entry), "dataset.json lists it, but it is not a volume"))
        elif missing:
            gone = " and ".join(missing)
            skipped.append(Skipped(name, f"dataset.json lists it, but {gone} is missing"))
        elif name in {case.name for case in cases}:
            skipped.append(Skipped(name, "dataset.json lists it twice; the first entry is used"))
        else:
            label = files.get("label")
            there = label if label in names else None
            cases.append(RawCase(name, "Ts" if optional else "Tr", (files["image"],), there))
            validation |= {name} if listed == "validation" else set()
    dataset = {
        **{key: task.content[key] for key in KEPT if key in task.content},
        "citation": CITATION,
        "channel_names": dict(sorted(task.content["modality"].items(), key=lambda i: int(i[0]))),
        "labels": task.labels,
        "file_ending": ".nii.gz",
    }
    counts = _left_out(names, task, cases, used)
    splits = one_fold(cases, validation)
    return Plan("msd", tuple(cases), dataset, tuple(skipped), counts, splits)


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries of the known lists, each with the name of its list."""
    for listed in LISTS:
        yield from ((listed, entry) for entry in content.get(listed) or [])


def _left_out(
    names: Collection[str], task: Task, cases: Collection[RawCase], used: Collection[str]
) -> dict[str, int]:
    """Numbers of files and entries that become no case, by kind."""
    unlisted = [name for name in names if name not in used and case_name(PurePosixPath(name))]
    counts = {
        "test cases without a label": sum(case.label is None for case in cases),
        "volumes that dataset.json does not list, left out": len(unlisted),
    }
    for key, value in task.content.items():
        if key not in LISTS and isinstance(value, list):
            counts[f"entries in the list {key!r} of dataset.json, left out"] = len(value)
    return {what: number for what, number in counts.items() if number}


def _place(folder: str, listed: Any) -> str:
    """Name among the sources of a file in the list, e.g. ``./imagesTr/a.nii.gz``."""
    return posixpath.normpath(posixpath.join(folder, str(listed)))
