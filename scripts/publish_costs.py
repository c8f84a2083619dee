"""Write what losses and evaluation cost into a page, from the numbers of the benchmarks.

    python scripts/bench_losses.py --json data/results/bench_losses.json
    python scripts/bench_metrics.py --classes 5 --json data/results/bench_metrics.json
    python scripts/publish_costs.py

The tables stand between the marks ``<!-- losses -->`` and ``<!-- /losses -->``, and
``<!-- evaluation -->`` and ``<!-- /evaluation -->``, of docs/costs.md.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from segcal.io.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
SHOWN = {
    "torch CE": "torch cross-entropy",
    "MONAI NACLLoss": "MONAI `NACLLoss`",
    "CE + NACL": "CE + NACL",
    "CE + MbLS": "CE + MbLS",
    "CE + CALS": "CE + CALS",
    "CE + CRaC": "CE + CRaC",
    "CE + confidence": "CE + confidence",
    "CE + CRaC, readable": "CE + CRaC, `fused=False`",
    "nnU-Net Dice + CE": "nnU-Net's Dice + CE",
    "MONAI DiceCELoss": "MONAI `DiceCELoss`",
    "Dice + CE": "Dice + CE",
    "Dice + CE + CRaC": "Dice + CE + CRaC",
    "Dice + CE + confidence": "Dice + CE + confidence",
    "mL1-ACE, soft bins": "mL1-ACE with soft bins",
    "recipe confidence": "the whole recipe `confidence`",
}
"""Rows of the table by their names in the file."""


FAR_OFF = (
    "shifted by 12 %", "a far blob besides", "0.1 % scattered voxels", "a third of its size",
    "two rough blobs apart",
)  # fmt: skip
"""Scenes of bench_metrics in which prediction and reference lie far apart."""

NAMES_OF_MANY = {
    "MONAI": "MONAI", "surface-distance": "surface-distance",
    "seg-metrics, HD alone": "seg-metrics (without DSC and NSD)",
}  # fmt: skip
"""Packages that are compared on many labels."""


def loss_table(found: dict[str, Any]) -> str:
    """The table as Markdown; memory is that of the first shape."""
    found = found["losses"]
    lines = [
        f"| loss | {' | '.join(found)} | memory beyond CE's, in logits |",
        "|---" * (len(found) + 2) + "|",
    ]
    for name, shown in SHOWN.items():
        cells = [shown]
        for rows in found.values():
            ms, of_ce = rows[name]["fastest_ms"], rows["torch CE"]["fastest_ms"]
            cell = f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
            cells.append(cell if name == "torch CE" else f"{cell}, {ms / of_ce:.2f} x CE")
        memory = next(iter(found.values()))[name]["memory_beyond_ce"]
        cells.append(f"{memory:+.1f}" if abs(memory) >= 0.05 else "0")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def evaluation_table(found: dict[str, Any]) -> str:
    """What segcal's evaluation takes, beside others."""
    surface, case, peaks = found["surface"], found["case"], found["stream"]["peaks"]
    errors = found["calibration"]["5 classes"]
    theirs = errors["torchmetrics, ECE alone"]
    far_off = [surface[name] for name in FAR_OFF]
    rows = [
        ("what", "time", "compared"),
        ("---",) * 3,
        ("HD and HD95 of a liver", *beside_monai([surface["liver"]])),
        ("HD and HD95 of 13 organs", *beside_monai([surface["13 organs"]])),
        ("HD and HD95 of structures that were predicted far off", *beside_monai(far_off)),
        many_labels(found["many"]),
        (
            "ECE, classwise ECE and TACE of 5 classes", f"{errors['segcal']['ms'] / 1e3:.2f} s",
            f"torchmetrics takes {theirs['ms'] / 1e3:.2f} s for ECE alone, which its float32 sums "
            f"make {theirs['ECE']:.2g} instead of {errors['segcal']['ECE']:.2g}",
        ),
        (
            f"a whole case from its `.npz` of {case['mb']:.0f} MB, in four scopes",
            f"{case['x_np_load']:.1f} times what `np.load` takes to read it",
            f"{case['x_array']:.1f} times the array in memory",
        ),
        (
            "writing that `.npz`, packed by ISA-L", f"{case['packed_s']:.1f} s",
            f"NumPy takes {case['numpy_x_packed']:.0f} times as long; the file is "
            f"{case['x_size_of_numpy']:.2f} times as large as NumPy's",
        ),
        (
            f"{len(peaks)} smaller cases, one after the other",
            "",
            f"{peaks[-1] / peaks[9]:.2f} times the memory of 10 cases",
        ),
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def beside_monai(scenes: list[dict[str, Any]]) -> tuple[str, str]:
    """Least and greatest time, and how many times as long MONAI takes."""
    times, ratios = (
        sorted({f"{scene[of][key]:.0f}" for scene in scenes}, key=int)
        for of, key in (("segcal", "ms"), ("MONAI", "ratio"))
    )
    spans = [" to ".join(dict.fromkeys((found[0], found[-1]))) for found in (times, ratios)]
    return f"{spans[0]} ms", f"MONAI takes {spans[1]} times as long"


def many_labels(found: dict[str, Any]) -> tuple[str, str, str]:
    """All labels of a whole body: time, and how other packages compare on those that they did."""
    ours = found["segcal"]
    others = "; ".join(
        f"{NAMES_OF_MANY[name]} takes {of['ratio']:.0f} times as long (on {labels(of['labels'])}) "
        f"and {of['peak_mb']:,.0f} MB"
        for name, of in found.items()
        if name in NAMES_OF_MANY
    )
    return (
        f"DSC, HD, HD95 and NSD of {ours['labels']} labels of 300 x 512 x 512 voxels",
        f"{ours['s']:.1f} s, {ours['peak_mb']:.0f} MB beyond the label maps",
        others,
    )


def labels(number: int) -> str:
    return "one label" if number == 1 else f"{number} labels"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "data" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "costs.md")
    options = parser.parse_args()
    text = options.page.read_text(encoding="utf-8")
    for name, file, table in (
        ("losses", "bench_losses.json", loss_table),
        ("evaluation", "bench_metrics.json", evaluation_table),
    ):
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        new = table(read_json(options.results / file))
        text = marks.sub(lambda m, new=new: f"{m[1]}\n{new}\n\n{m[2]}", text)
    write_text(options.page, text)


if __name__ == "__main__":
    main()
