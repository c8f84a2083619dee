"""Readers of multi-label images: tiny data sets in the formats of the published ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segcal.classify.evaluation import evaluate_classifier
from segcal.classify.experiment import load_experiment
from segcal.classify.readers.annotations import (
    check_apart,
    edges,
    part_numbers,
    read_json,
    read_lines,
    read_xml,
)
from segcal.classify.readers.coco import read_coco
from segcal.classify.readers.nus_wide import read_nus_wide
from segcal.classify.readers.vaw import read_vaw
from segcal.classify.readers.vispr import read_vispr
from segcal.classify.readers.voc import read_voc
from segcal.classify.readers.wider import read_wider
from segcal.classify.report import write_classifier_report
from segcal.classify.training import ClassificationRun
from tests.classify.classifiers import write_config


def image(path: Path, grey: int = 0, size: tuple[int, int] = (8, 6)) -> None:
    """Write an image, `size` wide and high, whose upper left pixel is white."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", size, (grey, grey, grey))
    picture.putpixel((0, 0), (255, 255, 255))
    picture.save(path, quality=95)


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def shown(samples) -> list[tuple[str, list[int], int]]:
    """File, targets and part of every sample."""
    return [
        (samples.inputs.file(i).name, samples.targets[i].tolist(), int(samples.parts[i]))
        for i in range(len(samples))
    ]


def test_parts_have_the_names_of_the_data_set():
    assert part_numbers("a", None, "b") == [("a", 0), ("b", 2)]
    assert part_numbers(["a", "b"], "c", None) == [("a", 0), ("b", 0), ("c", 1)]
    for names in (("a", None, "a"), (None, "a", "b"), ([], "a", None), (["a", 1], None, None)):
        with pytest.raises(ValueError, match=r"^train"):
            part_numbers(*names)


def test_an_image_is_in_one_part(tmp_path):
    check_apart(["a", "b", "a"], [0, 2, 0], "w")
    with pytest.raises(ValueError, match=r"^w: image a is for train and for test; name parts"):
        check_apart(["a", "b", "a"], [0, 0, 2], "w")
    root = voc(tmp_path / "voc")
    write(root / "ImageSets" / "Main" / "val.txt", "000007\n")
    with pytest.raises(ValueError, match="image 000007 is for train and for validation"):
        read_voc(root, validation="val")
    root = vispr(tmp_path / "vispr")
    write(root / "test2017.txt", "annotations/train2017/2017_1.json\n")
    with pytest.raises(ValueError, match=r"2017_1\.jpg is for train and for test"):
        read_vispr(root)
    root = coco(tmp_path / "coco")
    file = root / "annotations" / "instances_val2014.json"
    write(file, json.loads(file.read_text().replace("9", "7")))
    with pytest.raises(ValueError, match="image 7 is for train and for test"):
        read_coco(root)


def test_edges_of_a_box():
    assert edges([2, 3.5, 4, 5], "b") == (2, 3.5, 6, 8.5)
    assert edges([2, 3, 0, -1], "b") == (2, 3, 3, 4)
    for box in ([1, 2, 3], [1, 2, 3, "4"], [1, 2, 3, float("nan")], [1, 2, 3, 1e9]):
        with pytest.raises(ValueError, match=r"^b: expected \[left, upper, width, height\]"):
            edges(box, "b")


def test_xml_declares_no_entities(tmp_path):
    file = tmp_path / "a.xml"
    file.write_text('<!DOCTYPE a [<!ENTITY b "b"><!ENTITY c "&b;&b;">]><a>&c;</a>')
    with pytest.raises(ValueError, match=r"a\.xml: declares a document type.*remove <!DOCTYPE"):
        read_xml(file)
    file.write_bytes('<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a><a/>'.encode("utf-16"))
    with pytest.raises(ValueError, match="declares a document type"):
        read_xml(file)
    file.write_text("<a><b></a>")
    with pytest.raises(ValueError, match=r"a\.xml: not XML \(mismatched tag"):
        read_xml(file)
    file.write_text("<a><b>1</b></a>")
    assert read_xml(file).findtext("b") == "1"


