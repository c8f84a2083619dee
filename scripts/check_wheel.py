"""Check an installed segcal: modules import, configs build, types are marked."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import version
from pathlib import Path

import segcal
from segcal.adapters.nnunet.discovery import ext_path
from segcal.io.yaml import config_root
from segcal.recipes import build, names
from segcal.training.experiments import shipped


def main() -> None:
    modules = [m.name for m in pkgutil.walk_packages(segcal.__path__, "segcal.")]
    for name in modules:
        importlib.import_module(name)
    package = Path(segcal.__file__).parent
    if not (package / "py.typed").is_file():
        raise SystemExit(f"no py.typed in {package}: type checkers would not read segcal's types")
    if version("segcal") != segcal.__version__:
        raise SystemExit(f"installed as {version('segcal')}, calls itself {segcal.__version__}")
    if package not in config_root().parents:
        raise SystemExit(f"configs come from {config_root()}, not from the installed package")
    for kind in ("losses", "penalties", "recipes", "multilabel", "posthoc"):
        if not names(kind):  # type: ignore[arg-type]
            raise SystemExit(f"no {kind} in {config_root()}")
    for recipe in names("recipes"):
        build(recipe, num_classes=4)
    for kind in ("experiments", "classify", "studies"):
        if not shipped(kind):
            raise SystemExit(f"no {kind} in {config_root()}")
    if not list(ext_path().glob("*.py")):
        raise SystemExit(f"{ext_path()} is empty: nnU-Net would not find the trainers")
    print(f"{len(modules)} modules import from {package}")
    print(f"{len(names('recipes'))} recipes build: {', '.join(names('recipes'))}")


if __name__ == "__main__":
    main()
