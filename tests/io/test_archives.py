"""Archives of arrays: NumPy reads what is written, whatever packs it."""

import zipfile
import zlib

import numpy as np
import pytest

from segcal.io import archives
from segcal.io.archives import DAMAGED_STREAM, save_arrays, unpack_fast

WITHOUT = pytest.param(None, id="zlib")


@pytest.fixture(params=[pytest.param("isal", id="isal"), WITHOUT])
def packed(request, monkeypatch):
    """With ISA-L, and where it is missing."""
    if request.param is None:
        monkeypatch.setattr(archives, "isal_zlib", None)
    else:
        pytest.importorskip("isal")
    return request.param


def arrays():
    rng = np.random.default_rng(0)
    smooth = np.round(rng.random((3, 8, 20, 30)).cumsum(-1), 2).astype(np.float32)
    return {
        "probabilities": smooth, "half": smooth.astype(np.float16)[..., ::2],
        "turned": np.asfortranarray(smooth[0]), "labels": np.arange(7, dtype=np.uint8),
        "empty": np.zeros((0, 3)), "one": np.float64(2.5),
    }  # fmt: skip


def test_numpy_reads_what_is_written(packed, tmp_path):
    path = tmp_path / ".segcal-temporary"
    save_arrays(path, arrays())
    with np.load(path, allow_pickle=False) as found:
        assert set(found) == set(arrays())
        for name, array in arrays().items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype
            assert np.isfortran(found[name]) == np.isfortran(np.asarray(array))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        stored = archive.getinfo("probabilities.npy")
        assert stored.compress_type == zipfile.ZIP_DEFLATED
        assert stored.compress_size < 0.6 * stored.file_size
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        save_arrays(path, {"a": np.array([{}])})


@pytest.mark.parametrize("at_once", [1 << 10, 1 << 24])
def test_a_member_is_unpacked(packed, tmp_path, at_once):
    path, content = tmp_path / "a.zip", np.arange(300_000, dtype=np.int64).tobytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("deflated", content)
        archive.writestr("stored", content, zipfile.ZIP_STORED)
    for name in ("deflated", "stored"):
        with zipfile.ZipFile(path) as archive, archive.open(name) as member:
            unpack_fast(member)
            found = bytearray()
            while chunk := member.read(at_once):
                found += chunk
        assert found == content


@pytest.mark.parametrize("place", [0.1, 0.5, 0.95])
def test_damage_is_noticed(packed, tmp_path, place):
    path = tmp_path / "a.npz"
    save_arrays(path, {"a": np.random.default_rng(0).random(5000).round(3)})
    content = bytearray(path.read_bytes())
    content[int(place * len(content) * 0.9)] ^= 0x10
    path.write_bytes(content)
    damage = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, *DAMAGED_STREAM)
    with pytest.raises(damage):
        read_all(path)


def test_a_wrong_checksum_is_noticed(packed, tmp_path):
    """Every byte of the stream is as it was written, and the sum beside it says otherwise."""
    path = tmp_path / "a.npz"
    save_arrays(path, {"a": np.arange(5000)})
    with zipfile.ZipFile(path) as archive:
        stated = archive.getinfo("a.npy").CRC.to_bytes(4, "little")
    content = path.read_bytes()
    path.write_bytes(content.replace(stated, bytes(4)))
    with pytest.raises(zipfile.BadZipFile, match=r"CRC.*a\.npy"):
        read_all(path)


def read_all(path):
    with zipfile.ZipFile(path) as archive, archive.open("a.npy") as member:
        unpack_fast(member)
        return member.read()
