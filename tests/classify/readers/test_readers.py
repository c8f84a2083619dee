"""Readers of data sets for classification."""

from __future__ import annotations

import gzip
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from segcal.classify.readers.archives import read_npz, write_npz
from segcal.classify.readers.arff import read_arff
from segcal.classify.readers.cifar import read_cifar10
from segcal.classify.readers.csv import read_csv
from segcal.classify.readers.images import read_images
from segcal.classify.readers.samples import Samples
from segcal.classify.readers.texts import near_duplicates, read_docstrings, read_texts, words
from tests.data_paths import real_data

ARFF = """@relation music
@attribute tempo numeric
@attribute key numeric
@attribute happy {0,1}
@attribute sad {0,1}
@data
1.5,2,1,0
-3,4e1,0,?
"""


class Trap:
    """What a stranger's pickle could hold: loading it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return (Path.mkdir, (self.folder,))


def test_labels_of_a_table_as_arff(tmp_path):
    plain, packed = tmp_path / "music.arff", tmp_path / "music.arff.gz"
    plain.write_text(ARFF)
    packed.write_bytes(gzip.compress(ARFF.encode()))
    xml = tmp_path / "music.xml"
    xml.write_text(
        '<?xml version="1.0"?><!-- of Mulan --><labels xmlns="http://mulan.sourceforge.net/labels">'
        '<label name="happy"></label><label name="sad"></label></labels>'
    )
    for path, labels in ((plain, 2), (packed, ["happy", "sad"]), (packed, str(xml))):
        read = read_arff(path, labels)
        assert read.names == ("happy", "sad")
        assert read.inputs.tolist() == [[1.5, 2.0], [-3.0, 40.0]]
        assert read.targets.tolist() == [[1, 0], [0, -1]]


def test_declared_numbers_and_categories(tmp_path):
    """A {0,1} is a number, other lists get a column a value; a missing category has none."""
    path = tmp_path / "a.arff"
    path.write_text(
        "@relation a\n@attribute flag {0,1}\n@attribute no {1.5}\n@attribute up {true,false}\n"
        "@attribute zone {1,2,3}\n@attribute hue {red,'light blue'}\n@attribute y {0,1}\n@data\n"
        "1,1.5,false,3,'light blue',1\n0,1.5,true,1,red,0\n1,1.5,true,?,red,1\n"
    )
    read = read_arff(path, 1)
    assert read.inputs.tolist() == [
        [1, 1.5, 0, 0, 0, 1, 0, 1], [0, 1.5, 1, 1, 0, 0, 1, 0], [1, 1.5, 1, 0, 0, 0, 1, 0],
    ]  # fmt: skip
    assert read.targets.tolist() == [[1], [0], [1]]
    path.write_text(path.read_text().partition("@data")[0] + "@data\n{}\n{3 2, 4 'light blue'}\n")
    first = [0, 1.5, 1, 1, 0, 0, 1, 0]  # of what is not named
    assert read_arff(path, 1).inputs.tolist() == [first, [0, 1.5, 1, 0, 1, 0, 0, 1]]
    path.write_text(path.read_text().replace("{3 2,", "{3 4,"))
    with pytest.raises(ValueError, match="line 10: '4' is no declared value of its column"):
        read_arff(path, 1)


@pytest.mark.parametrize(("said", "labels"), [("2", ["tempo", "key"]), ("-2", ["happy", "sad"])])
def test_labels_that_meka_names(tmp_path, said, labels):
    path = tmp_path / "music.arff"
    text = ARFF.replace("relation music", f"relation 'Music: -C {said} -split-number 400'")
    text = text.partition("1.5,2")[0] + "1,0,1,0\n0,1,0,1\n"
    path.write_text(text)
    assert read_arff(path).names == tuple(labels)
    assert read_arff(path).targets.tolist()[0] == [1, 0]


def test_labels_that_a_file_beside_names(tmp_path):
    (tmp_path / "music.xml").write_text('<labels><label name="sad"></label></labels>')
    (tmp_path / "music.arff.gz").write_bytes(gzip.compress(ARFF.encode()))
    assert read_arff(tmp_path / "music.arff.gz").names == ("sad",)
    assert read_arff(tmp_path / "music.arff.gz").inputs.tolist() == [[1.5, 2, 1], [-3, 40, 0]]


def test_labels_in_the_first_columns(tmp_path):
    path = tmp_path / "a.arff"
    path.write_text("@relation a\n@attribute l numeric\n@attribute x numeric\n@data\n1,7\n0,8\n")
    read = read_arff(path, -1)
    assert (read.names, read.inputs.tolist()) == (("l",), [[7.0], [8.0]])
    assert read.targets.tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("text", "labels", "message"),
    [
        (ARFF, 4, "labels 4 of 4 columns leave no features"),
        (ARFF, ["angry"], "has no column angry"),
        (ARFF, None, r"@relation has no -C n of MEKA, and no music\.xml of Mulan is beside"),
        (ARFF, [], "music.arff: labels: expected names, .* got 0 of 4"),
        (ARFF, ["happy", "happy"], "expected names, each once"),
        (ARFF, ["tempo", "key", "happy", "sad"], "that leave features; got 4 of 4"),
        (ARFF, ["key", "happy", "sad"], r"label key: expected 0, 1 .* or \?"),
        ("tempo,key\n1,2\n", 1, "not an ARFF file .*line 1: expected @attribute"),
        (ARFF.replace("@data", ""), 2, "not an ARFF file .*line 7"),
        (ARFF.replace("sad", "happy"), 2, "line 5: happy is declared twice"),
        (ARFF.replace("key numeric", "key string"), 2, "line 3: expected numeric .* got string"),
        (ARFF.partition("1.5")[0], 2, "music.arff: expected samples"),
        (ARFF.replace("0,?", "0"), 2, "music.arff: line 8: expected 4 values, got 3"),
        (ARFF.replace("0,?", "0,?,1"), 2, "music.arff: line 8: expected 4 values, got 5"),
        (ARFF.replace("-3", "low"), 2, "music.arff: line 8: .*'low'"),
        (
            ARFF.replace("0,?", "0,2"),
            2,
            "line 8: '2' is no declared value of its column",
        ),
        (ARFF.replace("-3", "'-3"), 2, "music.arff: line 8: cannot be read from "),
        (ARFF.replace("-3,4e1,0,?", "{0 1, 4 1}"), 2, "line 8: expected columns 0 to 3, each once"),
        (ARFF.replace("-3,4e1,0,?", "{0 1, 0 1}"), 2, "line 8: expected columns 0 to 3, each once"),
        (ARFF.replace("-3,4e1,0,?", "{0 1"), 2, "line 8: a sparse row does not end"),
    ],
)
def test_unfit_arff_is_refused(tmp_path, text, labels, message):
    path = tmp_path / "music.arff"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_arff(path, labels)


def test_sparse_rows(tmp_path):
    """What is not named is 0, of declared values the first, as Weka has it: here true, and 1."""
    path = tmp_path / "a.arff"
    path.write_text(
        "% of Mulan\n@RELATION a\n@ATTRIBUTE x REAL\n@ATTRIBUTE y integer\n"
        "@ATTRIBUTE l {TRUE, False}\n@ATTRIBUTE m {1,0}\n@ATTRIBUTE n {0,1}\n@DATA\n"
        "{0 1, 1 2.5, 4 1}\n{}\n% none\n{ 1 -3 , 2 False,3 0,4 ? }\n4,\t5,False,0,1\n"
    )
    read = read_arff(path, 3)
    assert read.inputs.tolist() == [[1, 2.5], [0, 0], [0, -3], [4, 5]]
    assert read.targets.tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, -1], [0, 0, 1]]


def test_quotes_in_arff(tmp_path):
    path = tmp_path / "a.arff"
    path.write_text(
        "@relation a\n"
        '@attribute "two words" numeric\n'
        r"@attribute 'don\'t, \"do\"' real [0,1]" "\n"
        '@attribute \'a b\' {"0", \'1\'}\n'
        "@attribute '?' {0,1}\n"
        "@data\n'1',2,\"1\",?\n3 ,\"4\", 0 ,'1'\n{1 '5', 2 '1'}\n",
        encoding="utf-8-sig",
    )  # fmt: skip
    read = read_arff(path, ["a b", "?"])
    assert read.inputs.tolist() == [[1, 2], [3, 4], [0, 5]]
    assert read.targets.tolist() == [[1, -1], [0, 1], [1, 0]]
    with pytest.raises(ValueError, match=r"""label don't, "do": expected 0"""):
        read_arff(path, ['don\'t, "do"', "?", "a b"])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "cp037"])
