"""What README and documentation show is run, and what they name is there."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml
from typer import BadParameter
from typer.main import get_command
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.datasets.phantom import write_phantom_dataset
from segcal.io.yaml import config_root

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(<!-- not run[^\n]*-->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<!['\w/])(?:scripts|configs|tests|docs|segcal|data)/[\w./-]*\w")
PLACEHOLDER = re.compile(r"\b[A-Z]{3,}\b")
"""As in ``segcal/penalties/NAME.py``."""
DOTTED = re.compile(r"^segcal(?:\.\w+)+")

USAGE_ERROR = BadParameter.__mro__[1]
"""Whether typer brings click along or depends on it."""


class Block(NamedTuple):
    """A block of code: its language, its text, and whether a note says that it is not run."""

    language: str
    text: str
    skipped: bool


def blocks(page: Path, *languages: str) -> list[Block]:
    found = [
        Block(language, text, bool(note)) for note, language, text in BLOCK.findall(read(page))
    ]
    return [block for block in found if block.language in languages]


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def words_of(text: str) -> Iterator[list[str]]:
    """Commands of a shell block or of a line, each as its words, without variables before it."""
    text = text.replace("\\\n", " ")
    for command in re.findall(r"\$\((segcal[^)]*)\)", text):
        yield shlex.split(command)
    for line in text.splitlines():
        for command in re.split(r"&&|;(?!\w)|\|(?!\w)", line):
            words = shlex.split(command, comments=True)
            while words and ("=" in words[0] or words[0] == "export"):
                words.pop(0)
            if words:
                yield words


def commands_of(page: Path) -> Iterator[list[str]]:
    """Every command of segcal that a page shows, in its blocks and within its sentences."""
    texts = [block.text for block in blocks(page, "bash")]
    spans = SPAN.findall(BLOCK.sub("", read(page)))
    texts += [" ".join(span.split()) for span in spans if span.startswith("segcal ")]
    for words in (words for text in texts for words in words_of(text)):
        if words[0] == "segcal":
            yield words[1:]
        elif "segcal" in words and words[words.index("segcal") - 1] == "-m":
            yield words[words.index("segcal") + 1 :]


def complaint(words: list[str]) -> str:
    """What the command line says to these words, missing arguments apart; empty if nothing."""
    command: Any = get_command(app)
    context = command.context_class(command, info_name="segcal")
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] in command.commands:
            verb, words = words[0], words[1:]
        elif "report" in command.commands:  # the verb that need not be named
            verb = "report"
        else:
            return f"No such command: {words[0]}"
        command = command.commands[verb]
        context = command.context_class(
            command, info_name=verb, parent=context, **command.context_settings
        )
    words = [word for word in words if word != "..."]
    if words and takes_value(command, words[-1]):
        words.append("value")  # a sentence may name an option alone
    try:
        command.make_parser(context).parse_args(args=words)
    except USAGE_ERROR as error:
        return error.message
    return ""


def takes_value(command: Any, option: str) -> bool:
    return any(
        option in parameter.opts and not getattr(parameter, "is_flag", True)
        for parameter in command.params
    )


@pytest.fixture
def phantoms(tmp_path, monkeypatch):
    """A working folder with the data set that pages make with ``segcal phantom phantom``."""
    write_phantom_dataset(tmp_path / "phantom", train=1, test=1)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_python_runs(page, phantoms):
    namespace: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks(page, "python")):
        code = compile(block.text, f"{page.name}, block {number}", "exec")
        if not block.skipped:
            exec(code, namespace)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_of_the_readme_run(tmp_path):
    """All of its blocks after the two commands, one after the other in one shell."""
    venv = tmp_path / "venv"  # ours, as if it had just been installed
    venv.mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != ".installed":
            (venv / part.name).symlink_to(part)
    (venv / ".installed").touch()
    installing, both, *others = (block.text for block in blocks(ROOT / "README.md", "bash"))
    assert (installing.split()[0], both.count("bash scripts/")) == ("pip", 2 + 1)
    commands = ["set -euo pipefail", f"bash {ROOT}/scripts/demo.sh demo 1", *others]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("nnUNet_")} | {
        "SEGCAL_VENV": str(venv),
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(commands)], cwd=tmp_path, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for page in ("demo/report_posterior", "demo/trust", "report"):
        assert (tmp_path / page / "index.html").exists()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_those_of_the_command_line(page):
    said = {" ".join(words): complaint(words) for words in commands_of(page)}
    assert not {command: error for command, error in said.items() if error}


@pytest.mark.parametrize("line", ["evaluate a b --ouput c", "calibrat", "nnunet trian 1 2d 0"])
def test_a_wrong_command_is_noticed(line):
    assert complaint(line.split()).startswith("No such ")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_names_are_there(page):
    text = read(page)
    files = {name.rstrip(".") for name in FILE.findall(re.sub(r"\]\([^)]*\)", "", text))}
    missing = {
        name for name in files if not PLACEHOLDER.search(name) and not (ROOT / name).exists()
    }
    names = {found[0] for span in SPAN.findall(text) if (found := DOTTED.match(span))}
    assert not missing
    assert not {name for name in names if not exists(name)}


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        for part in parts[depth:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page):
    """Links of the pages in docs/ are checked where the documentation is built."""
    for link in LINK.findall(read(page)):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            assert (ROOT / path).exists(), link
            headings = re.findall(r"^#+ (.*)$", read(ROOT / path), re.M) if anchor else []
            slugs = {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}
            assert anchor in {"", *slugs}, link


def test_readme_is_short():
    assert len(read(ROOT / "README.md").splitlines()) <= 150


def every_command() -> dict[str, Any]:
    found, left = {}, {"segcal": get_command(app)}
    while left:
        name, command = left.popitem()
        found[name] = command
        left |= {f"{name} {sub}": c for sub, c in getattr(command, "commands", {}).items()}
    return found


@pytest.mark.parametrize("name", sorted(every_command()))
def test_help_begins_with_an_example(name):
    summary, _, rest = every_command()[name].help.partition("\n\n")
    assert rest.startswith(("Example: ", "Examples: ")), summary


def test_help_shows_every_word_of_its_texts():
    """Markdown takes ``_seg, or pred_`` for emphasis and drops the underscores."""
    for name, command in every_command().items():
        words = [*name.split()[1:], "--help"]
        shown = CliRunner().invoke(app, words, env={"COLUMNS": "100"}).output
        shown = re.sub(r"[\s│]", "", shown)
        texts = " ".join([command.help, *(p.help or "" for p in command.params)])
        missing = [word for word in texts.replace("`", "").split() if word not in shown]
        assert not missing, name


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [
        p
        for p in (ROOT / "docs").rglob("*.md")
        if str(p.relative_to(ROOT / "docs")) not in navigation
    ]


def test_a_page_that_loads_from_the_network_is_refused():
    from mkdocs.exceptions import PluginError

    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = SimpleNamespace(file=SimpleNamespace(src_uri="page.md"))
    checked = hooks["on_post_page"]
    html = '<script src="assets/a.js"></script><a href="https://arxiv.org">paper</a>'
    assert checked(html, page, None) == html
    for outside in ('<script src="https://x.org/a.js">', "<img alt=a src=//x.org/a.png>"):
        with pytest.raises(PluginError, match=r"page\.md loads from the network"):
            checked(outside, page, None)


def test_lines_for_a_bundle_fit_one(tmp_path):
    """The JSON of the page on MONAI, put over our own bundle as over anybody's."""
    bundle = pytest.importorskip("monai.bundle")
    (block,) = blocks(ROOT / "docs" / "guides" / "monai.md", "json")
    lines = json.loads(block.text)
    lines["validate#handlers"][-1]["save_dict"].pop("model")  # a real network is not needed here
    config = yaml.safe_load((config_root() / "bundle" / "train.yaml").read_text(encoding="utf-8"))
    parser = bundle.ConfigParser(
        {**config, "bundle_root": str(tmp_path), "ckpt_dir": str(tmp_path)}
    )
    parser.update(lines)
    loss = parser.get_parsed_content("loss")
    first, *_, saver = parser.get_parsed_content("validate#handlers")
    assert first.loss is loss
    assert saver.save_dict == {"loss": loss}
    for name in ("postprocessing", "key_metric", "additional_metrics"):
        assert parser.get_parsed_content(f"validate#{name}")


def test_every_figure_is_drawn_by_the_script():
    figures = runpy.run_path(str(ROOT / "scripts" / "draw_docs.py"))["FIGURES"]
    assert {path.stem for path in (ROOT / "docs" / "assets").glob("*.svg")} == set(figures)
    pages = runpy.run_path(str(ROOT / "scripts" / "photograph_pages.py"))["PAGES"]
    shown = {path.stem for path in (ROOT / "docs" / "assets").glob("*.webp")}
    assert shown == {f"page_{name}" for name in pages}
