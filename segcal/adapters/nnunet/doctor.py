"""What would stop a training with nnU-Net or surprise its user, and what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from segcal.adapters.nnunet.discovery import EXT_VARIABLE, PATH_VARIABLES, ext_path

SUPPORTED = "2.8"
GIB = 1 << 30
PURPOSE = {
    "nnUNet_raw": "images and labels; planning and preprocessing read it",
    "nnUNet_preprocessed": "planning and preprocessing write it, training reads it",
    "nnUNet_results": "what training writes",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        what: its name.
        found: the result.
        verdict: ``ok``; ``note`` is good to know; with ``stop`` training will not work.
        advice: what to do, or empty.
    """

    what: str
    found: str
    verdict: Literal["ok", "note", "stop"] = "ok"
    advice: str = ""


def diagnose(environment: Mapping[str, str]) -> list[Finding]:
    """Check installation, environment variables, trainers and disks."""
    probed = run_probe(environment)
    return [
        *installation(probed),
        *path_variables(environment),
        *trainers(probed, environment.get(EXT_VARIABLE)),
        *settings(probed),
        *processes(environment, os.cpu_count() or 1),
        *disks(environment),
    ]


def run_probe(environment: Mapping[str, str]) -> dict[str, Any]:
    """Result of :mod:`segcal.adapters.nnunet.probe`; ``{"failed": its error}`` if it breaks."""
    done = subprocess.run(
        [sys.executable, "-m", "segcal.adapters.nnunet.probe"],
        capture_output=True,
        text=True,
        env=dict(environment),
        check=False,
    )
    if done.returncode != 0:
        return {"failed": f"exit code {done.returncode}: {_last_line(done.stderr)}"}
    return json.loads(done.stdout.splitlines()[-1])


def installation(probed: dict[str, Any]) -> list[Finding]:
    """Versions and files of what a training imports, and whether it can be imported."""
    found = [Finding("Python", f"{sys.version.split()[0]}, {sys.executable}")]
    found += [version_of(name) for name in ("segcal", "nnunetv2", "torch")]
    script = shutil.which("nnUNetv2_train")
    if script is None or Path(script).parent != Path(sys.executable).parent:
        found.append(
            Finding(
                "nnUNetv2_train", script or "not on PATH", "note",
                "nnU-Net's commands belong to another installation, or are missing; segcal nnunet "
                "train and predict use this installation",
            )
        )  # fmt: skip
    if "failed" in probed:
        advice = "a package is broken; reinstall nnunetv2 and torch"
        return [*found, Finding("import of nnU-Net", probed["failed"], "stop", advice)]
    for name, error in probed["imports"].items():
        optional = name in ("timm", "torchvision")
        if error is None:
            found.append(Finding(f"import {name}", "works"))
            continue
        advice = (
            "only needed to find trainers by nnUNet_extTrainer: segcal nnunet train works without "
            "it; for nnU-Net's own commands install the version that fits your torch"
            if optional
            else "reinstall it in this environment"
        )
        found.append(Finding(f"import {name}", error, "note" if optional else "stop", advice))
    gpu = probed["cuda"]
    found.append(
        Finding("GPU", gpu)
        if gpu
        else Finding("GPU", "none that torch can use", "note", "train and predict with -device cpu")
    )
    return found


def version_of(package: str) -> Finding:
    """Version and file of an installed package."""
    spec = find_spec(package)
    if spec is None:
        return Finding(package, "not installed", "stop", f"pip install {package}")
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "from a source tree"
    found = f"{version}, {spec.origin}"
    if package == "nnunetv2" and not version.startswith(f"{SUPPORTED}."):
        advice = (
            f"segcal is tested with nnunetv2 {SUPPORTED}.x: pip install 'nnunetv2=={SUPPORTED}.*'"
        )
        return Finding(package, found, "note", advice)
    return Finding(package, found)


def path_variables(environment: Mapping[str, str]) -> list[Finding]:
    """Whether nnU-Net's folders are set, exist and can be written."""
    return [_path_variable(name, environment.get(name)) for name in PATH_VARIABLES]


