"""Put measured numbers into the sentences of README and docs, from tables and files of results.

    python scripts/publish_numbers.py          # after the scripts that write the tables
    python scripts/publish_numbers.py --check  # only say which sentences are out of date

Every function below gives the sentences of one page (or parts of them) as they should read; the
numbers are looked up in the tables between the marks of the pages and in ``data/results``. In the
page the place is found by the words between the numbers, so a sentence that is reworded there is
reworded here, too. A sentence that no longer holds at all (what was lower is now higher) is named,
and has to be rewritten by hand in both places.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from operator import gt
from pathlib import Path
from typing import Any

import pandas as pd

from segcal.io.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "data" / "results"
WORDS = (
    "none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve",
)  # fmt: skip
NUMBER = rf"[-+]?(?:\d+(?:,\d{{3}})*(?:\.\d+)?|\.\d+)|\b(?:{'|'.join(WORDS)})\b(?: seeds?\b)?"
UNTRUE = "[does not hold any more] "
NAMES = {
    "acdc, dynunet": "cardiac MRI with DynUNet",
    "acdc_nnunet, nnunet_2d": "cardiac MRI with nnU-Net",
    "hippocampus_nnunet, nnunet_2d": "hippocampus MRI with nnU-Net",
}
METHOD, LOSS, RETRAIN = "docs/which-method.md", "docs/which-loss.md", "docs/do-i-need-to-retrain.md"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    failed = False
    for page, sentences in SENTENCES.items():
        text, wrong, _ = corrected((ROOT / page).read_text(encoding="utf-8"), sentences())
        if not options.check:
            write_text(ROOT / page, text)
        for what in wrong:
            print(f"{page} {what}")
        failed |= bool(wrong) and (options.check or any(what.startswith("has") for what in wrong))
    raise SystemExit(int(failed))


def corrected(text: str, sentences: Iterable[str]) -> tuple[str, list[str], list[tuple[int, int]]]:
    """The page with the right numbers, what was wrong, and where its sentences are."""
    wrong, spans, changes = [], [], []
    for sentence in sentences:
        numbers = re.findall(NUMBER, sentence)
        words = [re.sub(r"\\?\s+", r"\\s+", re.escape(w)) for w in re.split(NUMBER, sentence)]
        found = list(re.finditer(f"({NUMBER})".join(words), text))
        if len(found) != 1:
            wrong.append(f"has {len(found)} places that read: {sentence}")
            continue
        spans.append(found[0].span())
        if found[0].groups() != tuple(numbers):
            wrong.append(f"says: {' '.join(found[0][0].split())}\n  should say: {sentence}")
            changes += [(*found[0].span(i), new) for i, new in enumerate(numbers, 1)]
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    return text, wrong, spans


# Where numbers come from.


@cache
def tables(page: str, mark: str) -> dict[str, pd.DataFrame]:
    """Tables between two marks of a page, as text, by the heading above them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", text, re.S)
    found: dict[str, list[list[str]]] = {}
    title = ""
    for line in block.replace("\\", "").splitlines():
        if line.startswith(("## ", "**")):
            title = line.strip("#* ").split("** (")[0]
        elif line.startswith("|"):
            found.setdefault(title, []).append([c.strip() for c in line[1:-1].split("|")])
    frames = {}
    for title, (head, _, *rows) in found.items():
        rows = [row for row in rows if len(row) == len(head)]  # a second table may follow
        columns = [re.sub(" [↑↓]$", "", name) for name in head]
        frame = pd.DataFrame(rows, columns=range(len(head))).set_index(0)
        frame.columns = pd.Index(columns[1:])
        frames[title] = frame
    return frames


def table(page: str, mark: str, heading: str = "") -> pd.DataFrame:
    """The table whose heading begins so."""
    (found,) = (of for title, of in tables(page, mark).items() if title.startswith(heading))
    return found


def value(cell: str) -> Decimal:
    """The first number of a cell."""
    return Decimal(re.search(r"[-+]?\d*\.?\d+", cell)[0])  # type: ignore[index]


def values(cells: Iterable[str]) -> list[Decimal]:
    return [value(cell) for cell in cells if cell not in ("", "-")]


