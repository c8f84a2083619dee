"""What a user sees of ``segcal convert``."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.datasets import raw
from tests.datasets.sources import files, labels, lie, save, write_acdc
from tests.datasets.test_abdomen import write_amos, write_btcv
from tests.datasets.test_flare import write_21, write_22
from tests.datasets.test_msd import write_listed, write_task


def run(*arguments):
    done = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    return done, " ".join(done.output.split())


def test_acdc(tmp_path):
    root = write_acdc(tmp_path / "src", ["DCM", "RV"], testing=1)
    done, text = run("acdc", root, tmp_path / "raw")
    assert done.exit_code == 0, done.output
    folder = tmp_path / "raw" / "Dataset027_ACDC"
    assert "4 training and 2 test cases in" in text
    assert "6 cases are not copied bit for bit; conversion.json says" in text
    assert "nnUNetv2_plan_and_preprocess -d 27 --verify_dataset_integrity" in text
    assert "splits_final.json $nnUNet_preprocessed/Dataset027_ACDC/" in text
    assert {"dataset.json", "splits_final.json", "conversion.json"} <= set(files(folder))
    done, text = run("acdc", root, folder)
    assert done.exit_code == 0
    assert "(6 were there before), 0 skipped" in text


def test_what_is_skipped_is_listed(tmp_path):
    root = write_acdc(tmp_path / "src", ["DCM", "RV"])
    save(root / "training/patient002/patient002_frame07_gt.nii.gz", labels(5), change=lie)
    (root / "training/patient001/patient001_frame07_gt.nii.gz").unlink()
    done, text = run("acdc", root, tmp_path / "raw")
    assert done.exit_code == 1
    assert "patient001_frame07 it has no label map (_gt)" in text
    assert "patient002_frame07" in text
    assert "2 training and 0 test cases" in text
    assert "2 skipped" in text


def test_the_split_of_the_papers(tmp_path):
    root = write_acdc(tmp_path / "src", ["DCM"] * 10, testing=1)
    done, text = run("acdc", root, tmp_path / "raw", "--split", "paper", "--dataset-id", 31)
    assert done.exit_code == 0, done.output
    assert "16 training and 4 test cases in" in text
    assert "1 patients in testing, which the split of the papers leaves out" in text
    done, text = run("acdc", root, tmp_path / "raw", "--dataset-id", 31)
    assert done.exit_code == 2
    assert "--force: " in text
    assert "from an earlier conversion" in text
    done, text = run("acdc", root, tmp_path / "raw", "--dataset-id", 31, "--force")
    assert done.exit_code == 0, done.output
    assert "20 training and 2 test cases" in text


def test_flare_and_msd(tmp_path):
    done, text = run("flare", write_21(tmp_path / "f21"), tmp_path / "raw")
    assert done.exit_code == 0, done.output
    assert "1 images without labels, left out" in text
    assert "Dataset021_FLARE21" in text
    assert "splits_final.json" not in text
    done, text = run("flare", write_22(tmp_path / "f22"), tmp_path / "raw", "--release", "22")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "raw/Dataset022_FLARE22/dataset.json").is_file()
    done, text = run("msd", write_task(tmp_path / "Task05_Prostate"), tmp_path / "raw")
    assert done.exit_code == 0, done.output
    assert "2 training and 1 test cases" in text
    assert (tmp_path / "raw/Dataset005_Prostate/dataset.json").is_file()


def test_amos_and_btcv(tmp_path):
    done, text = run("amos", write_amos(tmp_path / "amos22"), tmp_path / "raw")
    assert done.exit_code == 0, done.output
    assert "3 MRI scans, which are not part of task 1" in text
    assert "3 training and 1 test cases" in text
    assert "splits_final.json $nnUNet_preprocessed/Dataset218_AMOS22CT/" in text
    done, text = run("amos", tmp_path / "amos22", tmp_path / "raw", "--task", 2)
    assert done.exit_code == 0, done.output
    assert "5 training and 2 test cases" in text
    done, text = run("btcv", write_btcv(tmp_path / "RawData"), tmp_path / "raw")
    assert done.exit_code == 0, done.output
    assert "3 training and 1 test cases" in text
    assert (tmp_path / "raw/Dataset017_BTCV/splits_final.json").is_file()


def test_what_no_list_names_is_counted(tmp_path):
    done, text = run("msd", write_listed(tmp_path / "x"), tmp_path / "raw", "--dataset-id", 17)
    assert done.exit_code == 0, done.output
    assert "1 volumes that dataset.json does not list, left out" in text
    assert "3 training and 3 test cases" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("amos", "empty", "raw"), "expected imagesTr/amos_0001.nii.gz"),
        (("btcv", "empty", "raw"), "expected img0001.nii.gz and label0001.nii.gz"),
        (("acdc", "none", "raw"), "no such file or folder"),
        (("acdc", "empty", "raw"), "expected ACDC's training/patient001"),
        (("flare", "empty", "raw"), "--release: the names of the files do not tell"),
        (("msd", "empty", "raw"), "expected the folder of one task"),
        (("msd", "task", "raw"), "not named like Task05_Prostate; give a --dataset-id"),
        (("msd", "task", "task/raw", "--dataset-id", "5"), "would be read as input"),
    ],
)
def test_wrong_usage(tmp_path, monkeypatch, arguments, message):
    (tmp_path / "empty").mkdir()
    write_task(tmp_path / "task")
    monkeypatch.chdir(tmp_path)
    done, text = run(*arguments)
    assert done.exit_code == 2
    assert message in text
    assert not (tmp_path / "raw").exists()


def test_nothing_to_train_on(tmp_path):
    root = write_task(tmp_path / "Task05_Prostate")
    for path in (root / "labelsTr").iterdir():
        path.write_bytes(b"")
    done, text = run("msd", root, tmp_path / "raw")
    assert done.exit_code == 1
    assert "No dataset.json is written" in text


def test_interrupted(tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(raw, "check_case", stop)
    root = write_task(tmp_path / "Task05_Prostate")
    done, text = run("msd", root, tmp_path / "raw")
    assert done.exit_code == 130
    assert "the same command goes on from there" in text
    monkeypatch.undo()
    done, _ = run("msd", root, tmp_path / "raw")
    assert done.exit_code == 0
