"""Texts whose words begin with vectors from a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.classify.building import build_network
from segcal.classify.data import load
from segcal.classify.evaluation import evaluate_classifier
from segcal.classify.experiment import load_experiment
from segcal.classify.readers.texts import read_texts
from segcal.classify.readers.vectors import read_vectors
from segcal.classify.training import ClassificationRun
from tests.classify.classifiers import write_config
from tests.conftest import close

pytestmark = pytest.mark.usefixtures("one_thread")
GLOVE = "the 0.5 -1\nship 1 2\nat name@domain.com 7 7\ngod -2 0.25\nship 9 9\n"
NETWORK = {"target": "segcal.classify.networks.GPoolCNN", "args": {"embedding": 2, "widths": [4]}}


@pytest.fixture
def newsgroups(tmp_path):
    """As 20 Newsgroups by date: two groups, six texts of each to train and two to test."""
    for part, n in (("train", 6), ("test", 2)):
        for group, text in (("sci.space", "The ship, orbiting"), ("alt.atheism", "The God")):
            for i in range(n):
                file = tmp_path / "20news" / f"20news-bydate-{part}" / group / str(100 + i)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    (tmp_path / "glove.txt").write_text(GLOVE)
    return tmp_path / "20news"


def test_known_words_have_numbers_of_their_own(newsgroups, tmp_path):
    """In the order of the file beyond the vocabulary: the 10, ship 11, god 12; orbiting below."""
    found = read_texts(newsgroups, vocabulary=10, length=4, vectors=tmp_path / "glove.txt")
    assert found.names == ("alt.atheism", "sci.space")
    assert np.bincount(found.parts + 1).tolist() == [0, 12, 0, 4]
    assert found.inputs[found.targets == 0][0].tolist() == [10, 12, 0, 0]
    space = found.inputs[found.targets == 1][0].tolist()
    assert [space[0], space[1], space[3]] == [10, 11, 0]
    assert 1 <= space[2] < 10
    assert np.isnan(found.vectors[:10]).all()
    assert found.vectors[10:].tolist() == [[0.5, -1], [1, 2], [-2, 0.25]]


def test_a_network_begins_with_them(newsgroups, tmp_path):
    args = {"path": str(newsgroups), "vocabulary": 5000, "length": 4}
    args["vectors"] = str(tmp_path / "glove.txt")
    path = write_config(
        tmp_path, newsgroups, network=NETWORK, recipe="ce",
        data={"source": "texts", "args": args}, training={"epochs": 1},
    )  # fmt: skip
    experiment = load_experiment(path)
    weight = build_network(experiment, load(experiment.data)).network.embedding.weight
    assert weight.shape == (5003, 2)
    close(weight[5000:], torch.tensor([[0.5, -1], [1, 2], [-2, 0.25]]))
    assert not weight[0].any()
    deviation = torch.tensor([0.5, -1, 1, 2, -2, 0.25]).std(correction=0)
    close(weight[1:5000].std(), deviation, rtol=0.05)
    done = ClassificationRun(experiment).run()
    assert len(evaluate_classifier(done.folder, device="cpu").part) == 4
    other = f"output={tmp_path / 'other'}"
    with pytest.raises(ValueError, match=r"vectors: have 2 .* set network.args.embedding=2"):
        ClassificationRun(load_experiment(path, ["network.args.embedding=3", other]))
    mlp = "network={target: segcal.classify.networks.MLP}"
    with pytest.raises(
        ValueError, match=r"data.args.vectors: .*MLP cannot start from word vectors"
    ):
        ClassificationRun(load_experiment(path, [mlp, other]))


@pytest.mark.parametrize("head", ["", "3 2\n"])
def test_files_of_vectors(tmp_path, head):
    (tmp_path / "v.txt").write_text(head + GLOVE)
    found = read_vectors(tmp_path / "v.txt", {"god", "ship", "at name@domain.com", "nothing"})
    assert {word: vector.tolist() for word, vector in found.items()} == {
        "ship": [1, 2], "at name@domain.com": [7, 7], "god": [-2, 0.25]}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 1 2\nship 1\n", r"v\.txt: line 2: expected 2 numbers after the word, .* got '1'"),
        ("the 1 2\nship 1 x\n", r"v\.txt: line 2: expected 2 numbers .* got '1 x'"),
        ("the 1 2\nship nan 3\n", r"v\.txt: line 2: expected 2 numbers"),
        ("the 1 2\n", r"v\.txt: has no vector of any word of the texts"),
        ("", r"v\.txt: line 1: expected a word and its numbers"),
        (None, r"v\.txt: cannot be read"),
    ],
)
def test_files_that_are_none_of_vectors(tmp_path, text, message):
    if text is not None:
        (tmp_path / "v.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_vectors(tmp_path / "v.txt", {"ship"})
