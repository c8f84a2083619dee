"""AMOS22 and BTCV: abdominal organs in CT (AMOS22 also in MRI), with validation sets.

Y. Ji et al., AMOS, NeurIPS 2022 (arXiv:2206.08023): folders ``imagesTr``, ``labelsTr``,
``imagesVa`` and so on. B. Landman et al., MICCAI 2015 Multi-Atlas Labeling Beyond the Cranial
Vault: ``img0001.nii.gz`` and ``label0001.nii.gz``, in two folders of any name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from segcal.datasets.raw import Plan, RawCase, Skipped, one_fold

__all__ = ["plan_amos", "plan_btcv"]

AMOS_FOLDER = {"1": (218, "AMOS22CT"), "2": (219, "AMOS22")}
"""Number, as in nnU-Net's own converters, and name of each task's data set."""
BTCV_FOLDER = (17, "BTCV")
LAST_CT = 500
"""Highest number of a CT scan in AMOS; higher numbers are MRI."""
BTCV_VALIDATION = {f"img{n:04d}" for n in range(35, 41)}
"""Cases that MONAI's ``dataset_0.json`` holds out, which Swin UNETR and its tutorials use."""
AMOS_FILE = re.compile(r"(?:.*/)?(images|labels)(Tr|Va|Ts)/(amos_(\d+))\.nii(?:\.gz)?")
BTCV_FILE = re.compile(r"(?:.*/)?(img|label)(\d{4})\.nii(?:\.gz)?")
Files = dict[str, dict[str, list[str]]]
"""Names of files by case, and then by ``image`` or ``label``."""

ORGANS = (
    "spleen", "right kidney", "left kidney", "gallbladder", "esophagus", "liver", "stomach", "aorta"
)  # fmt: skip
"""Labels 1 to 8 of both data sets."""
AMOS: dict[str, Any] = {
    "description": "Abdominal CT and MRI with 15 organs",
    "reference": "https://amos22.grand-challenge.org/",
    "citation": "Y. Ji, H. Bai, C. Ge, J. Yang, et al.: AMOS: A large-scale abdominal multi-organ "
    "benchmark for versatile medical image segmentation. NeurIPS Datasets and Benchmarks, 2022.",
    "labels": (
        *ORGANS, "postcava", "pancreas", "right adrenal gland", "left adrenal gland", "duodenum",
        "bladder", "prostate or uterus",
    ),
}  # fmt: skip
BTCV: dict[str, Any] = {
    "description": "Abdominal CT with 13 organs",
    "reference": "https://www.synapse.org/Synapse:syn3193805",
    "citation": "B. Landman, Z. Xu, J. E. Iglesias, M. Styner, et al.: MICCAI Multi-Atlas Labeling "
    "Beyond the Cranial Vault, workshop and challenge, 2015.",
    "labels": (
        *ORGANS, "inferior vena cava", "portal and splenic veins", "pancreas",
        "right adrenal gland", "left adrenal gland",
    ),
}  # fmt: skip


def plan_amos(names: Iterable[str], task: str = "1") -> Plan:
    """Plan which file of AMOS22 becomes which case.

    Args:
        names: names of all files.
        task: ``1`` for the CT scans, ``2`` for CT and MRI.

    Raises:
        ValueError: the task is unknown, or there is no labelled case.
    """
    if task not in AMOS_FOLDER:
        raise ValueError(f"task: expected {' or '.join(AMOS_FOLDER)}, got {task!r}")
    files: Files = {}
    subsets: dict[str, str] = {}
    left_out = set()
    for name in sorted(names):
        if match := AMOS_FILE.fullmatch(name):
            kind, subset, case, number = match.groups()
            if task == "1" and int(number) > LAST_CT:
                left_out.add(case)
                continue
            subsets.setdefault(case, subset)
            files.setdefault(case, {}).setdefault(kind[:-1], []).append(name)
    counts = {"MRI scans, which are not part of task 1": len(left_out)} if left_out else {}
    channel = "CT" if task == "1" else "CT or MRI"  # nnU-Net normalises what is called CT as CT
    dataset = _dataset(AMOS, AMOS_FOLDER[task][1], channel)
    found = "imagesTr/amos_0001.nii.gz and labelsTr/amos_0001.nii.gz"
    return _plan("amos", files, subsets, dataset, counts, found, {"task": task})


def plan_btcv(names: Iterable[str]) -> Plan:
    """Plan which file of BTCV becomes which case; cases without labels become test cases.

    Args:
        names: names of all files.

    Raises:
        ValueError: there is no labelled case.
    """
    files: Files = {}
    for name in sorted(names):
        if match := BTCV_FILE.fullmatch(name):
            kind = "image" if match[1] == "img" else "label"
            files.setdefault(f"img{match[2]}", {}).setdefault(kind, []).append(name)
    subsets = {
        case: "Va" if case in BTCV_VALIDATION else "Tr" if "label" in of else "Ts"
        for case, of in files.items()
    }
    dataset = _dataset(BTCV, BTCV_FOLDER[1], "CT")
    return _plan("btcv", files, subsets, dataset, {}, "img0001.nii.gz and label0001.nii.gz", {})


def _dataset(about: Mapping[str, Any], name: str, channel: str) -> dict[str, Any]:
    labels = {"background": 0, **{organ: k for k, organ in enumerate(about["labels"], 1)}}
    return {
        **about, "name": name, "channel_names": {"0": channel}, "labels": labels,
        "file_ending": ".nii.gz",
    }  # fmt: skip


def _plan(
    converter: str,
    files: Files,
    subsets: Mapping[str, str],
    dataset: Mapping[str, Any],
    counts: dict[str, int],
    expected: str,
    settings: Mapping[str, Any],
) -> Plan:
    """A plan of training, validation (``Va``) and test cases."""
    cases: list[RawCase] = []
    skipped: list[Skipped] = []
    for name, of in sorted(files.items()):
        images, labels = of.get("image", []), of.get("label", [])
        held_out = subsets[name] == "Ts"
        if len(images) > 1 or len(labels) > 1:
            skipped.append(Skipped(name, f"occurs twice: {' and '.join([*images, *labels])}"))
        elif not images:
            skipped.append(Skipped(name, f"there is no image for {labels[0]}"))
        elif not labels and not held_out:
            skipped.append(Skipped(name, f"there is no label map for {images[0]}"))
        else:
            label = labels[0] if labels else None
            cases.append(RawCase(name, "Ts" if held_out else "Tr", (images[0],), label))
    if not any(case.subset == "Tr" for case in cases):
        raise ValueError(f"expected {expected}, found no such pair")
    if unlabelled := sum(case.label is None for case in cases):
        counts["test cases without a label"] = unlabelled
    splits = one_fold(cases, [name for name, subset in subsets.items() if subset == "Va"])
    return Plan(converter, tuple(cases), dataset, tuple(skipped), counts, splits, settings)