def test_xml_with_declarations_is_refused(tmp_path, encoding):
    path, xml = tmp_path / "music.arff", tmp_path / "music.xml"
    path.write_text(ARFF)
    declared = '<!DOCTYPE labels [<!ENTITY a "happy">]><labels><label name="&a;"/></labels>'
    xml.write_bytes(declared.encode(encoding))
    with pytest.raises(ValueError, match=r"music\.xml: not an XML file of labels"):
        read_arff(path, str(xml))


@pytest.mark.parametrize(
    ("name", "rows", "features", "positive"),
    [
        ("emotions", 593, 72, [173, 166, 264, 148, 168, 189]),
        ("scene", 2407, 294, [427, 364, 397, 433, 533, 431]),
    ],
)
def test_published_tables(name, rows, features, positive):
    read = read_arff(real_data("multilabel") / f"{name}.arff.gz", 6)
    assert read.inputs.shape == (rows, features)
    assert (read.targets == 1).sum(0).tolist() == positive


def test_csv(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,kind,y,use\n1,b,4,train\n2,a,5,test\n3,b,6,validation\n")
    read = read_csv(path, "kind", part="use")
    assert (read.names, read.targets.tolist()) == (("a", "b"), [1, 0, 1])
    assert read.inputs.tolist() == [[1, 4], [2, 5], [3, 6]]
    assert read.parts.tolist() == [0, 2, 1]
    path.write_text("x,l,m\n1,0,1\n2,,0\n")
    read = read_csv(path, ["l", "m"])
    assert (read.names, read.targets.tolist()) == (("l", "m"), [[0, 1], [-1, 0]])
    for target, message in (("k", "has no column k"), ("m", "m: 1 rows have no value, .* row 1")):
        path.write_text("x,l,m\n1,0,\n2,1,0\n")
        with pytest.raises(ValueError, match=message):
            read_csv(path, target)
    path.write_text("x,l\nred,0\nblue,1\n")
    with pytest.raises(ValueError, match="features that are numbers, got x"):
        read_csv(path, "l")
    packed = tmp_path / "half.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes())[:-12])
    for read in (read_csv, read_texts):
        with pytest.raises(ValueError, match=r"half\.csv\.gz: cannot be read as CSV"):
            read(packed, target="l")


def test_only_what_is_empty_is_missing(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,kind\n1,NA\n2,None\n3,null\n4,nan\n5,NA\n")
    read = read_csv(path, "kind")
    assert (read.names, read.targets.tolist()) == (("NA", "None", "nan", "null"), [0, 1, 3, 2, 0])
    path.write_text("x,l,m\n1,0,1\n2,NA,\n")
    with pytest.raises(ValueError, match="l, m: expected 0, 1, or empty"):
        read_csv(path, ["l", "m"])
    path.write_text("text,label\nNA,null\nthe moon,None\n")
    assert read_texts(path).names == ("None", "null")
    for rows, column in ((",a\nmoon,b", "text"), ("moon,a\nsun,", "label")):
        path.write_text(f"text,label\n{rows}\n")
        with pytest.raises(ValueError, match=f"{column}: 1 rows have no value"):
            read_texts(path)


def test_columns_without_a_name_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    pd.DataFrame({"x": [3, 4], "kind": ["a", "b"]}).to_csv(path)
    with pytest.raises(ValueError, match=r"t\.csv: a column has no name \(Unnamed: 0.*remove it"):
        read_csv(path, "kind")
    path.write_text("x,kind\n0,2,a\n1,4,b\n")
    with pytest.raises(ValueError, match=r"t\.csv: .*line 2: expected 2 values .* got 3"):
        read_csv(path, "kind")
    path.write_text("x,kind\n1,a,\n3,b,\n")
    assert read_csv(path, "kind").inputs.tolist() == [[1], [3]]
    path.write_text("x,y,z\n1,0,1\n2,1,0\n")
    with pytest.raises(ValueError, match="each once; got 'y' twice"):
        read_csv(path, ["y", "y"])
    path.write_text("x,y,z\n\n1,0,1\n2,1\n")  # what is missing at the end is no unknown label
    with pytest.raises(ValueError, match=r"t\.csv: .*line 4: expected 3 values .* got 2"):
        read_csv(path, ["y", "z"])
    path.write_text("x,y,y\n1,0,1\n")  # the second would be a feature
    with pytest.raises(ValueError, match=r"t\.csv: .*a column is repeated: y"):
        read_csv(path, "y")


@pytest.mark.parametrize("ending", ["xz", "gz", "bz2", "zip"])
@pytest.mark.parametrize("read", [read_csv, read_texts])
def test_damaged_tables_are_refused(tmp_path, ending, read):
    path = tmp_path / f"t.csv.{ending}"
    path.write_bytes(b"PK\x03\x04\xff\xfe text,label\nmoon,a\nsun,b\n")
    with pytest.raises(ValueError, match=rf"t\.csv\.{ending}: cannot be read as CSV"):
        read(path, target="label")


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("labels", [1, 3])
def test_medmnist(tmp_path, colour, labels):
    rng = np.random.default_rng(0)
    arrays, sizes = {}, {"train": 4, "val": 2, "test": 3}
    for part, n in sizes.items():
        arrays[f"{part}_images"] = rng.integers(
            0, 256, (n, 8, 8, 3) if colour else (n, 8, 8), np.uint8
        )
        arrays[f"{part}_labels"] = np.arange(n * labels).reshape(n, labels) % 2
    np.savez(tmp_path / "a.npz", **arrays)
    read = read_npz(tmp_path / "a.npz")
    assert read.parts.tolist() == [0] * 4 + [1] * 2 + [2] * 3
    first = arrays["val_images"][0]
    expected = first.transpose(2, 0, 1) if colour else first[None]
    assert read.inputs.dtype == np.uint8
    np.testing.assert_array_equal(read.inputs[4], expected)
    assert read.multilabel == (labels == 3)
    targets = np.concatenate([arrays[f"{part}_labels"] for part in sizes])
    np.testing.assert_array_equal(read.targets.reshape(targets.shape), targets)


def test_archive_round_trip(tmp_path):
    given = Samples(
        np.arange(24, dtype=np.uint8).reshape(3, 1, 2, 4),
        np.array([[0, 1], [1, -1], [0, 0]], np.int8),
        ("liver", "spleen"),
        np.array([0, 2, -1]),
        np.array([0, 1, 1]),
    )
    write_npz(tmp_path / "a.npz", given)
    read = read_npz(tmp_path / "a.npz")
    assert read.names == given.names
    for key in ("inputs", "targets", "parts", "groups"):
        np.testing.assert_array_equal(getattr(read, key), getattr(given, key))


def test_nothing_in_an_archive_is_run(tmp_path):
    trap = tmp_path / "sprung"
    np.savez(
        tmp_path / "a.npz", inputs=np.zeros((2, 1)), targets=np.array([Trap(trap)] * 2, object)
    )
    with pytest.raises(ValueError, match=r"not an \.npz of plain arrays"):
        read_npz(tmp_path / "a.npz")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, "inputs and targets, got x"),
        ({"inputs": np.zeros((2, 2, 2, 2, 2)), "targets": np.zeros(2)}, "expected numbers"),
        (
            {"inputs": np.zeros((2, 1)), "targets": np.arange(2), "parts": np.array(["a", "b"])},
            "parts: expected train",
        ),
        ({"inputs": np.zeros((2, 1)), "targets": np.array([0.5, 1])}, "expected whole numbers"),
        (
            {"inputs": np.zeros((2, 1)), "targets": np.array([[0, 1], [np.nan, 1]])},
            "expected whole numbers",
        ),
        ({"inputs": np.zeros((2, 1)), "targets": np.array([["a"], ["b"]])}, "whole numbers"),
        ({"inputs": np.zeros((2, 1)), "targets": np.zeros((2, 1, 1))}, r"\(2, 1, 1\)"),
        ({"inputs": np.zeros((2, 1)), "targets": np.array([[256], [1]])}, "targets 0, 1 or -1"),
        ({"inputs": np.zeros((2, 1)), "targets": np.array([[255], [1]])}, "targets 0, 1 or -1"),
        *(
            ({"inputs": np.zeros((2, 1)), "targets": np.arange(2), name: value}, f"{name}: .*list")
            for name, value in (
                ("parts", np.array([["train"], ["test"]])),
                ("names", np.array("a")),
                ("groups", np.zeros((2, 1))),
            )
        ),
        (
            {"inputs": np.zeros((2, 1)), "targets": np.arange(2), "names": np.array(["a", "a"])},
            "each once; got 'a' twice",
        ),
        (
            {"inputs": np.zeros((2, 1)), "targets": np.array([0, 30_000_000])},
            "got 30000000 in 2 samples; .*add names",
        ),
        ({"inputs": np.zeros((2, 1)), "targets": np.zeros(2)}, "at least two classes .*got 0"),
    ],
)
def test_unfit_archives_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        read_npz(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"not an \.npz"):
        read_npz(tmp_path / "none.npz")


