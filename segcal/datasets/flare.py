"""FLARE (MICCAI 2021 and 2022): abdominal CT with 4 or 13 organs.

J. Ma et al., Medical Image Analysis 82:102616 (2022) and The Lancet Digital Health 6(11), 2024. An
image is ``CASE_0000.nii.gz``, its label map ``CASE.nii.gz`` in another folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from segcal.datasets.raw import Plan, RawCase, Skipped
from segcal.io.files import case_name

__all__ = ["find_release", "plan_flare"]

ORGANS = {
    "21": ("liver", "kidney", "spleen", "pancreas"),
    "22": (
        "liver", "right kidney", "spleen", "pancreas", "aorta", "inferior vena cava",
        "right adrenal gland", "left adrenal gland", "gallbladder", "esophagus", "stomach",
        "duodenum", "left kidney",
    ),
}  # fmt: skip
"""Names of the labels 1, 2, ... by release."""
DATASET_ID = {"21": 21, "22": 22}
NAME = {"21": "FLARE21", "22": "FLARE22"}
CITATION = {
    "21": "J. Ma, Y. Zhang, S. Gu, X. An, et al.: Fast and low-GPU-memory abdomen CT organ "
    "segmentation: the FLARE challenge. Medical Image Analysis 82, 102616, 2022.",
    "22": "J. Ma, Y. Zhang, S. Gu, C. Ge, et al.: Unleashing the strengths of unlabelled data in "
    "deep learning-assisted pan-cancer abdominal organ quantification: the FLARE22 challenge. "
    "The Lancet Digital Health 6(11), e815-e826, 2024.",
}
REFERENCE = {
    "21": "https://flare.grand-challenge.org/",
    "22": "https://flare22.grand-challenge.org/",
}
NAMED_BY = {
    "21": re.compile(r"flare_?(20)?21|(^|/)train_\d+", re.I),
    "22": re.compile(r"flare_?(20)?22", re.I),
}
CHANNEL = "_0000"
IMAGE_FOLDER = re.compile(r"(?:.*_)?(?:images?|imgs?)|\w*Img", re.I)
HELD_OUT = re.compile(
    r"(val(idation)?|test(ing)?|flarets)(images?|imgs?|labels?|masks?|cases?|set|data)?(?![a-z])",
    re.IGNORECASE,
)
"""How the name of a folder or file begins if it belongs to the test set."""


def find_release(names: Iterable[str]) -> str:
    """Release of FLARE, from the names of the files.

    Raises:
        ValueError: the names point to no release, or to both.
    """
    names = list(names)
    told = [key for key, pattern in NAMED_BY.items() if any(map(pattern.search, names))]
    if len(told) != 1:
        raise ValueError(
            "release: the names of the files do not tell which FLARE this is; expected 21 (liver, "
            "kidney, spleen, pancreas) or 22 (13 organs)"
        )
    return told[0]


def plan_flare(names: Iterable[str], release: str) -> Plan:
    """Plan which file becomes which case.

    Labelled cases become training cases, or test cases if their folder or name says validation or
    test. Images without labels are left out, and counted.

    Args:
        names: names of all files.
        release: 21 or 22.

    Raises:
        ValueError: the release is unknown, or there is no labelled case.
    """
    if release not in ORGANS:
        raise ValueError(f"release: expected {' or '.join(ORGANS)}, got {release!r}")
    images, labels = _by_case(names)
    if not set(images) & set(labels):
        raise ValueError(
            f"expected labelled cases (CASE_0000.nii.gz and, in a folder of its own, CASE.nii.gz), "
            f"found none among {len(images)} images and {len(labels)} label maps"
        )
    cases: list[RawCase] = []
    skipped: list[Skipped] = []
    for name in sorted(labels):
        both = [*images.get(name, []), *labels[name]]
        if name not in images:
            skipped.append(Skipped(name, f"there is no image for {labels[name][0]}"))
        elif len(both) > 2:
            skipped.append(Skipped(name, f"occurs twice: {' and '.join(both)}"))
        else:
            subset = "Ts" if _held_out(both[1]) else "Tr"
            cases.append(RawCase(name, subset, (both[0],), both[1]))
    unlabelled = len(images.keys() - labels.keys())
    counts = {"images without labels, left out": unlabelled} if unlabelled else {}
    return Plan(
        "flare", tuple(cases), _dataset(release), tuple(skipped), counts, (), {"release": release}
    )


def _dataset(release: str) -> dict[str, Any]:
    labels = {"background": 0, **{name: k for k, name in enumerate(ORGANS[release], 1)}}
    return {
        "name": NAME[release],
        "description": f"Abdominal CT with {len(ORGANS[release])} organs",
        "reference": REFERENCE[release],
        "citation": CITATION[release],
        "channel_names": {"0": "CT"},
        "labels": labels,
        "file_ending": ".nii.gz",
    }


def _by_case(names: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Images and label maps by case."""
    images: dict[str, list[str]] = {}
    labels: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        case = case_name(path) if name.endswith((".nii", ".nii.gz")) else None
        if case is None:
            continue
        if case.endswith(CHANNEL) or IMAGE_FOLDER.fullmatch(path.parent.name):
            images.setdefault(case.removesuffix(CHANNEL), []).append(name)
        else:
            labels.setdefault(case, []).append(name)
    return images, labels


def _held_out(name: str) -> bool:
    return any(HELD_OUT.match(part) for part in PurePosixPath(name).parts)
