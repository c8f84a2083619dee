"""What a study's file says, and what is refused before work starts."""

from __future__ import annotations

import pytest

from segcal.adapters.monai.study import MonaiHost
from segcal.study.plan import SegmentationStudy, cells, load_study
from segcal.study.running import check
from segcal.training.experiments import put, read_content, shipped
from tests.study.small import content_of, write_raw

HOSTS = {"monai": MonaiHost()}


def study(folder, *settings, **parts) -> SegmentationStudy:
    content = content_of(folder, **parts)
    for setting in settings:
        put(content, setting)
    return load_study(content, "study")


def segmentation_studies():
    found = {name: read_content(name, SegmentationStudy, "studies") for name in shipped("studies")}
    return [name for name, content in found.items() if content.get("kind") == "segmentation"]


def test_cells_are_sets_x_networks_x_recipes_x_seeds(tmp_path):
    chosen = study(
        tmp_path,
        recipes={
            "dice_ce": None,
            "far": {"recipe": "crac", "terms": {"crac": {"margin_inner": 9}}},
        },
        seeds=[3, 1],
    )
    found = cells(chosen)
    assert [c.name for c in found] == [
        "hearts, unet, dice_ce, seed 3", "hearts, unet, far, seed 3",
        "hearts, unet, dice_ce, seed 1", "hearts, unet, far, seed 1",
    ]  # fmt: skip
    assert chosen.compared_with == "dice_ce"
    far = found[1]
    assert far.folder == tmp_path / "study/hearts/unet/far/seed_3"
    experiment = HOSTS["monai"].resolve(far, 4)
    assert experiment.recipe == "crac"
    assert experiment.terms == {"crac": {"margin_inner": 9}}
    assert experiment.scheduler.args == {"T_max": 2}
    assert experiment.training.seed == 3
    assert experiment.data.root == tmp_path / "study/data/hearts/seed_3"


def test_sets_may_have_recipes_seeds_and_settings_of_their_own(tmp_path):
    raw = write_raw(tmp_path / "raw", [f"case_{i}" for i in range(6)])
    squares = {
        "raw": str(raw), "patients": {"validation": 1}, "folds": 3, "epochs": 5,
        "recipes": ["crac"], "data": {"size": [12, 12]}, "training": {"batch_size": 3},
        "optimizer": {"target": "torch.optim.SGD", "args": {"lr": 0.1}},
    }  # fmt: skip
    content = content_of(tmp_path)
    found = cells(load_study({**content, "sets": {**content["sets"], "squares": squares}}, "s"))
    of_squares = [c for c in found if c.set == "squares"]
    assert [(c.recipe, c.seed) for c in of_squares] == [("crac", 0), ("crac", 1), ("crac", 2)]
    experiment = HOSTS["monai"].resolve(of_squares[0], 2)
    assert experiment.optimizer.target == "torch.optim.SGD"
    assert (experiment.training.batch_size, experiment.training.epochs) == (3, 5)
    check(found, HOSTS)


def test_a_variant_may_train_otherwise(tmp_path):
    variant = {"recipe": "crac", "changes": {"training": {"early_stop": 1}}}
    found = cells(study(tmp_path, recipes={"dice_ce": None, "stopped": variant}))
    assert [HOSTS["monai"].resolve(c, 4).training.early_stop for c in found] == [None, 1]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed=[3]", "seed: unknown; there are kind, summary"),
        ("recipes=[nothing]", "recipes.nothing.recipe: no recipe, penalty or loss"),
        ("recipes=[ce, ce]", "name each recipe once"),
        ("recipes.ce.term=3", "recipes.ce.term: unknown; there are recipe, terms, changes"),
        ("seeds=[1, 1]", "seeds: expected different numbers"),
        ("sets.hearts.raw=a", "give either phantom: {} or raw: FOLDER"),
        ("sets.hearts.folds=2", "folds: leave it out"),
        ("sets.hearts.patients.test=null", "for phantoms, give the numbers"),
        ("sets.hearts.recipes=[ls]", "sets.hearts.recipes: ls is not in the study"),
        ("sets.data={phantom: {}, patients: {train: 1, validation: 1, test: 1}, epochs: 1}",
         "'data' cannot name a folder"),
        ("networks={a/b: {target: c}}", "'a/b' cannot name a folder"),
        ("repairs=[magic]", "no post-hoc method magic"),
        ("baseline=nacl", "'nacl' is not one of"),
        ("networks.unet.host=keras", "networks.unet.host: expected one of monai"),
        ("sets.hearts.phantom.size=3", "sets.hearts: phantom: .*there are shape"),
        ("sets.hearts.data.sise=3", "hearts, unet, dice_ce, seed 0: .*sise: unknown"),
        ("training.batches=3", "batches: unknown; there are epochs"),
        ("networks.unet.target=monai.networks.nets.Nothing", "cannot be found"),
        ("networks.unet.args.colour=3", "colour"),
        ("recipes={a: {recipe: crac, terms: {crac: {margin: 3}}}}", "takes no margin"),
        ("recipes={a: {recipe: crac, terms: {cals: {margin: 3}}}}", "has no term cals"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_work_starts(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        check(cells(study(tmp_path, setting), HOSTS), HOSTS)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw": "nowhere"}, "sets.squares: raw: nowhere: no such folder"),
        ({"patients": {"train": 5, "validation": 1, "test": 1}}, "there are 6, fewer than"),
        ({"patients": {"validation": 1}}, "give the number to train"),
        ({"folds": 7, "patients": {"validation": 1}}, "there are 6, fewer than"),
        ({"folds": 2, "patients": {"validation": 1, "test": 2}}, "a fold's patients test"),
        ({"patient": "person([0-9])"}, "finds nothing in case_0"),
        ({"patient": "("}, "is no regular expression"),
        ({"patient": "a", "cases_per_patient": 2}, "give only one of them"),
    ],
)
def test_folders_and_patients_are_checked(tmp_path, changes, message):
    raw = write_raw(tmp_path / "raw", [f"case_{i}" for i in range(4)], ["case_4", "case_5"])
    squares = {
        "raw": str(raw), "patients": {"train": 2, "validation": 1}, "epochs": 1,
        "data": {"size": [12, 12]}, **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        check(cells(study(tmp_path, sets={"squares": squares})), HOSTS)


@pytest.mark.parametrize("name", segmentation_studies())
def test_shipped_studies_fit(name):
    content = read_content(name, SegmentationStudy, "studies")
    chosen = load_study(content, name)
    assert chosen.summary
    assert chosen.cost is not None
    assert chosen.compared_with == "dice_ce"
    for cell in cells(chosen):
        if cell.host == "monai":
            HOSTS["monai"].resolve(cell, 5)


def test_there_are_the_promised_studies():
    assert {
        "phantom", "phantom_small", "hippocampus", "hippocampus_small", "chaos", "acdc", "flare",
    } <= set(segmentation_studies())  # fmt: skip