def test_classes_without_names_have_their_numbers(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=np.zeros((2, 1)), targets=np.array([0, 999]))
    assert read_npz(tmp_path / "a.npz").names == tuple(map(str, range(1000)))


BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def cifar(seed: int) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (2, 3072), np.uint8), [seed, 9 - seed]


def python2_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """The instructions that Python 2 wrote for a batch, protocol 2, by hand."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    data = images.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b")
        + b"\x87R(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03"
        + short(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<I", len(data)) + data + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    entries = short(b"batch_label") + short(b"batch 1 of 5") + short(b"labels") + numbers
    entries += short(b"data") + array + short(b"filenames") + b"](" + short(b"a.png") + b"e"
    return b"\x80\x02}(" + entries + b"u."


def test_the_pickle_by_hand_is_one():
    images, labels = cifar(3)
    content = pickle.loads(python2_pickle(images, labels), encoding="bytes")
    assert content[b"labels"] == labels
    np.testing.assert_array_equal(content[b"data"], images)


@pytest.mark.parametrize("form", ["binary", "python 2", "python 3"])
def test_cifar10(tmp_path, form):
    for i, name in enumerate(BATCHES):
        images, labels = cifar(i)
        if form == "binary":
            rows = np.concatenate([np.array(labels, np.uint8)[:, None], images], 1)
            (tmp_path / f"{name}.bin").write_bytes(rows.tobytes())
        elif form == "python 2":
            (tmp_path / name).write_bytes(python2_pickle(images, labels))
        else:
            content = {b"batch_label": b"b", b"labels": labels, b"data": images, b"filenames": []}
            (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    read = read_cifar10(tmp_path)
    assert read.targets.tolist() == [c for i in range(6) for c in cifar(i)[1]]
    assert read.parts.tolist() == [0] * 10 + [2] * 2
    np.testing.assert_array_equal(read.inputs[4], cifar(2)[0][0].reshape(3, 32, 32))
    assert read.names[3] == "cat"


def test_pickles_of_strangers_are_not_run(tmp_path):
    trap = tmp_path / "sprung"
    for i, name in enumerate(BATCHES):
        images, labels = cifar(i)
        content = {b"batch_label": b"b", b"labels": [*labels, Trap(trap)], b"data": images}
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    read_cifar10(tmp_path)
    assert not trap.exists()
    (tmp_path / "test_batch").write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(ValueError, match="take the binary version"):
        read_cifar10(tmp_path)
    assert not trap.exists()
    (tmp_path / "test_batch").write_bytes(python2_pickle(cifar(5)[0], [5, 10]))
    with pytest.raises(ValueError, match="take the binary version"):
        read_cifar10(tmp_path)


def test_unfit_cifar10_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected data_batch_1\.bin"):
        read_cifar10(tmp_path)
    for name in BATCHES:
        (tmp_path / f"{name}.bin").write_bytes(b"\x00" * 100)
    with pytest.raises(ValueError, match="images of 3073 bytes, got 100"):
        read_cifar10(tmp_path)


def test_images_in_folders(tmp_path):
    for part, (kind, value) in zip(
        ("train", "train", "val", "test"), (("cat", 10), ("dog", 200), ("cat", 30), ("dog", 40)),
        strict=True,
    ):  # fmt: skip
        folder = tmp_path / part / kind
        folder.mkdir(parents=True)
        Image.new("RGB", (7, 5), (value, 0, 0)).save(folder / "a.png")
    read = read_images(tmp_path, (4, 6))
    assert read.names == ("cat", "dog")
    assert read.inputs.shape == (4, 3, 4, 6)
    found = {(p, k, v) for p, k, v in zip(
        read.parts.tolist(), read.targets.tolist(), read.inputs[:, 0, 0, 0].tolist(), strict=True
    )}  # fmt: skip
    assert found == {(0, 0, 10), (0, 1, 200), (1, 0, 30), (2, 1, 40)}
    assert read_images(tmp_path / "train", 8, colour=False).parts is None
    (tmp_path / "train" / "cat" / "b.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"b\.png: not an image"):
        read_images(tmp_path, 8)
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    Image.fromarray(deep).save(tmp_path / "train" / "cat" / "b.png")
    with pytest.raises(ValueError, match=r"b\.png: .*more than 8 bits"):
        read_images(tmp_path, 8)
    with pytest.raises(ValueError, match="found no image"):
        read_images(tmp_path / "train" / "cat", 8)
    (tmp_path / "horse").mkdir()
    with pytest.raises(ValueError, match=r"either folders of classes or .*beside these.* horse"):
        read_images(tmp_path, 8)


@pytest.mark.parametrize("size", [0, -8, [8], [8, 0], [8, 8, 8], "88", 8.0, None])
def test_sizes_that_are_none_are_refused(tmp_path, size):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(b"")
    with pytest.raises(ValueError, match="size: expected pixels, from 1, or"):
        read_images(tmp_path, size)


def test_images_are_upright(tmp_path):
    """6 in EXIF: the camera was turned; the picture's left column is its top row."""
    image = Image.new("L", (8, 8), 0)
    image.paste(200, (0, 0, 2, 8))  # left
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind, said in (("cat", exif), ("dog", None)):
        (tmp_path / kind).mkdir()
        image.save(tmp_path / kind / "a.png", exif=said)
    turned, as_it_is = read_images(tmp_path, 8, colour=False).inputs[:, 0]
    assert (turned[:2] == 200).all()
    assert (turned[2:] == 0).all()
    assert (as_it_is == turned.T).all()


