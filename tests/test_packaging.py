"""What pyproject.toml declares is what the code imports, what is locked and what is installed."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import segcal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
STANDARD = sys.stdlib_module_names | {"tomllib"}  # which Python 3.10 lacks
NAMES = {"sklearn": "scikit-learn"}
"""Distributions of another name than their module, whose metadata Python 3.10 cannot read."""
COMES_WITH_ANOTHER = {"triton": "PyTorch brings its own where it can compile for a GPU"}


def declared(*extras: str) -> list[Requirement]:
    """Return requirements of the package and of `extras`, those of extras they name included."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    requirements = [Requirement(line) for line in lines]
    nested = {e for r in requirements if r.name == "segcal" for e in r.extras} - set(extras)
    return declared(*extras, *sorted(nested)) if nested else requirements


@cache
def distributions() -> dict[str, set[str]]:
    """Installed distributions by the name that is imported."""
    return {
        name: {canonicalize_name(d) for d in distributions}
        for name, distributions in packages_distributions().items()
    }


def provided(name: str, by: set[str]) -> bool:
    """Whether one of the distributions `by` has the module; one not installed has its own name."""
    own = {canonicalize_name(NAMES.get(name, name))}
    return bool(distributions().get(name, own) & by)


def imported(folder: str) -> dict[str, Path]:
    """Top-level names of third parties that modules under `folder` import, and where."""
    own = {"segcal", "tests", *(path.stem for path in (ROOT / folder).rglob("*.py"))}
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found.update({name.partition(".")[0]: path.relative_to(ROOT) for name in names})
    return {k: v for k, v in found.items() if k not in own | STANDARD}


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("segcal", ("classify", "dask", "monai", "tensorboard")),
        ("scripts", ("bench", "test")),
        ("tests", ("test",)),
    ],
)
def test_every_import_is_declared(folder, extras):
    known = {canonicalize_name(requirement.name) for requirement in declared(*extras)}
    missing = {
        name: str(path)
        for name, path in imported(folder).items()
        if name not in COMES_WITH_ANOTHER and not provided(name, known)
    }
    assert not missing, f"imported, but in no list of pyproject.toml: {missing}"


def test_every_requirement_has_a_lower_bound():
    unbounded = [
        str(requirement)
        for requirement in declared(*PROJECT["optional-dependencies"])
        if requirement.name != "segcal"
        and not any(s.operator == ">=" for s in requirement.specifier)
    ]
    assert not unbounded, "scripts/test_lowest.sh would install a release of long ago"


def holds(requirement: Requirement, python: str) -> bool:
    """Whether a line is for this Python, on Linux."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "platform_python_implementation": "CPython",
    }
    return requirement.marker is None or requirement.marker.evaluate(environment)


def locked(python: str) -> dict[str, str]:
    """Releases in scripts/constraints.txt by distribution."""
    text = (ROOT / "scripts" / "constraints.txt").read_text()
    found = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==", line
        if holds(requirement, python):
            assert canonicalize_name(requirement.name) not in found, f"{line}: twice"
            found[canonicalize_name(requirement.name)] = pin.version
    return found


@pytest.mark.parametrize("python", TESTED_PYTHONS)
def test_every_requirement_is_locked(python):
    releases = locked(python)
    wrong = [
        f"{requirement} against {releases.get(canonicalize_name(requirement.name))}"
        for requirement in declared("test")
        if requirement.name != "segcal"
        and holds(requirement, python)
        and releases.get(canonicalize_name(requirement.name), "none") not in requirement.specifier
    ]
    assert not wrong, "renew it: bash scripts/lock.sh"


def test_the_lock_names_no_place():
    text = (ROOT / "scripts" / "constraints.txt").read_text()
    assert not re.search(r"://|@ |--(extra-)?index|--find-links", text)


def test_declared_pythons():
    prefix = "Programming Language :: Python :: 3."
    minors = [c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert [f"3.{minor}" for minor in minors] == list(TESTED_PYTHONS)
    assert PROJECT["requires-python"] == f">={TESTED_PYTHONS[0]}"


def test_the_version_stands_in_one_place():
    assert PROJECT["dynamic"] == ["version"]
    assert version("segcal") == segcal.__version__, "install segcal again after a new version"
    assert re.search(
        rf"^## {re.escape(segcal.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


def test_types_are_published():
    assert (Path(segcal.__file__).parent / "py.typed").is_file()


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]
    assert "version" not in citation, "segcal/__init__.py says it"
    addresses = set(PROJECT["urls"].values())
    # the installed metadata part name and address at the first comma
    assert not [name for name in PROJECT["urls"] if "," in name or len(name) > 32]
    assert addresses <= {reference["url"] for reference in citation["references"]}
