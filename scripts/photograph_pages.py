"""Photograph the pages that segcal writes, for the documentation, from generated data.

    python scripts/photograph_pages.py            # into docs/assets; some minutes
    CHROMIUM=/usr/bin/chromium python scripts/photograph_pages.py -o FOLDER --only evaluation

Needs Chromium, on the path or named by ``CHROMIUM``. The trainings of the study are far too short
to compare methods: the picture only shows the content of a page.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
SIZE = (1200, 1000)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=ASSETS)
    parser.add_argument("--only", choices=PAGES, nargs="+", default=list(PAGES))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    chromium = browser()
    with tempfile.TemporaryDirectory() as work:
        for name in options.only:
            page = PAGES[name](Path(work))
            path = options.output / f"page_{name}.webp"
            photograph(chromium, page, path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def browser() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit("no Chromium on the path; set CHROMIUM=FILE")
    return found


def photograph(chromium: str, page: Path, path: Path) -> None:
    """Write a picture of the top of a page in a window."""
    shot = page.parent / "shot.png"
    subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={shot}", page.resolve().as_uri(),
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    with Image.open(shot) as image:
        image.convert("RGB").save(path, quality=80, method=6)


def segcal(*arguments: object) -> None:
    command = [sys.executable, "-m", "segcal", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def phantom(work: Path) -> Path:
    """Generated hearts with their true posterior."""
    folder = work / "phantom"
    if not folder.exists():
        segcal("phantom", folder, "--train", 1, "--test", 12)
    return folder


def evaluation(work: Path) -> Path:
    data, report = phantom(work), work / "evaluation"
    segcal(
        "evaluate", data / "posteriorTs", data / "labelsTs", "-o", report,
        "--images", data / "imagesTs",
    )  # fmt: skip
    return report / "index.html"


def triage(work: Path) -> Path:
    data = phantom(work)
    segcal("trust", data / "posteriorTs", "-o", work / "triage", "--images", data / "imagesTs")
    return work / "triage" / "index.html"


def study(work: Path) -> Path:
    settings = (
        "recipes=[dice_ce,confidence,svls,crac]", "seeds=[0,1]", "sets.phantom_small.epochs=6",
        f"output={work / 'study'}",
    )  # fmt: skip
    segcal("study", "phantom_small", *(x for setting in settings for x in ("--set", setting)))
    return work / "study" / "report" / "index.html"


PAGES: dict[str, Callable[[Path], Path]] = {
    "evaluation": evaluation,
    "triage": triage,
    "study": study,
}


if __name__ == "__main__":
    main()
