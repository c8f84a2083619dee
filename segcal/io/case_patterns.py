"""Finds the name of a case in the paths of its files, by a given pattern or by guessing."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path, PurePath

from segcal.io.files import case_name, ending_of, is_array, legible

CASE, RATER = "{case}", "{rater}"
LISTED = 2000
"""Most files below a folder that are looked at to suggest a pattern."""
_WORD = (
    "(?:images?|img|scan|vol(?:ume)?|labels?|lbl|seg(?:mentations?)?|pred(?:ict(?:ions?|ed))?|"
    "masks?|gt|(?:ground)?truth|manual|ref(?:erence)?|trans|out(?:put)?|result|"
    "prob(?:s|abilities)?|softmax|sigmoid)"
)
"""Words that people put before or after the name of a case."""
_BEFORE = re.compile(rf"(?:{_WORD}(?:[-_. ]+|(?=\d)))*", re.IGNORECASE)
_BEHIND = re.compile(rf"(?:(?:[-_. ]+|(?<=\d)){_WORD})*$", re.IGNORECASE)


@dataclass(frozen=True)
class Patterns:
    """Where the name of a case stands in the paths of its files, relative to their folder.

    ``{case}`` stands for the name and ``*`` for anything but a slash, e.g.
    ``{case}/{case}_seg.nii.gz``. A pattern without an ending, such as ``label{case}``, finds files
    of every format, and folders. None uses the names of the files. If several raters drew the
    references, ``{rater}`` stands for the rater: ``{case}/annotation_{rater}.nii.gz``.

    Attributes:
        prediction: pattern of the predictions.
        reference: pattern of the references.

    Raises:
        ValueError: a pattern lacks ``{case}`` or leaves the folder.
    """

    prediction: str | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        for name, pattern in (("prediction", self.prediction), ("reference", self.reference)):
            if pattern is None:
                continue
            rest = pattern.replace(CASE, "")
            rest = rest.replace(RATER, "") if name == "reference" else rest
            inside = not pattern.startswith("/") and ".." not in pattern.split("/")
            if CASE not in pattern or not inside or "{" in rest or "}" in rest:
                raise ValueError(
                    f"{name}_pattern: expected a path in the folder with {CASE} for the name of "
                    f"the case, e.g. {CASE}/{CASE}_seg.nii.gz, got {pattern!r}"
                )


def find_cases(folder: Path, pattern: str) -> list[tuple[str, Path]]:
    """Name and path of every volume, array, or folder of volumes that matches a pattern.

    Args:
        folder: folder that the pattern is relative to.
        pattern: see :class:`Patterns`.
    """
    return [(legible(match["case"], path), path) for match, path in _matches(folder, pattern)]


def find_several(folder: Path, pattern: str) -> dict[str, dict[str, Path]]:
    """Volumes of every case by rater, or by sample; cases and raters are sorted by name.

    Args:
        folder: folder that the pattern is relative to.
        pattern: pattern with ``{rater}``, see :class:`Patterns`.

    Raises:
        ValueError: two files belong to the same case and rater.
    """
    found: dict[str, dict[str, Path]] = {}
    for match, path in _matches(folder, pattern):
        if path.is_dir() or is_array(path):
            continue
        of_case = found.setdefault(legible(match["case"], path), {})
        if match["rater"] in of_case:
            raise ValueError(
                f"{of_case[match['rater']]} and {path.name} are one case and rater twice: "
                f"{match['case']}, {match['rater']}"
            )
        of_case[match["rater"]] = path
    return {name: dict(sorted(of.items(), key=_in_order)) for name, of in sorted(found.items())}


def _in_order(item: tuple[str, Path]) -> tuple[int, str]:
    return (len(item[0]), item[0])  # 2 before 10


def _matches(folder: Path, pattern: str) -> list[tuple[re.Match[str], Path]]:
    expression = _expression(pattern)
    whole = bool(ending_of(pattern))
    wildcard = "".join(
        "*" if part in (CASE, RATER, "*") else glob.escape(part) for part in _parts(pattern)
    )
    found = []
    wildcard = re.sub(r"\*+", "*", wildcard if whole else f"{wildcard}*")
    for path in sorted(folder.glob(wildcard)):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            if whole or not any(case_name(one) for one in path.iterdir()):
                continue
        elif case_name(path) is None:
            continue
        elif not whole:
            name = name.removesuffix(ending_of(name))
        if match := expression.fullmatch(name):
            found.append((match, path))
    return found


def guess_affixes(
    found: Mapping[str, Path], wanted: Mapping[str, Path]
) -> tuple[dict[str, Path], dict[str, Path], Patterns] | None:
    """Rename predictions and references without the usual words around their names.

    ``img0035`` and ``label0035`` become case 0035, and ``a.seg`` and ``a`` become case a.

    Args:
        found: predictions by name.
        wanted: references by name.

    Returns:
        predictions and references by their new names (names without these words stay as they
        are), and the patterns that fit the old names; None if no name is common even then.
    """
    renamed, around = [], []
    for side in (found, wanted):
        affixes = Counter(map(_affixes, side))
        if not affixes:
            return None
        before, behind = affixes.most_common(1)[0][0]
        end = len(behind)
        renamed.append(
            {
                name[len(before) : len(name) - end]
                if _affixes(name) == (before, behind)
                else name: path
                for name, path in side.items()
            }
        )
        around.append(f"{before}{CASE}{behind}")
    if not renamed[0].keys() & renamed[1].keys():
        return None
    return renamed[0], renamed[1], Patterns(*around)


def suggest_patterns(predictions: Path, references: Path) -> Patterns | None:
    """Patterns that would pair the most files of two folders, by the text that paths share."""
    given, wanted = _stems(predictions), _stems(references)
    best: tuple[int, int, Patterns | None] = (0, 0, None)
    for reference in wanted[:3]:
        for prediction in given[:300]:
            core = _common(prediction, reference)
            if not core:
                continue
            pair = Patterns(prediction.replace(core, CASE), reference.replace(core, CASE))
            count = len(_names(given, str(pair.prediction)) & _names(wanted, str(pair.reference)))
            best = max(best, (count, len(core), pair), key=lambda one: one[:2])
    return best[2]


def first_names(folder: Path) -> str:
    """Three paths of volumes below a folder, in words."""
    names = _stems(folder)
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else "empty"


def _parts(pattern: str) -> list[str]:
    return re.split(r"(\{case\}|\{rater\}|\*)", pattern)


def _expression(pattern: str) -> re.Pattern[str]:
    text, seen = "", set()
    for part in _parts(pattern):
        if part in (CASE, RATER):
            group = part[1:-1]
            text += f"(?P={group})" if part in seen else f"(?P<{group}>[^/]+)"
            seen.add(part)
        else:
            text += "[^/]*" if part == "*" else re.escape(part)
    return re.compile(text)


def _affixes(name: str) -> tuple[str, str]:
    """The usual words before and after the name of a case; empty if nothing else would be left."""
    before, behind = _BEFORE.match(name), _BEHIND.search(name)
    start = 0 if before is None else before.end()
    end = len(name) if behind is None else behind.start()
    return (name[:start], name[end:]) if start < end else ("", "")


def _stems(folder: Path) -> list[str]:
    """Paths of volumes and arrays below a folder without their endings, in order."""
    paths: Iterable[PurePath] = (p for p in folder.rglob("*") if case_name(p) and p.is_file())
    names = [path.relative_to(folder).as_posix() for path in islice(paths, LISTED)]
    return sorted({name.removesuffix(ending_of(name)) for name in names})


def _common(one: str, other: str) -> str:
    """Longest text that both contain, which splits neither a number nor a folder; may be empty."""
    best = ""
    for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
        text = one[block.a : block.a + block.size]
        for side, start in ((one, block.a), (other, block.b)):
            end = start + block.size
            if start and side[start - 1].isdigit():
                text = text.lstrip("0123456789")
            if end < len(side) and side[end].isdigit():
                text = text.rstrip("0123456789")
        pieces = [piece.strip("-_. ") for piece in text.split("/")]
        best = max([best, *(piece for piece in pieces if any(map(str.isalnum, piece)))], key=len)
    return best


def _names(stems: Iterable[str], pattern: str) -> set[str]:
    matches = map(_expression(pattern).fullmatch, stems)
    return {match["case"] for match in matches if match}