def test_files_are_bounded_and_named(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    for read in (read_json, read_xml, read_lines):
        with pytest.raises(ValueError, match=r"a\.json: cannot be read \(No such file.*complete"):
            read(file)
    file.write_text('{"a": 1, "deep": {"outline": [1], "b": 2}}')
    assert read_json(file, leave_out=("outline",)) == {"a": 1, "deep": {"b": 2}}
    file.write_text('{"a": ')
    with pytest.raises(ValueError, match=r"a\.json: not JSON \(.*download the file again"):
        read_json(file)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="not JSON"):
        read_json(file)
    for name in ("JSON_BYTES", "XML_BYTES", "TEXT_BYTES"):
        monkeypatch.setattr(f"segcal.classify.readers.annotations.{name}", 4)
    for read in (read_json, read_xml, read_lines):
        with pytest.raises(ValueError, match="100000 bytes are more than annotations have"):
            read(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read_lines(file)


def coco(root: Path) -> Path:
    """Two images that train, one of them empty, and one that tests."""
    categories = [{"id": 3, "name": "car"}, {"id": 1, "name": "person"}]
    outline = [[0, 0, 1, 0, 1, 1]]
    train = {
        "images": [{"id": 7, "file_name": "a.jpg"}, {"id": 5, "file_name": "b.jpg"}],
        "annotations": [
            {"id": 1, "image_id": 7, "category_id": 3, "iscrowd": 0, "segmentation": outline},
            {"id": 2, "image_id": 7, "category_id": 3, "iscrowd": 0, "segmentation": outline},
            {"id": 3, "image_id": 7, "category_id": 1, "iscrowd": 1, "segmentation": {"size": [1]}},
        ],
        "categories": categories,
    }
    test = {
        "images": [{"id": 9, "file_name": "c.jpg"}],
        "annotations": [{"id": 4, "image_id": 9, "category_id": 1, "segmentation": outline}],
        "categories": categories[::-1],
    }
    write(root / "annotations" / "instances_train2014.json", train)
    write(root / "annotations" / "instances_val2014.json", test)
    image(root / "train2014" / "a.jpg")
    image(root / "train2014" / "b.jpg")
    image(root / "images" / "val2014" / "c.jpg")
    return root


def test_coco(tmp_path):
    samples = read_coco(coco(tmp_path))
    assert samples.names == ("person", "car")  # by number
    assert shown(samples) == [("a.jpg", [1, 1], 0), ("c.jpg", [1, 0], 2)]
    kept = read_coco(tmp_path, keep_empty=True)
    assert shown(kept)[1] == ("b.jpg", [0, 0], 0)
    assert kept.inputs.decode(0).shape == (3, 6, 8)


def test_coco_names_what_is_wrong(tmp_path):
    root = coco(tmp_path)
    file = root / "annotations" / "instances_val2014.json"
    with pytest.raises(ValueError, match=r"instances_train2017\.json: cannot be read"):
        read_coco(root, train="train2017")
    content = json.loads(file.read_text())
    for key, value, message in (
        ("categories", [{"id": 1, "name": "cat"}], "other categories than person, car"),
        ("images", [{"id": "9"}], r"images\[0\]: id: expected a whole number, got '9'"),
        ("annotations", [{"image_id": 9}], r"annotations\[0\]: category_id: .* got nothing"),
        ("annotations", [{"image_id": 8, "category_id": 1}], "image 8 or category 1 is not listed"),
        ("annotations", None, "annotations: expected a list, got None"),
    ):
        write(file, {**content, key: value})
        with pytest.raises(ValueError, match=message) as raised:
            read_coco(root)
        assert str(file) in str(raised.value)
    write(file, content)
    (root / "images" / "val2014" / "c.jpg").unlink()
    with pytest.raises(ValueError, match=r"c\.jpg"):
        read_coco(root)
    (root / "images" / "val2014").rmdir()
    with pytest.raises(ValueError, match="expected val2014 or images/val2014 with images"):
        read_coco(root)


def voc(root: Path) -> Path:
    """Three images: a car and a difficult person; two people, one difficult; a difficult car."""

    def annotation(*objects: tuple[str, int]) -> str:
        each = "".join(
            f"<object><name>{name}</name><difficult>{difficult}</difficult>"
            "<part><name>head</name></part></object>"
            for name, difficult in objects
        )
        return f"<annotation><filename>x.jpg</filename>{each}</annotation>"

    for number, objects in {
        "000005": [("car", 0), ("person", 1)],
        "000007": [("person", 1), ("person", 0)],
        "000009": [("car", 1)],
    }.items():
        write(root / "Annotations" / f"{number}.xml", annotation(*objects))
        image(root / "JPEGImages" / f"{number}.jpg")
    write(root / "ImageSets" / "Main" / "trainval.txt", "000005\n000007\n")
    write(root / "ImageSets" / "Main" / "test.txt", "000009\n")
    return root


def test_voc(tmp_path):
    samples = read_voc(voc(tmp_path))
    assert samples.names == ("car", "person")
    assert shown(samples) == [
        ("000005.jpg", [1, -1], 0), ("000007.jpg", [0, 1], 0), ("000009.jpg", [-1, 0], 2),
    ]  # fmt: skip
    assert read_voc(tmp_path, difficult="positive").targets.tolist() == [[1, 1], [0, 1], [1, 0]]
    assert read_voc(tmp_path, difficult="negative").targets.tolist() == [[1, 0], [0, 1], [0, 0]]


def test_voc_names_what_is_wrong(tmp_path):
    root = voc(tmp_path)
    with pytest.raises(ValueError, match="difficult: expected one of"):
        read_voc(root, difficult="maybe")
    with pytest.raises(ValueError, match=r"Main/val\.txt: cannot be read"):
        read_voc(root, validation="val")
    file = root / "Annotations" / "000009.xml"
    for content, message in (
        ("<a/>", "expected <annotation>, got <a>"),
        ("<annotation><object><difficult>0</difficult></object></annotation>", "with <name> and"),
        ("<annotation><object><name>a</name><difficult>2</difficult></object></annotation>", "'2'"),
    ):
        write(file, content)
        with pytest.raises(ValueError, match=message) as raised:
            read_voc(root)
        assert str(file) in str(raised.value)
    file.unlink()
    with pytest.raises(ValueError, match=r"000009\.xml: cannot be read"):
        read_voc(root)


def wider(root: Path) -> Path:
    """Two people in an image of train, one in val, one in test."""
    attributes = {"0": "Male", "1": "hat", "10": "logo", "2": "jeans"}
    trainval = [
        {"file_name": "train/0--Parade/a.jpg", "scene_id": 0, "targets": [
            {"attribute": [1, -1, 0, 1], "bbox": [1, 2, 3, 4]},
            {"attribute": [-1, -1, -1, 0], "bbox": [0.5, 0, 2, 2]},
        ]},
        {"file_name": "val/0--Parade/b.jpg", "scene_id": 0, "targets": [
            {"attribute": [0, 0, 1, 1], "bbox": [0, 0, 1, 1]},
        ]},
    ]  # fmt: skip
    test = [{"file_name": "test/1--Match/c.jpg", "scene_id": 1, "targets": [
        {"attribute": [1, 1, 1, 1], "bbox": [0, 0, 8, 6]}]}]  # fmt: skip
    for name, images in (("trainval", trainval), ("test", test)):
        content = {"images": images, "attribute_id_map": attributes, "scene_id_map": {}}
        write(root / "Anno" / f"wider_attribute_{name}.json", content)
        for one in images:
            image(root / "Image" / one["file_name"])
    return root


def test_wider(tmp_path):
    samples = read_wider(wider(tmp_path))
    assert samples.names == ("Male", "hat", "jeans", "logo")  # by number, not as text
    assert shown(samples) == [
        ("a.jpg", [1, 0, -1, 1], 0), ("a.jpg", [0, 0, 0, -1], 0), ("b.jpg", [-1, -1, 1, 1], 0),
        ("c.jpg", [1, 1, 1, 1], 2),
    ]  # fmt: skip
    assert samples.groups[0] == samples.groups[1]
    assert len(set(samples.groups.tolist())) == 3
    assert samples.inputs.boxes.tolist()[:2] == [[1, 2, 4, 6], [0.5, 0, 2.5, 2]]
    assert samples.inputs.decode(0).shape == (3, 4, 3)  # 4 high, 3 wide
    assert samples.inputs.decode(1)[:, 0, 0].min() > 200  # holds the white pixel
    said = read_wider(tmp_path, train="train", validation="val")
    assert said.parts.tolist() == [0, 0, 1, 2]


def test_wider_names_what_is_wrong(tmp_path):
    root = wider(tmp_path)
    file = root / "Anno" / "wider_attribute_test.json"
    content = json.loads(file.read_text())

    def person(**changes):
        one = {"attribute": [1, 1, 1, 1], "bbox": [0, 0, 1, 1], **changes}
        return [{"file_name": "test/1--Match/c.jpg", "targets": [one]}]

    for change, message in (
        ({"attribute_id_map": {"0": "other"}, "images": []}, "other attributes than"),
        ({"attribute_id_map": {"a": "other"}}, "attribute_id_map: expected numbers"),
        ({"images": person(attribute=[1, 1, 1])}, "expected 4 of 1, -1 and 0"),
        ({"images": person(attribute=[1, 1, 1, 2])}, "expected 4 of 1, -1 and 0"),
        ({"images": person(attribute=[1, 1, 1, [1]])}, "expected 4 of 1, -1 and 0"),
        ({"images": person(bbox=[0, 0, 1])}, "expected \\[left, upper, width, height"),
        ({"images": [{"targets": []}]}, "file_name: expected text, got nothing"),
    ):
        write(file, {**content, **change})
        with pytest.raises(ValueError, match=message) as raised:
            read_wider(root)
        assert str(file) in str(raised.value)
    file.unlink()
    with pytest.raises(ValueError, match=r"expected wider_attribute_test\.json or Anno/wider"):
        read_wider(root)


def vaw(root: Path) -> Path:
    """Two objects of an image that train, one that validates, one that tests."""

    def instance(number, box, positive, negative):
        return {
            "image_id": number, "instance_id": "1", "instance_bbox": box, "object_name": "dog",
            "instance_polygon": [[[0, 0], [1, 1]]], "positive_attributes": positive,
            "negative_attributes": negative,
        }  # fmt: skip

    write(root / "data" / "train_part1.json", [
        instance("11", [1, 2, 3, 4], ["red"], ["wet", "old"]),
        instance("11", [0, 0, 0, 2], ["old", "wet"], ["wet"]),
    ])  # fmt: skip
    write(root / "data" / "train_part2.json", [])
    write(root / "data" / "val.json", [instance(12, [0, 0, 2, 2], [], ["red"])])
    write(root / "data" / "test.json", [instance(13, [0, 0, 2, 2], ["wet"], [])])
    write(root / "data" / "attribute_index.json", {"wet": 2, "old": 0, "red": 1, "new": 3})
    image(root / "vg" / "VG_100K" / "11.jpg")
    image(root / "vg" / "VG_100K" / "12.jpg")
    image(root / "vg" / "VG_100K_2" / "13.jpg")
    return root


def test_vaw(tmp_path):
    root = vaw(tmp_path)
    samples = read_vaw(root, root / "vg")
    assert samples.names == ("old", "red", "wet", "new")
    assert shown(samples) == [
        ("11.jpg", [0, 1, 0, -1], 0), ("11.jpg", [1, -1, -1, -1], 0),
        ("12.jpg", [-1, 0, -1, -1], 0), ("13.jpg", [-1, -1, 1, -1], 2),
    ]  # fmt: skip
    assert samples.groups.tolist() == [11, 11, 12, 13]
    assert samples.inputs.boxes.tolist()[:2] == [[1, 2, 4, 6], [0, 0, 1, 2]]
    assert samples.inputs.file(3).parent.name == "VG_100K_2"
    (root / "data" / "attribute_index.json").unlink()
    said = read_vaw(root, root / "vg", ("train_part1", "train_part2"), "val")
    assert said.names == ("old", "red", "wet")
    assert said.parts.tolist() == [0, 0, 1, 2]


def test_vaw_names_what_is_wrong(tmp_path):
    root = vaw(tmp_path)
    with pytest.raises(ValueError, match=r"images: .*none: no such folder"):
        read_vaw(root, root / "none")
    write(root / "data" / "attribute_index.json", {"wet": 2, "old": 0})
    with pytest.raises(ValueError, match=r"attribute_index\.json: has no red, which"):
        read_vaw(root, root / "vg")
    write(root / "data" / "attribute_index.json", {"wet": "a"})
    with pytest.raises(ValueError, match="expected numbers by the names"):
        read_vaw(root, root / "vg")
    file = root / "data" / "val.json"
    good = json.loads(file.read_text())[0]
    for content, message in (
        ({}, "expected a list of instances, got dict"),
        ([{**good, "image_id": "../x"}], r"\[0\]: image_id: expected a number, got '../x'"),
        ([{**good, "negative_attributes": None}], "negative_attributes: expected a list, got None"),
    ):
        write(file, content)
        with pytest.raises(ValueError, match=message) as raised:
            read_vaw(root, root / "vg")
        assert str(file) in str(raised.value)


def vispr(root: Path) -> Path:
    """One image each of train, val and test; an attribute without a number is none."""
    write(
        root / "attributes.tsv",
        "idx\tattribute_id\tdescription\n1\ta4_gender\tGender\n0\ta0_safe\tSafe \"images\"\n"
        "\ta99_old\tNo longer used\n2\ta9_face_complete\tFace\n",
    )  # fmt: skip
    for part, number, labels in (
        ("train2017", 1, ["a9_face_complete", "a4_gender"]),
        ("val2017", 2, ["a0_safe"]),
        ("test2017", 3, ["a4_gender"]),
    ):
        name = f"{part}/2017_{number}"
        write(root / f"{part}.txt", f"annotations/{name}.json\n")
        content = {"id": f"2017_{number}", "image_path": f"images/{name}.jpg", "labels": labels}
        write(root / "annotations" / f"{name}.json", content)
        image(root / "images" / f"{name}.jpg")
    return root


def test_vispr(tmp_path):
    samples = read_vispr(vispr(tmp_path))
    assert samples.names == ("a0_safe", "a4_gender", "a9_face_complete")
    assert shown(samples) == [
        ("2017_1.jpg", [0, 1, 1], 0), ("2017_2.jpg", [1, 0, 0], 0), ("2017_3.jpg", [0, 1, 0], 2),
    ]  # fmt: skip
    assert read_vispr(tmp_path, "train2017", "val2017").parts.tolist() == [0, 1, 2]


def test_vispr_names_what_is_wrong(tmp_path):
    root = vispr(tmp_path)
    file = root / "annotations" / "test2017" / "2017_3.json"
    content = json.loads(file.read_text())
    for change, message in (
        ({"labels": ["a5_eyes"]}, r"attributes\.tsv has no a5_eyes"),
        ({"labels": "a0_safe"}, "labels: expected a list, got 'a0_safe'"),
        ({"image_path": None}, "image_path: expected text, got None"),
    ):
        write(file, {**content, **change})
        with pytest.raises(ValueError, match=message) as raised:
            read_vispr(root)
        assert str(file) in str(raised.value)
    file.unlink()
    with pytest.raises(ValueError, match=r"2017_3\.json: cannot be read"):
        read_vispr(root)
    write(root / "attributes.tsv", "a\tb\n1\t2\n")
    with pytest.raises(ValueError, match=r"attributes\.tsv: expected columns idx"):
        read_vispr(root)


def nus_wide(root: Path) -> Path:
    """Two images that train, the second without a concept, and one that tests."""
    write(root / "ConceptsList" / "Concepts81.txt", "lake\nsky\n")
    write(root / "ImageList" / "TrainImagelist.txt", "actor\\0001_1.jpg\nboat\\0002_2.jpg\n")
    write(root / "ImageList" / "TestImagelist.txt", "boat\\0003_3.jpg\n")
    labels = root / "Groundtruth" / "TrainTestLabels"
    write(labels / "Labels_lake_Train.txt", "-1130179\n0\n")
    write(labels / "Labels_sky_Train.txt", "1\n0\n")
    write(labels / "Labels_lake_Test.txt", "1\n")
    write(labels / "Labels_sky_Test.txt", "0\n")
    for name in ("actor/0001_1.jpg", "boat/0002_2.jpg", "boat/0003_3.jpg"):
        image(root / "Flickr" / name)
    return root


def test_nus_wide(tmp_path):
    samples = read_nus_wide(nus_wide(tmp_path))
    assert samples.names == ("lake", "sky")
    assert shown(samples) == [
        ("0001_1.jpg", [-1, 1], 0), ("0002_2.jpg", [0, 0], 0), ("0003_3.jpg", [1, 0], 2),
    ]  # fmt: skip
    assert samples.inputs.file(1).parts[-3:] == ("Flickr", "boat", "0002_2.jpg")
    assert len(read_nus_wide(tmp_path, keep_empty=False)) == 2
    (tmp_path / "Flickr").rename(tmp_path / "elsewhere")
    assert len(read_nus_wide(tmp_path, images=tmp_path / "elsewhere")) == 3


def test_nus_wide_names_what_is_wrong(tmp_path):
    root = nus_wide(tmp_path)
    file = root / "Groundtruth" / "TrainTestLabels" / "Labels_sky_Train.txt"
    for content, message in (
        ("1\n", "expected a line for each of 2 images, got 1"),
        ("1\n2\n", "line 2: expected 0 or 1, got 2"),
        ("1\nyes\n", "expected 0 or 1 in every line"),
        ("1\n99999999999999999999\n", "expected 0 or 1 in every line"),
    ):
        write(file, content)
        with pytest.raises(ValueError, match=message) as raised:
            read_nus_wide(root)
        assert str(file) in str(raised.value)
    (root / "Flickr").rename(root / "gone")
    with pytest.raises(ValueError, match="expected Flickr or images or Images with images"):
        read_nus_wide(root)


@pytest.mark.parametrize(
    ("make", "read"),
    [(coco, read_coco), (voc, read_voc), (wider, read_wider), (vispr, read_vispr),
     (nus_wide, read_nus_wide)],
)  # fmt: skip
def test_the_targets_are_int8_and_the_checksum_is_of_the_files(tmp_path, make, read):
    samples = read(make(tmp_path))
    assert samples.targets.dtype == np.int8
    assert samples.checksum == read(tmp_path).checksum


def test_people_in_boxes_are_trained_on_and_found(tmp_path, one_thread):
    """From files to the sheet of images that queries find, with unknown attributes."""
    rng = np.random.default_rng(0)
    images: dict[str, list] = {"trainval": [], "test": []}
    for number in range(24):
        part = "test" if number >= 16 else "train"
        name = f"{part}/0--Parade/{number}.png"
        pixels = rng.integers(0, 60, (10, 20, 3), dtype=np.uint8)
        targets = []
        for left in (0, 10):
            bright, red = rng.integers(0, 2, 2)
            pixels[:, left : left + 10] += np.uint8(90 * bright)
            pixels[:, left : left + 10, 0] += np.uint8(90 * red)
            attributes = [2 * int(bright) - 1, 2 * int(red) - 1, 0]
            targets.append({"attribute": attributes, "bbox": [left, 0, 10, 10]})
        (tmp_path / "Image" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "Image" / name)
        whole = "trainval" if part == "train" else "test"
        images[whole].append({"file_name": name, "targets": targets})
    images["trainval"][0]["targets"][0]["attribute"][2] = 1  # not unknown everywhere
    for whole, of in images.items():
        content = {"images": of, "attribute_id_map": {"0": "bright", "1": "red", "2": "rare"}}
        write(tmp_path / f"wider_attribute_{whole}.json", content)
    resize = [{"target": "torchvision.transforms.v2.Resize", "args": {"size": [8, 8]}}]
    config = write_config(
        tmp_path, tmp_path, recipe="spa_lpr",
        data={"source": "wider", "args": {"path": str(tmp_path), "train": "train"},
              "resize": resize, "split": {"validation": 0.25, "seed": 0}},
        network={"target": "segcal.classify.networks.SmallCNN", "args": {"widths": [8]}},
        training={"epochs": 12, "batch_size": 8, "device": "cpu", "workers": 0},
    )  # fmt: skip
    ClassificationRun(load_experiment(config)).run()
    evaluated = evaluate_classifier(tmp_path / "run", device="cpu")
    assert {n: len(p) for n, p in evaluated.data.parts.items()} == {
        "train": 24, "validation": 8, "test": 16,
    }  # fmt: skip
    assert evaluated.data.names == ("bright", "red", "rare")
    files = write_classifier_report(tmp_path / "report", evaluated)
    assert {"retrieval_images.png", "loss.png"} <= set(files)
