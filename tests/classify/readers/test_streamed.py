"""Images that stay in their files: what is found, and what is decoded."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from segcal.classify.readers.image_files import (
    read_image_folder,
    read_image_list,
    read_tiny_imagenet,
)
from segcal.classify.readers.images import read_images
from segcal.classify.readers.samples import split
from segcal.classify.readers.streamed import streamed

NAN = float("nan")


def write_image(path, value, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), value, np.uint8)).save(path)
    return path


def test_a_box_takes_the_pixels_that_it_touches(tmp_path):
    """Columns 1 to 3 and rows 2 to 3 of 4 x 4; what lies outside of the image is not there."""
    array = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    Image.fromarray(array).save(tmp_path / "a.png")
    boxes = [[1.2, 2, 3.5, 9], [NAN] * 4, [-3, -3, 1, 1]]
    files = streamed([tmp_path / "a.png"] * 3, np.arange(3) % 2, "ab", boxes=boxes).inputs
    np.testing.assert_array_equal(files.decode(0), np.moveaxis(array[2:4, 1:4], 2, 0))
    np.testing.assert_array_equal(files.decode(1), np.moveaxis(array, 2, 0))
    np.testing.assert_array_equal(files[np.array([2])].decode(0), array[:1, :1].transpose(2, 0, 1))
    assert len(files) == 3
    assert files.file(2) == tmp_path / "a.png"


def test_grey_and_upright(tmp_path):
    """A camera that was turned says so: 2 x 1 pixels are 1 x 2."""
    image = Image.fromarray(np.array([[10, 200]], np.uint8))
    exif = image.getexif()
    exif[0x0112] = 6  # turn by a quarter
    image.save(tmp_path / "a.png", exif=exif)
    files = streamed([tmp_path / "a.png"] * 2, np.arange(2), "ab", colour=False).inputs
    assert files.decode(0).tolist() == [[[10], [200]]]
    assert files.channels == 1


def test_labels_boxes_and_groups(tmp_path):
    paths = [write_image(tmp_path / f"{i}.png", i) for i in range(4)]
    labels = np.array([[0, 1], [1, -1], [0, 0], [1, 1]], np.int8)
    groups = np.array([0, 0, 1, 2])
    samples = streamed(paths, labels, ("x", "y"), groups=groups)
    assert samples.multilabel
    assert len(samples) == 4
    taken = samples.take(np.array([3, 1]))
    assert taken.inputs.decode(0)[0, 0, 0] == 3
    assert taken.targets.tolist() == [[1, 1], [1, -1]]
    assert taken.groups.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([[0, 0, 4, 4]], r"here: expected boxes \(2, 4\), got \(1, 4\)"),
        (
            [[0, 0, 4, 4], [3, 0, 3, 2]],
            r"with pixels between.*got \[3.0, 0.0, 3.0, 2.0\] of .*b\.p",
        ),
    ],
)
def test_boxes_that_are_none(tmp_path, boxes, message):
    paths = [write_image(tmp_path / f"{name}.png", 0) for name in "ab"]
    with pytest.raises(ValueError, match=message):
        streamed(paths, np.arange(2), "ab", boxes=boxes, source="here")


def test_what_is_missing_or_damaged_is_named(tmp_path):
    paths = [write_image(tmp_path / f"{i}.png", i) for i in range(4)]
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:40])
    paths[2].write_text("no image")
    files = streamed(paths, np.arange(4) % 2, "ab", boxes=[[NAN] * 4] * 3 + [[9, 0, 12, 4]]).inputs
    for number in (1, 2):
        with pytest.raises(ValueError, match=rf"{number}\.png: not an image .*copy it again"):
            files.decode(number)
    with pytest.raises(ValueError, match=r"3\.png: the box \[9.0, .* lies outside of its 8 x 8"):
        files.decode(3)
    for path in paths[:3]:
        path.unlink()
    with pytest.raises(ValueError, match=r"images: 3 of 4 image files are missing: .*0\.png.*2\.p"):
        streamed(paths, np.arange(4) % 2, "ab")
    with pytest.raises(ValueError, match="images: expected images, found none"):
        streamed([], np.arange(0), "ab")


def test_checksum_is_of_names_and_boxes(tmp_path):
    def checksum(root="a", names="xyz", **kwargs):
        paths = [write_image(tmp_path / root / f"{n}.png", i) for i, n in enumerate(names)]
        return streamed(paths, np.arange(3) % 2, "ab", **kwargs).checksum

    first = checksum()
    assert checksum("b/c") == first  # copied elsewhere
    (tmp_path / "a" / "x.png").write_bytes(b"brought anew")
    assert (
        streamed([tmp_path / "a" / f"{n}.png" for n in "xyz"], np.arange(3) % 2, "ab").checksum
        == first
    )
    boxes = np.tile([0, 0, 4, 4], (3, 1))
    others = [checksum(names="xyw"), checksum(names="xzy"), checksum(boxes=boxes)]
    assert len({first, *others}) == 4


def test_folders_stream_what_is_read_as_a_whole(tmp_path):
    rng = np.random.default_rng(0)
    for part, n in (("train", 3), ("val", 2)):
        for kind in ("cat", "dog"):
            for i in range(n):
                path = tmp_path / part / kind / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    whole, found = read_images(tmp_path, 8), read_image_folder(tmp_path)
    assert found.names == whole.names == ("cat", "dog")
    assert found.parts.tolist() == whole.parts.tolist() == [0] * 6 + [1] * 4
    assert found.targets.tolist() == whole.targets.tolist()
    for number in range(10):
        np.testing.assert_array_equal(found.inputs.decode(number), whole.inputs[number])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: expected folders of images"):
        read_image_folder(tmp_path / "empty")


def test_lists_of_files(tmp_path):
    for name in ("train/a/x y.png", "train/b/1.png", "val/2.png"):
        write_image(tmp_path / name, 0)
    (tmp_path / "train.txt").write_text("train/a/x y.png 2\ntrain/b/1.png 0\n\n")
    (tmp_path / "val.txt").write_text("val/2.png 1\n")
    found = read_image_list(tmp_path, tmp_path / "train.txt", tmp_path / "val.txt")
    assert (found.names, found.targets.tolist()) == (("0", "1", "2"), [2, 0, 1])
    assert found.parts.tolist() == [0, 0, 1]
    assert found.inputs.file(0) == tmp_path / "train" / "a" / "x y.png"
    (tmp_path / "names.txt").write_text("tench\nshark\nray\n")
    named = read_image_list(tmp_path, tmp_path / "train.txt", names=tmp_path / "names.txt")
    assert named.names == ("tench", "shark", "ray")
    for text, names, message in (
        ("train/b/1.png\n", None, r"train\.txt: line 1: expected a file, a space and the number"),
        ("train/b/1.png 1\ntrain/b/1.png -1\n", None, r"train\.txt: line 2: .*png -1'"),
        ("\n", None, r"train\.txt: expected images to train"),
        ("train/b/1.png 3\n", "abc", "names: 3 of classes up to number 3"),
        ("train/b/9.png 0\ntrain/b/1.png 1\n", None, r"1 of 2 .* missing: .*train/b/9\.png; copy"),
    ):
        (tmp_path / "train.txt").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_image_list(tmp_path, tmp_path / "train.txt", names=list(names) if names else None)


def write_tiny_imagenet(root, images=4):
    """As it is downloaded, with two classes."""
    said = []
    for k, kind in enumerate(("n01443537", "n01629819")):
        for i in range(images):
            write_image(root / "train" / kind / "images" / f"{kind}_{i}.JPEG", 100 * k + i)
        (root / "train" / kind / f"{kind}_boxes.txt").write_text(f"{kind}_0.JPEG\t0\t10\t63\t58\n")
        write_image(root / "val" / "images" / f"val_{k}.JPEG", 100 * k + 50)
        said.append(f"val_{k}.JPEG\t{kind}\t0\t32\t44\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(said[::-1]))
    write_image(root / "test" / "images" / "test_0.JPEG", 0)
    return root


def test_tiny_imagenet_as_it_is_downloaded(tmp_path):
    found = read_tiny_imagenet(write_tiny_imagenet(tmp_path))
    assert found.names == ("n01443537", "n01629819")
    assert found.targets.tolist() == [0] * 4 + [1] * 4 + [1, 0]
    assert found.inputs.file(8).name == "val_1.JPEG"
    parts = split(found, validation=0.25, test=0.5, seed=0)
    assert np.bincount(parts).tolist() == [6, 2, 2]
    assert parts[8:].tolist() == [2, 2]
    said = tmp_path / "val" / "val_annotations.txt"
    said.write_text(said.read_text() + "val_7.JPEG\tn09\t0\t0\t1\t1\n")
    with pytest.raises(ValueError, match=r"val_annotations\.txt: line 3: expected the name"):
        read_tiny_imagenet(tmp_path)
    said.unlink()
    with pytest.raises(ValueError, match=r"val_annotations\.txt: cannot be read"):
        read_tiny_imagenet(tmp_path)
    with pytest.raises(ValueError, match="set path to tiny-imagenet-200"):
        read_tiny_imagenet(tmp_path / "val")
