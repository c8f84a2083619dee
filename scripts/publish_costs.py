"""Write what the losses cost into a page, from the numbers of scripts/bench_losses.py.

    python scripts/bench_losses.py --json data/results/bench_losses.json
    python scripts/publish_costs.py

The table stands between the marks ``<!-- losses -->`` and ``<!-- /losses -->`` of docs/costs.md.
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


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table as Markdown; memory is that of the first shape."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results = ROOT / "data" / "results" / "bench_losses.json"
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "costs.md")
    options = parser.parse_args()
    text = options.page.read_text(encoding="utf-8")
    marks = re.compile(r"(<!-- losses -->\n).*?(<!-- /losses -->)", re.DOTALL)
    new = table(read_json(options.results))
    write_text(options.page, marks.sub(lambda m: f"{m[1]}\n{new}\n\n{m[2]}", text))


if __name__ == "__main__":
    main()
