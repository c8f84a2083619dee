"""A study that nobody ran: files as the engine writes them, of a small simulation with a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from segcal.io.files import write_json

LABELS = ("background", "right ventricle", "myocardium", "left ventricle")
REPAIRS = {"raw": 1.0, "temperature": 0.75, "class_region": 0.45}
"""Factor of the calibration errors."""


@dataclass(frozen=True)
class Effect:
    """What a recipe does.

    Attributes:
        dsc: added.
        ece: factor of raw calibration errors.
        nll: factor of NLL.
    """

    dsc: float = 0.0
    ece: float = 1.0
    nll: float = 1.0


EFFECTS: Mapping[str, Effect] = {
    "dice_ce": Effect(),
    "ce": Effect(-0.03, 0.75, 0.95),
    "svls": Effect(-0.02, 0.55, 0.93),
    "nacl": Effect(0.0, 0.8, 1.02),
    "nacl@alpha=0.01": Effect(0.003, 0.95, 1.0),
    "nacl@alpha=0.3": Effect(-0.02, 0.6, 1.08),
    "nacl@alpha=1": Effect(-0.06, 0.7, 1.4),
    "crac": Effect(-0.015, 0.7, 1.03),
    "confidence": Effect(0.001, 0.25, 0.88),
}


def write_simulated(
    output: Path,
    *,
    sets: Sequence[str] = ("acdc", "phantom_small"),
    networks: Sequence[str] = ("unet",),
    effects: Mapping[str, Effect] = EFFECTS,
    seeds: Sequence[int] = (0, 1, 2),
    patients: int = 10,
    cases: int = 2,
    missing: Sequence[tuple[str, str, str, int]] = (),
    failed: Sequence[tuple[str, str, str, int]] = (),
    folders: bool = True,
) -> Path:
    """Write a study into `output` and return it.

    Sets whose name begins with phantom know the true posterior and have new patients in every seed.
    """
    rng = np.random.default_rng(0)
    cells, tables = [], []
    for name in sets:
        for network in networks:
            for seed in seeds:
                hard = rng.normal(0, 1, patients)
                for recipe, effect in effects.items():
                    key = (name, network, recipe, seed)
                    status = "failed" if key in failed else "done"
                    status = "to do" if key in missing else status
                    cells.append(_cell(key, status, rng))
                    if status != "done":
                        continue
                    tables.append(_cases(key, effect, hard, cases, rng))
                    if name.startswith("phantom"):
                        tables.append(_truth(key, hard, cases))
                    if folders:
                        _write_folder(output, key, effect, rng)
    folder = output / "results"
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(cells).to_csv(folder / "cells.csv", index=False)
    pd.concat(tables).to_csv(folder / "cases.csv", index=False, float_format="%.12g")
    return output


def _truth(key: tuple[str, str, str, int], hard: np.ndarray, cases: int) -> pd.DataFrame:
    """What every cell measures of the true posterior: the same."""
    rng = np.random.default_rng(key[3])
    rows = _cases(key, Effect(0.02, 0.04, 0.7), hard, cases, rng)
    rows = rows[rows["repair"] == "raw"]
    return rows.assign(repair="true_posterior", kl_all=0.0, kl_dilated5=0.0)


def _cell(key: tuple[str, str, str, int], status: str, rng: np.random.Generator) -> dict[str, Any]:
    done = status == "done"
    keys = dict(zip(("set", "network", "recipe", "seed"), key, strict=True))
    seconds = 100 * (1.4 if "confidence" in key[2] else 1.0) * rng.uniform(0.95, 1.05)
    return {
        **keys, "status": status, "why": "loss is not finite" if status == "failed" else None,
        "seconds": round(seconds, 1) if done else None,
        "epochs": 30 if done else None, "parameters": 123456 if done else None,
        "val_dsc": 0.85 if done else None,
    }  # fmt: skip


def _cases(
    key: tuple[str, str, str, int],
    effect: Effect,
    hard: np.ndarray,
    cases: int,
    rng: np.random.Generator,
) -> pd.DataFrame:
    name, network, recipe, seed = key
    training = rng.normal(0, 1)
    rows = []
    for patient, difficulty in enumerate(hard):
        who = f"s{seed} p{patient:02}" if name.startswith("phantom") else f"p{patient:02}"
        for case in range(cases):
            noise = rng.normal(0, 1, 3)
            dsc = 0.85 + effect.dsc - 0.03 * difficulty + 0.004 * training + 0.006 * noise[0]
            error = 0.06 * effect.ece * np.exp(0.25 * difficulty + 0.1 * training + 0.15 * noise[1])
            nll = 0.35 * effect.nll * np.exp(0.25 * difficulty + 0.02 * training + 0.03 * noise[2])
            for repair, factor in REPAIRS.items():
                e, n = error * factor, nll * (1 - 0.1 * (1 - factor) * effect.ece)
                of_probs = {
                    "ece_fg": 1.3 * e + 0.02, "ece_union": 1.8 * e + 0.05, "ece_dilated5": e,
                    "ece_all": 0.2 * e, "nll_all": 0.2 * n, "nll_dilated5": n,
                    "tace_all": 0.5 * e, "cece_all": 0.15 * e, "brier_all": 0.04 * (1 + e),
                    "tace_ref": 1.5 * e,
                }  # fmt: skip
                if name.startswith("phantom"):
                    of_probs |= {"kl_all": 0.05 * n, "kl_dilated5": 0.3 * n}
                for decision, better in (("mask", 0.0), ("dice", 0.004)):
                    value = min(dsc + better, 1.0)
                    rows.append({
                        "set": name, "network": network, "recipe": recipe, "seed": seed,
                        "case": f"{who}_c{case}", "patient": who, "repair": repair,
                        "decision": decision, "dsc": value, "hd95_penalised_mm": 40 * (1 - value),
                        **of_probs, **{f"dsc/{label}": value for label in LABELS[1:]},
                    })  # fmt: skip
    return pd.DataFrame(rows)


def _write_folder(
    output: Path, key: tuple[str, str, str, int], effect: Effect, rng: np.random.Generator
) -> None:
    name, network, recipe, seed = key
    folder = output / name / network / recipe / f"seed_{seed}"
    folder.mkdir(parents=True)
    bins = {}
    for repair, factor in REPAIRS.items():
        bins[repair] = {
            scope: _bins(0.2 * effect.ece * factor, voxels, rng)
            for scope, voxels in (("near", 20_000), ("all", 200_000))
        }
    write_json(folder / "reliability.json", bins)
    _logits(recipe, rng).to_csv(folder / "logits.csv", index=False)
    lines = [json.dumps(record) for record in _log(recipe, effect, rng)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    alpha = float(recipe.partition("alpha=")[2] or 0.1)
    terms: dict[str, Any] = {"soft_dice": {"args": {}}}
    if recipe.startswith("nacl"):
        args = {"kernel_size": 3, "alpha": alpha}
        terms["nacl"] = {"target": "segcal.penalties.nacl.NACL", "args": args}
    elif recipe not in ("dice_ce",):
        terms = {recipe: {"args": {}}}
    loss = {"weights": dict.fromkeys(terms, 1.0), "terms": terms, "schedule": {}}
    keys = {"set": name, "network": network, "recipe": recipe, "seed": seed}
    write_json(folder / "result.json", {"status": "done", **keys, "loss": loss})


def _bins(gap: float, voxels: int, rng: np.random.Generator) -> dict[str, list[float]]:
    """Bins of a predictor that promises too much, by `gap` where it is least sure."""
    centre = (np.arange(15) + 0.5) / 15
    share = np.where(centre > 0.25, np.exp(4 * centre), 0)
    count = np.round(voxels * share / share.sum()).astype(int)
    true = np.clip(centre - gap * (1.2 - centre), 0, 1)
    return {
        "count": count.tolist(),
        "confidence_sum": (count * centre).tolist(),
        "hit_sum": rng.binomial(count, true).tolist(),
    }


def _logits(recipe: str, rng: np.random.Generator) -> pd.DataFrame:
    scale = {"dice_ce": 9.0, "confidence": 6.0}.get(recipe, 3.0)
    rows = [
        {
            "region": region, "label": label, "channel": channel,
            "mean_logit": (scale if label == channel else -scale / 3)
            * (1 if region == "inner" else 0.4) + rng.normal(0, 0.3),
            "voxels": 1000 if region == "inner" else 300,
        }
        for region in ("inner", "outer")
        for label in range(len(LABELS))
        for channel in range(len(LABELS))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _log(recipe: str, effect: Effect, rng: np.random.Generator) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    lam = np.zeros((2, len(LABELS)))
    for epoch in range(30):
        miou = 0.75 + effect.dsc - 0.6 * np.exp(-epoch / (4 if recipe != "crac" else 7))
        record: dict[str, Any] = {
            "epoch": epoch, "train": {"cross_entropy": 0.5}, "val": {"cross_entropy": 0.6},
            "miou": miou + rng.normal(0, 0.002), "ece": 0.05 * effect.ece,
        }  # fmt: skip
        if recipe in ("crac", "confidence"):
            size = np.array([[0.02, 0.05, 0.09, 0.06], [0.1, 0.13, 0.16, 0.12]])
            gap = size * np.exp(-epoch / 10) + rng.normal(0, 0.004, lam.shape)
            lam = np.clip(lam + 0.1 * gap, 0, 0.3)
            record[recipe] = {"lam": lam.tolist(), "constraint": gap.tolist()}
            if recipe == "confidence":
                record[recipe]["quantity"] = "confidence less accuracy"
            if recipe == "crac":
                record[recipe]["rho"] = np.full(lam.shape, 0.1).tolist()
        records.append(record)
    return records