def test_words():
    found = words(["The cat, the CAT-2 a", "dog"], vocabulary=100, length=4)
    the, cat, dog = (1 + zlib.crc32(w) % 99 for w in (b"the", b"cat", b"dog"))
    assert found.tolist() == [[the, cat, the, cat], [dog, 0, 0, 0]]


def test_texts(tmp_path):
    for part, kind, text in (
        ("20news-bydate-train", "sci.med", "my heart"),
        ("20news-bydate-train", "sci.space", "the moon"),
        ("20news-bydate-test", "sci.med", "a doctor"),
    ):
        folder = tmp_path / part / kind
        folder.mkdir(parents=True)
        (folder / "1").write_bytes(text.encode() + b" \xff")
    read = read_texts(tmp_path, length=3)
    assert read.names == ("sci.med", "sci.space")
    assert sorted(zip(read.parts.tolist(), read.targets.tolist(), strict=True)) == [
        (0, 0), (0, 1), (2, 0)]  # fmt: skip
    assert read_texts(tmp_path / "20news-bydate-train").parts is None
    for hidden in ("__MACOSX/sci.med", ".cache/x", "20news-bydate-test/sci.med/__MACOSX"):
        (tmp_path / hidden).mkdir(parents=True)
        (tmp_path / hidden / "._1").write_text("nothing")
        (tmp_path / hidden / "1").write_text("nothing")
    (tmp_path / "20news-bydate-test" / "sci.med" / "._1").write_text("nothing")
    again = read_texts(tmp_path, length=3)
    assert again.names == read.names
    np.testing.assert_array_equal(again.inputs, read.inputs)
    np.testing.assert_array_equal(again.parts, read.parts)
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match=r"20news-bydate-train .*beside these there are notes"):
        read_texts(tmp_path)
    table = tmp_path / "t.csv"
    table.write_text('text,label\n"the moon, again",b\nmy heart,a\n')
    read = read_texts(table, length=3)
    assert (read.names, read.targets.tolist()) == (("a", "b"), [1, 0])
    with pytest.raises(ValueError, match="has no column topic"):
        read_texts(table, target="topic")