def _path_variable(name: str, value: str | None) -> Finding:
    needed = name != "nnUNet_raw"
    worst: Literal["note", "stop"] = "stop" if needed else "note"
    example = f'export {name}="$HOME/nnunet/{name.removeprefix("nnUNet_")}"'
    if not value:
        return Finding(name, "not set", worst, f"{example} ({PURPOSE[name]})")
    path = Path(value)
    if not path.is_dir():
        above = next(p for p in (path, *path.absolute().parents) if p.exists())
        if name == "nnUNet_results" and above.is_dir() and os.access(above, os.W_OK):
            return Finding(name, f"{value}, does not exist yet; training makes it")
        return Finding(name, f"{value}, no such folder", worst, f"mkdir -p {value}")
    if needed and not os.access(path, os.W_OK):
        return Finding(name, f"{value}, not writable", "stop", "choose a folder of your own")
    return Finding(name, value)


def trainers(probed: dict[str, Any], variable: str | None) -> list[Finding]:
    """Whether nnU-Net finds segcal's trainers, by segcal's commands and by its own."""
    if "by_variable" not in probed:
        return []
    by_registration, by_variable = probed["by_registration"], probed["by_variable"]
    found = [_looked_up("trainers, by segcal nnunet train", by_registration, "stop", "report this")]
    export = f'export {EXT_VARIABLE}="$(segcal nnunet ext-path)"'
    if not variable:
        advice = (
            f"for nnUNetv2_train to find segcal's trainers (segcal nnunet train does): {export}"
        )
        return [*found, Finding(EXT_VARIABLE, "not set", "note", advice)]
    entries = [p for p in variable.split(os.pathsep) if p.strip()]
    for entry in entries:
        if not Path(entry).is_dir():
            advice = "nnU-Net skips it; correct or remove it"
            found.append(Finding(EXT_VARIABLE, f"{entry}, no such folder", "note", advice))
        elif Path(entry) != ext_path() and any(Path(entry).glob("*/__init__.py")):
            advice = "nnU-Net imports every module in it; point it at a folder of trainers only"
            found.append(Finding(EXT_VARIABLE, f"{entry}, holds packages", "note", advice))
    found.append(Finding(EXT_VARIABLE, variable))
    found.append(_looked_up("trainers, by nnUNetv2_train", by_variable, "note", export))
    return found


def settings(probed: dict[str, Any]) -> list[Finding]:
    """Whether the trainers accept the plans' entry ``segcal``."""
    advice = "correct the entry, or remove it"
    return [
        Finding("entry segcal of plans", f"{place}: {problem}", "stop", advice)
        if problem
        else Finding("entry segcal of plans", f"{place}: fits")
        for place, problem in probed.get("blocks", {}).items()
    ]


def _looked_up(
    what: str, errors: dict[str, str | None], verdict: Literal["note", "stop"], advice: str
) -> Finding:
    missing = {name: error for name, error in errors.items() if error}
    if not missing:
        return Finding(what, ", ".join(errors))
    name, error = next(iter(missing.items()))
    return Finding(
        what, f"{len(missing)} of {len(errors)} not found: {name}: {error}", verdict, advice
    )


def processes(environment: Mapping[str, str], cpus: int) -> list[Finding]:
    """Whether the numbers of worker processes suit the machine."""
    workers, default = environment.get("nnUNet_n_proc_DA"), environment.get("nnUNet_def_n_proc")
    found = []
    if workers == "0":
        advice = "planning fails with it (nnU-Net sets 0 threads); set it for training only"
        found.append(Finding("nnUNet_n_proc_DA", "0", "note", advice))
    if default is None and cpus < 8:
        advice = f"nnU-Net starts 8 processes by itself: export nnUNet_def_n_proc={cpus}"
        found.append(Finding("nnUNet_def_n_proc", f"not set, {cpus} CPUs", "note", advice))
    return found


def disks(environment: Mapping[str, str]) -> list[Finding]:
    """Free space on the disks that preprocessing and training write to."""
    found = []
    for name in ("nnUNet_preprocessed", "nnUNet_results"):
        if value := environment.get(name):
            place = next(p for p in (Path(value), *Path(value).absolute().parents) if p.exists())
            found.append(free_space(name, shutil.disk_usage(place).free))
    return found


def free_space(variable: str, free: int) -> Finding:
    """Judge free bytes: a checkpoint of nnU-Net's default networks takes up to 1 GiB."""
    what, found = f"disk of {variable}", f"{free / GIB:.1f} GiB free"
    if variable == "nnUNet_results" and free < GIB:
        return Finding(what, found, "stop", "free some space; a checkpoint may not fit")
    if free < 20 * GIB:
        advice = "a fold takes 1 GiB, preprocessed data and --npz far more"
        return Finding(what, found, "note", advice)
    return Finding(what, found)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
