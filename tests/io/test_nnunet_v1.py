"""nnU-Net v1: the crop is put back, and its pickle runs nothing."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from segcal.io.nnunet_v1 import MAX_BYTES, read_crop
from segcal.io.probabilities import read_probabilities
from segcal.io.volumes import Geometry

SHAPE = (6, 8, 10)
GEOMETRY = Geometry(SHAPE, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
BOX = [[1, 5], [2, 7], [3, 9]]
P = np.random.default_rng(0).dirichlet(np.ones(2), (4, 5, 6)).transpose(3, 0, 1, 2)
PROPERTIES = OrderedDict(
    crop_bbox=BOX,
    original_size_of_raw_data=np.array(SHAPE),
    original_spacing=np.array([1.0, 0.5, 0.5]),
    list_of_data_files=["/data/case_0000.nii.gz"],
    names=np.array(["a", "b"]),
    seg_file=None,
    itk_origin=(0.0, -1.5, 2.0),
    classes=np.array([0.0, 1.0], np.float32),
    class_locations=OrderedDict({1: np.zeros((7, 3), np.int64)}),
    use_nonzero_mask_for_norm=OrderedDict({0: np.bool_(True)}),
    size_after_cropping=(4, 5, 6),
)


def case(tmp_path, properties=PROPERTIES, softmax=P, protocol=4):
    np.savez_compressed(tmp_path / "case.npz", softmax=softmax.astype(np.float16))
    content = properties
    if not isinstance(properties, bytes):
        content = pickle.dumps(properties, protocol)
    (tmp_path / "case.pkl").write_bytes(content)
    return tmp_path / "case.npz"


def test_is_put_back_with_background_around(tmp_path):
    path = case(tmp_path)
    array = read_probabilities(path, GEOMETRY, num_classes=2, reader="NibabelIOWithReorient")
    around = [(start, n - stop) for (start, stop), n in zip(BOX, SHAPE, strict=True)]
    for k, outside in ((0, 1.0), (1, 0.0)):
        expected = np.pad(P[k].astype(np.float16), around, constant_values=outside)
        np.testing.assert_array_equal(array[k], expected)
    assert array.dtype == np.float16
    assert read_crop(path).full_shape == SHAPE


def test_pickles_of_every_numpy(tmp_path):
    """NumPy 2 names its modules otherwise; boxes may be of NumPy integers."""
    boxes = {"crop_bbox": [[np.int64(a), np.int32(b)] for a, b in BOX]}
    big_endian = {"crop_bbox": BOX, "original_size_of_raw_data": np.array(SHAPE, ">i4")}
    for properties in (boxes, big_endian, PROPERTIES):
        new = pickle.dumps(properties, 3)
        old = new.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        for content in {new, old}:
            crop = read_crop(case(tmp_path, content))
            assert crop.box == ((1, 5), (2, 7), (3, 9))
            assert crop.full_shape in (None, SHAPE)


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({}, r"expected nnU-Net v1's crop_bbox .*, got None"),
        ([1], r"expected nnU-Net v1's crop_bbox"),
        ({"crop_bbox": BOX[:2]}, r"expected nnU-Net v1's crop_bbox .*, got \[\[1, 5\], \[2, 7\]\]"),
        ({"crop_bbox": [[1, 1], [2, 7], [3, 9]]}, "expected nnU-Net v1's crop_bbox"),
        ({"crop_bbox": [[-4, 0], [2, 7], [3, 9]]}, "expected nnU-Net v1's crop_bbox"),
        (
            {"crop_bbox": [[1, 5], [2, 7], [3, 8]]},
            r"\(K, 4, 5, 5\) like the crop_bbox in case\.pkl",
        ),
        ({"crop_bbox": [[3, 7], [2, 7], [3, 9]]}, "does not fit the reference"),
        (
            {"crop_bbox": BOX, "original_size_of_raw_data": np.array([6, 8, 11])},
            r"size \(z, y, x\) \(6, 8, 11\) does not fit the reference, \(6, 8, 10\)",
        ),
        (b"\x80\x04 no pickle", "not a plain pickle file"),
        (pickle.dumps(PROPERTIES)[:-40], "not a plain pickle file"),
    ],
)
def test_refuses(tmp_path, properties, message):
    path = case(tmp_path, properties)
    with pytest.raises(ValueError, match=message) as error:
        read_probabilities(path, GEOMETRY)
    assert str(tmp_path / "case.") in str(error.value)


def test_needs_the_pickle_and_a_small_one(tmp_path):
    path = case(tmp_path)
    os.truncate(tmp_path / "case.pkl", MAX_BYTES + 1)
    with pytest.raises(ValueError, match=r"case\.pkl: 67108865 bytes"):
        read_crop(path)
    (tmp_path / "case.pkl").unlink()
    np.savez(path, softmax=P)  # never stretched
    with pytest.raises(ValueError, match=r"cropped softmax .* needs case\.pkl beside it"):
        read_probabilities(path, GEOMETRY)
    whole = np.ones((2, *SHAPE)) / 2  # of the reference's size, it lies where the reference does
    np.savez(path, softmax=whole)
    np.testing.assert_array_equal(read_probabilities(path, GEOMETRY), whole)


class Runs:
    """An object whose pickle makes `call` run."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("way", ["system", "eval", "method", "numpy"])
def test_runs_nothing(tmp_path, way, protocol):
    mark = tmp_path / "ran"
    evil, wanted = {
        "system": (Runs(os.system, f"touch {mark}"), r"system"),
        "eval": (Runs(eval, f"open({str(mark)!r}, 'w').close()"), r"eval"),
        "method": (Runs(Path.touch, mark), r"getattr|Path"),
        "numpy": (Runs(np.savetxt, str(mark), [1.0]), r"savetxt"),
    }[way]
    content = pickle.dumps({"crop_bbox": BOX, "more": evil}, protocol)
    path = case(tmp_path, content)
    with pytest.raises(
        ValueError, match=rf"case\.pkl: .*\(it wants \S*({wanted})\S*, which is ref"
    ):
        read_probabilities(path, GEOMETRY)
    assert not mark.exists()
    pickle.loads(content)  # an unpickler that trusts does run it
    assert mark.exists()


@pytest.mark.parametrize("place", [b"r\xff\xff\xff\x0f", b"p268435455\n"])
def test_a_place_in_the_memo_takes_no_memory(tmp_path, place):
    path = case(tmp_path, b"\x80\x04N" + place + b".")
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"case\.pkl: not a plain pickle file \(place 268435455"):
        read_crop(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("operation", [b"\x96", b"\x8e", b"\x8d"])
def test_a_length_that_is_not_true_takes_no_memory(tmp_path, operation):
    path = case(tmp_path, b"\x80\x05" + operation + (1 << 31).to_bytes(8, "little") + b"a.")
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"case\.pkl: not a plain pickle file"):
        read_crop(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