def test_classes_whose_names_hold_the_letters_of_parts(tmp_path):
    for kind in ("trains", "contest", "medieval"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "1").write_text("the moon")
    read = read_texts(tmp_path)
    assert (read.names, read.parts) == (("contest", "medieval", "trains"), None)


def test_texts_that_are_alike_are_one_group():
    """1 and 2 share two words of four, 2 and 3 the same, and 4 only one of five with any."""
    found = near_duplicates(np.array([[1, 2, 3], [2, 3, 4], [3, 4, 5], [5, 6, 7], [2, 2, 1]]))
    assert found.tolist() == [0, 0, 0, 1, 0]  # the last: words 1 and 2, of three of the first


def test_docstrings_of_installed_packages():
    read = read_docstrings(["segcal", "nibabel"], most=20, length=30)
    assert read.names == ("nibabel", "segcal")
    assert np.bincount(read.targets).tolist() == [20, 20]
    numbers = {1 + zlib.crc32(w) % 19999 for w in (b"segcal", b"nibabel")}
    assert not numbers & set(read.inputs.ravel().tolist())  # the names are taken out
    assert read.groups.tolist() == near_duplicates(read.inputs).tolist()
    again = read_docstrings(["segcal", "nibabel"], most=20, length=30)
    np.testing.assert_array_equal(read.inputs, again.inputs)
    with pytest.raises(ValueError, match="nothing_of_that_name is not installed"):
        read_docstrings(["nothing_of_that_name"])
