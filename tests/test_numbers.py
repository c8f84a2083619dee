"""Every measured number of README and docs is the one of its source."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.test_docs import PAGES, ROOT, name_of, read

NUMBERS = runpy.run_path(str(ROOT / "scripts" / "publish_numbers.py"))
SENTENCES = NUMBERS["SENTENCES"]
TABLES = {
    "docs/which-method.md": "publish_study.py page",
    "docs/which-loss.md": "publish_losses.py page",
    "docs/do-i-need-to-retrain.md": "repair_study.py page",
    "docs/costs.md": "publish_costs.py --page",
}
"""Pages with tables of results, and the command that writes them."""
BLOCK = re.compile(r"(<!-- (?P<name>[\w-]+) -->\n).*?(<!-- /(?P=name) -->)", re.S)
COUNTED = "|".join(NUMBERS["WORDS"])
MEASURED = re.compile(
    r"(?<![\w.])(?:\d*\.\d+|\d+(?= ?%)|\d+(?= (?:ms|s|MB|mm|seconds)\b))"
    rf"|\b(?:\d+|{COUNTED}) times|\u00d7|\bper cent\b",
)
"""What looks like a measured number."""
NO_PROSE = re.compile(
    r"^```.*?^```$|<!-- (?P<name>[\w-]+) -->\n.*?<!-- /(?P=name) -->|<!--.*?-->|(`+)[^`]+\2"
    r"|\]\([^)]*\)",
    re.S | re.M,
)
MEANING = {
    "says 0.8, it should be right 80 %",
    "says 0.9, it may be right only 75 %",  # an example of too much confidence
    "probability 0.0001 or 0.9999",
    "my ECE 0.003 although",
    "another program by 10 mm",
    "equals 0.5",
    "have 95 % bootstrap intervals",
    "of 95 % need 19 cases",
    "probabilities up to 0.001",
    "NLL lowered by 10 %, DSC not lower by more than .005",
}
"""Definitions, and examples that nobody measured."""
SETTINGS = {
    "Python 3.10", "3.10 to 3.13", "nnU-Net 2.8", "torch 2.14", "Apache-2.0",
    "the first 30 % of the epochs", "(0.01 instead of 0.1)", "label smoothing 0.05",
    "(ECP) with weight 0.1", "(0.2 million weights, trained",
}  # fmt: skip
"""Versions, and what was chosen before anything was measured."""
CONSTANTS = MEANING | SETTINGS


def prose(page: Path) -> str:
    """The page with blanks in place of code, tables of results and links."""
    return NO_PROSE.sub(lambda found: " " * len(found[0]), read(page))


def places(text: str, phrase: str) -> list[tuple[int, int]]:
    words = r"\s+".join(map(re.escape, phrase.split()))
    return [found.span() for found in re.finditer(words, text)]


@pytest.mark.parametrize("page", [p for p in PAGES if name_of(p) in SENTENCES], ids=name_of)
def test_sentences_have_the_numbers_of_their_sources(page):
    """Mend them by ``python scripts/publish_numbers.py``."""
    _, wrong, _ = NUMBERS["corrected"](read(page), SENTENCES[name_of(page)]())
    assert not wrong, "\n".join([name_of(page), *wrong])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_number_has_a_source(page):
    """It stands in a sentence of scripts/publish_numbers.py, or among the constants above."""
    text = read(page)
    sentences = SENTENCES.get(name_of(page), tuple)()
    _, _, spans = NUMBERS["corrected"](text, sentences)
    spans += [span for phrase in CONSTANTS for span in places(text, phrase)]
    free = [
        " ".join(text[max(0, at.start() - 50) : at.end() + 30].split())
        for at in MEASURED.finditer(prose(page))
        if not any(start <= at.start() and at.end() <= end for start, end in spans)
    ]
    assert not free, "\n".join([f"{name_of(page)}: numbers without a source", *free])


def test_constants_are_those_of_the_pages():
    every = "\n".join(map(read, PAGES))
    assert not {phrase for phrase in CONSTANTS if not places(every, phrase)}


@pytest.mark.timeout(900)  # thousands of bootstrap draws, on a loaded machine
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_their_sources(name, tmp_path, monkeypatch):
    """Mend them by the command of TABLES."""
    page = tmp_path / "page.md"
    page.write_text(BLOCK.sub(r"\1old\n\3", read(ROOT / name)), encoding="utf-8")
    script, *arguments = TABLES[name].split()
    monkeypatch.setattr("sys.argv", [script, *arguments, str(page)])
    runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert read(page) == read(ROOT / name), f"python scripts/{TABLES[name]} {name}"


def test_every_page_with_tables_of_results_is_known():
    assert {name_of(page) for page in PAGES if BLOCK.search(read(page))} == set(TABLES)


def test_a_sentence_is_found_by_its_words_and_its_numbers_are_replaced():
    text = "- On seven of\n  eight comparisons it lost\n  .006 (one seed).\n"
    sentences = ["eight of ten comparisons it lost .012 (two seeds)", "gained .5"]
    new, wrong, spans = NUMBERS["corrected"](text, sentences)
    assert new == "- On eight of\n  ten comparisons it lost\n  .012 (two seeds).\n"
    assert wrong == [
        "says: seven of eight comparisons it lost .006 (one seed)\n"
        "  should say: eight of ten comparisons it lost .012 (two seeds)",
        "has 0 places that read: gained .5",
    ]
    assert [text[slice(*span)] for span in spans] == [text[5:-2]]


@pytest.mark.parametrize(
    "text",
    ["a DSC of 0.8", "lost .004", "by 38 to 72 %", "ten times as fast", "3 ms", "3 \u00d7 5"],
)
def test_a_new_number_is_noticed(text):
    assert MEASURED.search(text)