@cache
def results(name: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / f"{name}.csv")


# How they are written.


def to(number: float | Decimal, digits: int, *, zero: bool = True) -> str:
    """Rounded half up, and without its sign; ``zero=False`` writes ``.004``."""
    rounded = abs(Decimal(str(number))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return str(rounded) if zero else str(rounded).removeprefix("0")


def span(numbers: Iterable[Any], digits: int, *, zero: bool = True) -> str:
    """Least and greatest size, or both in one if they are the same."""
    sizes = sorted(abs(Decimal(str(n))) for n in numbers)
    ends = [to(size, digits, zero=zero) for size in (sizes[0], sizes[-1])]
    return " to ".join(dict.fromkeys(ends))


def either(counts: Iterable[int]) -> str:
    return " or ".join(word(n) for n in sorted(set(counts)))


def seeds(name: str, recipe: str) -> str:
    cells = results(f"{name}_cells")
    count = cells[cells["recipe"] == recipe]["seed"].nunique()
    return f"{word(count)} seed{'s' * (count > 1)}"


def word(count: int) -> str:
    return WORDS[count] if count < len(WORDS) else str(count)


def true(condition: bool, sentence: str) -> str:
    """The sentence, if what it says holds."""
    return sentence if condition else UNTRUE + sentence


# The pages.


def change(metric: str, recipe: str, group: str) -> Decimal:
    """Change against Dice + cross-entropy, as the page's table has it."""
    return value(table(METHOD, "overview", f"{metric},").loc[recipe, group])


def changes(metric: str, recipe: str = "confidence") -> dict[str, Decimal]:
    row = table(METHOD, "overview", f"{metric},").loc[recipe]
    return {group: value(cell) for group, cell in row.items() if cell != "-"}


NNUNET = "nnunet_2d"
REPAIRED = "confidence + class_region"
"""The row of `confidence` with the repair that was measured everywhere."""
BY_CASE = "class_region_case"


def as_used(metric: str) -> dict[str, Decimal]:
    """Changes by `confidence` as segcal's commands train and predict it, by set and network.

    Where `class_region_case` was not measured these are changes with `class_region`.
    """
    return {**changes(metric, REPAIRED), **changes(metric, f"confidence + {BY_CASE}")}


def kept() -> tuple[int, int, dict[str, Decimal]]:
    """Comparisons in which `confidence` kept Dice, all of them, and the losses in the others."""
    goals = table(METHOD, "verdict")
    good, of = map(int, goals.loc["confidence", "DSC kept"].split(" of "))
    worst = sorted(changes("DSC").items(), key=lambda found: found[1])
    return good, of, dict(worst[: of - good])


def trainer(kept_dice: str) -> Iterator[str]:
    """What README and the guide to nnU-Net say of the recommended trainer."""
    good, of, lost = kept()
    errors = list(as_used("ECE near").values())
    others = f" (on the other{' one' if len(lost) == 1 else 's'} it lost {span(lost.values(), 3)})"
    yield (
        f"n {word(good)} of {word(of)} comparisons {kept_dice} kept the Dice of Dice + "
        f"cross-entropy{others if lost else ''}"
    )
    yield true(
        max(errors) < 0,
        "of them it lowered the calibration error near the foreground"
        f"{',' * (kept_dice == 'this trainer')} by {span(errors, 0)} %",
    )


def readme() -> Iterator[str]:
    yield from trainer("this trainer")
    ratios = of_ce("CE + CRaC")
    yield f"cross-entropy + CRaC takes {span(ratios, 2)} times as long as torch's cross-entropy"


def of_ce(loss: str) -> list[float]:
    """Time of a loss divided by that of torch's cross-entropy, by shape."""
    shapes = read_json(RESULTS / "bench_losses.json")["losses"]
    return [rows[loss]["fastest_ms"] / rows["torch CE"]["fastest_ms"] for rows in shapes.values()]


def shares() -> list[float]:
    """Per cent of nnU-Net's training step that CRaC takes."""
    found = read_json(RESULTS / "bench_losses.json")["penalty_share_of_step"]
    return [100 * share for share in found.values()]


def costs() -> Iterator[str]:
    two, three = (to(share, 1) for share in shares())
    yield f"(2-D, 256 x 224; 3-D, 40 x 56 x 40) CRaC took {two} % and {three} % of the time there"


def guide_to_nnunet() -> Iterator[str]:
    yield from trainer("`nnUNetTrainerConfidence`")
    likelihoods = list(as_used("NLL all").values())
    yield true(max(likelihoods) < 0, f"and the negative log-likelihood by {span(likelihoods, 0)} %")
    stock = [list(changes(metric).values()) for metric in ("ECE near", "NLL all")]
    yield true(
        max(map(max, stock)) < 0,
        f"these numbers are {span(stock[0], 0)} % and {span(stock[1], 0)} %",
    )


def guide_to_repair() -> Iterator[str]:
    cut = {}
    for name in ("phantom", "hippocampus", "acdc"):
        near = tables(RETRAIN, "retrain")[name]["ECE near"]
        before, after = value(near["dice_ce"]), value(near["dice_ce + class_region"])
        cut[name] = to(100 * (1 - after / before), 0)
    yield (
        f"`class_region` cut the ECE near the foreground by {cut['phantom']} % on phantoms, by "
        f"{cut['hippocampus']} % on hippocampus MRI and by {cut['acdc']} % on cardiac MRI"
    )


def missed() -> Iterator[str]:
    """What the page says of the sets in which ECE near was not halved."""
    patients = table(METHOD, "patients")
    row = patients.loc["chaos, dynunet"]
    masks = results("chaos").query("decision == 'mask'")
    left = masks.query("recipe == 'confidence' and repair == 'class_region'")
    worst = left.loc[left["ece_dilated5"].idxmax(), "patient"]
    best = masks[masks["patient"] == worst]["dsc"].max()
    yield (
        f"one of {word(int(row['lower'].split(' of ')[1]))} patients has "
        f"{to(value(row['worst tenth']), 0)} % of what `confidence + class_region` leaves, and no "
        f"training segmented this patient well (DSC {to(best, 2, zero=False)} at most)"
    )
    yield true(
        patients["with DSC"].map(value).max() < 0,
        "What is left is larger where the mask is worse",
    )
    yield true(
        abs(value(row["median"]) + 50) <= 5,
        "In the median patient the error was about halved there",
    )
    by_group, by_case = (
        {metric: changes(metric, f"dice_ce + {repair}") for metric in ("ECE near", "NLL all")}
        for repair in ("class_region", "class_region_case")
    )
    acdc = [of[metric]["acdc, dynunet"] for metric in by_case for of in (by_case, by_group)]
    yield true(
        acdc[0] < acdc[1] < 0 and acdc[2] < acdc[3] < 0,
        "On ACDC it lowered ECE near the foreground of Dice + cross-entropy by "
        f"{to(acdc[0], 0)} % where `class_region` lowered it by {to(acdc[1], 0)} %, and NLL by "
        f"{to(acdc[2], 0)} % instead of {to(acdc[3], 0)} %",
    )
    reached = table(METHOD, "ceiling")["ECE near"].map(lambda cell: value(cell.split()[1]))
    yield true(
        reached["class_region, all test patients"] > -50,
        "On ACDC with DynUNet no single set of temperatures can halve it",
    )
    limits = table(METHOD, "ceiling")["ECE near"].map(value)
    yield true(
        limits["class_region_case, validation patients"] < limits["class_region, all test patients"]
        and limits["class_region, all test patients"] < limits["class_region, validation patients"]
        and acdc[0] <= change("ECE near", "confidence + class_region_case", "acdc, dynunet"),
        "further than `class_region` did even when it was fitted to the test patients. With this "
        "repair Dice + cross-entropy was as good there as `confidence`",
    )
    nnunet = [of["ECE near"][f"acdc_nnunet, {NNUNET}"] for of in (by_case, by_group)]
    yield true(
        nnunet[0] < nnunet[1],
        f"With nnU-Net on ACDC (one seed) it lowered it by {to(nnunet[0], 0)} % instead of "
        f"{to(nnunet[1], 0)} %",
    )
    paths = sorted((RESULTS / "needed").glob("*.csv"))
    drawn = pd.concat([pd.read_csv(path).assign(set=path.stem) for path in paths])
    drawn["change"] = 100 * (drawn["ece_dilated5_case"] / drawn["ece_dilated5_group"] - 1)
    few, many = drawn[drawn["patients"] <= 5], drawn[drawn["patients"] >= 8]
    of_acdc = many["set"].str.startswith("acdc")
    mean = many.groupby([of_acdc, "set", "patients"])["change"].mean()
    yield true(
        few["change"].max() > 25,
        f"after some draws ECE near the foreground rose by up to {to(few['change'].max(), 0)} %",
    )
    yield true(
        many[of_acdc]["change"].max() <= 0 > mean[True].max(),
        f"With eight or more it rose after no draw on ACDC, and fell by {span(mean[True], 0)} % on "
        "average",
    )
    yield true(
        mean[False].min() < 0 < mean[False].max(),
        f"elsewhere it changed by -{to(mean[False].min(), 0)} to +{to(mean[False].max(), 0)} % on "
        f"average, and by at most +{to(many[~of_acdc]['change'].max(), 0)} % after one draw",
    )


def which_method() -> Iterator[str]:
    good, of, lost = kept()
    where = "; ".join(
        f"{NAMES.get(group, group)}, {seeds(group.split(', ')[0], 'confidence')}" for group in lost
    )
    if lost:
        yield (
            f"In {word(of - good)} of {word(of)} comparisons ({where}) Dice was lower by "
            f"{span(lost.values(), 3, zero=False)}"
        )
    ranks = table(METHOD, "ranks")
    ranks = ranks[ranks["field"] == "repaired"].drop(columns="field").map(value)
    ahead = ranks.loc["dice_ce + class_region"] - ranks.loc[REPAIRED]
    yield true(
        bool((ahead >= ranks.loc["critical difference"]).all()),
        "it is ahead of repaired Dice + cross-entropy in Dice, ECE near the foreground and "
        "negative log-likelihood (NLL), beyond chance",
    )
    yield from missed()
    wins, of = map(int, table(METHOD, "verdict").loc[REPAIRED, "beats repair"].split(" of "))
    ours, repaired = (
        {metric: changes(metric, name) for metric in ("ECE near", "NLL all")}
        for name in (REPAIRED, "dice_ce + class_region")
    )
    worse = [ours[m][group] - repaired[m][group] for m in ours for group in ours[m]]
    yield true(
        max(worse) <= 3,
        f"In {word(wins)} of {word(of)} comparisons both ECE near the foreground and NLL were "
        "lower than with `dice_ce + class_region`. In the others the two are about level",
    )
    yield f"its ECE near the foreground would be {span(with_temperature(), 0)} % lower"
    lost = [
        change("DSC", recipe, f"{name}, nnunet_2d")
        for recipe, name in (
            ("confidence_fixed", "nnunet_short"), ("confidence_fixed", "acdc_nnunet"),
            ("confidence_fixed", "hippocampus_nnunet"), ("crac", "hippocampus_nnunet"),
            ("nacl", "hippocampus_nnunet"),
        )
    ]  # fmt: skip
    short, acdc, hippocampus, crac, nacl = (to(x, 3, zero=False) for x in lost)
    yield true(
        max(lost) < 0,
        f"lost {short} on phantoms after 480 steps of nnU-Net, {acdc} on ACDC after 2,000 and "
        f"{hippocampus} on hippocampus after 2,400; CRaC lost {crac} there, and NACL {nacl} "
        f"({seeds('hippocampus_nnunet', 'nacl')})",
    )
    sizes = [results(p.stem)["parameters"] / 1e6 for p in RESULTS.glob("*_cells.csv")]
    yield f"({span([min(map(min, sizes)), max(map(max, sizes))], 1)} million weights)"
    weights = table(METHOD, "weights")["ECE near"].map(value)
    yield true(
        bool(weights.iloc[:4].is_monotonic_decreasing) and weights.iloc[4] > 0,
        "Up to 0.3 a larger weight lowers the calibration error near the foreground",
    )
    by_heart = [f"{name}, dynunet" for name in ("hippocampus_small", "phantom_small")]
    fixed, smoothed, ours = (
        [change("ECE near", recipe, group) for group in by_heart]
        for recipe in ("confidence_fixed", "confidence_svls", "confidence")
    )
    yield true(
        all(map(gt, ours, fixed)) and all(map(gt, ours, smoothed)),
        "then had a lower ECE near the foreground than `confidence`",
    )
    heads, ours = changes("NLL all", "two_heads_confidence"), changes("NLL all")
    yield true(
        all(ours[group] <= heads[group] < 0 for group in heads),
        "Its NLL was lower than that of Dice + cross-entropy, and on no set lower than that of "
        "`confidence`",
    )
    ours, repaired = changes("ECE near"), changes("ECE near", "dice_ce + class_region")
    pulled = [pair for recipe in ("crac", "nacl") for pair in changes("ECE near", recipe).items()]
    yield true(
        all(max(ours[group], repaired[group]) < error < 0 for group, error in pulled),
        "They lowered ECE near the foreground, as claimed, but less than `confidence` and repair "
        "did",
    )
    yield (
        f"The terms of `confidence` cost {span(of_ce('recipe confidence'), 1)} times torch's "
        "cross-entropy"
    )
    yield (
        f"Dice + cross-entropy costs {span(of_ce('nnU-Net Dice + CE'), 1)} times torch's "
        "cross-entropy"
    )
    yield true(max(shares()) < 1, "of a training step that is a share below one per cent")


def with_temperature() -> list[float]:
    """Change of ECE near the foreground, per cent, by `confidence` and a temperature, in MONAI."""
    found = []
    for path in sorted(RESULTS.glob("*_cells.csv")):
        table = results(path.stem.removesuffix("_cells"))
        means = table.groupby(["network", "recipe", "repair"])["ece_dilated5"].mean()
        for network in set(table["network"]) - {NNUNET}:
            before, after = means[network, "dice_ce", "raw"], means[network]["confidence"]
            found.append(100 * (after["temperature"] / before - 1))
    return found


def wins(mark: str, heading: str, recipes: Sequence[str], metrics: Sequence[str]) -> list[int]:
    """Seeds of all in which losses are better than the first."""
    frame = table(LOSS, mark, heading)
    return [int(frame.loc[r, m].split(", ")[-1].split(" of ")[0]) for r in recipes for m in metrics]


def which_loss() -> Iterator[str]:
    margins = ("cals", "cals_hr", "mbls", "cpc")
    better = ("accuracy", "NLL")
    digits = wins("class-differences", "digits:", margins, better)
    brier = table(LOSS, "class-differences", "digits:")["Brier"]
    yield true(
        all("▼" in brier[name] for name in margins),
        "the Brier score is lower beyond chance, and accuracy and NLL are better in "
        f"{either(digits)} of ten seeds",
    )
    tail = table(LOSS, "class-differences", "digits_lt:")
    counts = wins("class-differences", "digits_lt:", margins[:3], better)
    yield true(
        not any("▼" in cell or "▲" in cell for cell in tail.loc[list(margins)].to_numpy().ravel()),
        "With a long tail of classes all of them but CPC are ahead in both in "
        f"{either(counts)} of ten seeds, but nothing there is beyond chance",
    )
    last = results("losses/digits_lt").groupby("method")["last_ece"].mean()
    yield f"ECE of cross-entropy is {to(last['ce'], 3)} and that of CALS {to(last['cals'], 3)}"
    classes = [results(f"losses/{name}") for name in ("digits", "digits_lt", "docstrings")]
    floors = [mean for table in classes for mean in table.groupby("method")["ece_floor"].mean()]
    yield f"on the test samples of classes it is {span([min(floors), max(floors)], 3)}"
    spa = wins("spa_grid_digit_mosaics", "", ["spa_chosen + link"], ["NLL", "mAP@class"])
    yield f"its NLL on digit mosaics is lower in {word(spa[0])} of five seeds"
    yield true(
        spa[0] == spa[1],
        "its posterior has a higher mean average precision and a lower NLL than BCE in "
        f"{word(spa[0])} of five seeds",
    )
    ranking = table(LOSS, "labels", "mAP@class")
    higher = [value(ranking.loc["two_way", c]) > value(ranking.loc["bce", c]) for c in ranking]
    parts = table(LOSS, "two_way_ablation_digit_mosaics")
    higher.append(value(parts.loc["bce", "mAP@class"]) < 0)
    yield f"mean average precision is higher on {word(sum(higher))} of {word(len(higher))} sets"
    ace = table(LOSS, "labels", "ACE")
    cuts = [
        value(ace.loc[f"{loss} + {link}", name]) / value(ace.loc[loss, name])
        for loss, link in (("focal", "phi"), ("asymmetric", "phi"), ("spa", "link"))
        for name in ("scene", "emotions")
    ]
    yield true(
        max(cuts) < Decimal("0.4"), "cuts ACE to about a third or less on scene and emotions"
    )


def retrain() -> Iterator[str]:
    sets = tables(RETRAIN, "retrain")
    nll = {name: of["NLL all"] for name, of in sets.items()}
    rows = ("dice_ce", "dice_ce + temperature", "dice_ce + class_region")
    helped = []
    for column in nll.values():
        plain, one, repaired = (value(column[row]) for row in rows)
        helped.append((plain - one) / (plain - repaired))
    yield true(max(helped) < Decimal("0.5"), "in NLL by less than half as much as `class_region`")
    raised = [value(sets["phantom"]["Δ (95 %)"].iloc[:, 0][name]) for name in ("crac", "svls")]
    yield true(min(raised) > 0, f"CRaC and SVLS also raised DSC by {span(raised, 3, zero=False)}")
    trained = ["crac", "svls", "cals"]
    yield true(
        all(
            value(of[metric]["dice_ce + class_region"]) < min(map(value, of[metric][trained]))
            for of in (sets["hippocampus"], sets["acdc"]) for metric in ("NLL all", "ECE near")
        ),
        "than every network that was trained with a calibration loss and not repaired, on "
        "hippocampus MRI and on cardiac MRI (ACDC)",
    )  # fmt: skip
    yield true(
        [one[-1] == "▲" for one in nll["phantom"][trained]] == [True, False, True],
        "On phantoms it was level with SVLS and better than CRaC and CALS in NLL",
    )
    few = table(RETRAIN, "patients")
    few = few[few["patients"] == "2"]
    harm = few["worse"].map(value).groupby(few["method"]).sum()
    yield true(
        harm["class_region"] == 0 < min(harm["temperature"], harm["vector"]),
        "Two patients were enough not to do harm with `class_region`**; five or more are better. A "
        "single temperature or `vector` sometimes did harm with two",
    )
    cases = results("repair/cases")
    keys = ["set", "recipe", "seed"]
    means = cases[cases["decision"] == "argmax"].groupby([*keys, "method"])["nll_all"].mean()
    both = means.unstack("method")
    yield true(
        bool((both["class_region"] < both["uncalibrated"]).all()),
        f"`class_region` lowered the NLL of all {len(both)} networks of this study",
    )
    decided = tables(RETRAIN, "decisions")
    by_dice = [f"{method}, dice" for method in ("uncalibrated", "class_region")]
    gains = [value(of["Δ (95 %)"].iloc[:, 0][row]) for of in decided.values() for row in by_dice]
    worse = {
        decision: [
            value(decided[f"acdc, {recipe}"]["Δ (95 %)"].iloc[:, 1][f"{method}, {decision}"])
            for recipe in ("dice_ce", "svls") for method in ("uncalibrated", "class_region")
        ]
        for decision in ("dice", "offsets")
    }  # fmt: skip
    yield true(
        min(gains) > 0 and min(worse["dice"]) > 0,
        f"raises DSC a little** ({span(gains, 3, zero=False)}), but HD95 rose on ACDC (by "
        f"{span(worse['dice'], 1)} mm)",
    )
    average = sum(worse["offsets"]) / len(worse["offsets"])
    yield f"Offsets cost about {to(average, 0)} mm of HD95 on ACDC"


SENTENCES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": readme,
    METHOD: which_method,
    LOSS: which_loss,
    RETRAIN: retrain,
    "docs/costs.md": costs,
    "docs/guides/nnunet.md": guide_to_nnunet,
    "docs/guides/repair.md": guide_to_repair,
}


if __name__ == "__main__":
    main()
