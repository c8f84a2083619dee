"""Files by name, from folders and archives alike."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813

from segcal.io.sources import find_sources
from segcal.io.volumes import read_labels


def pack(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def contents(sources):
    found = {}
    for name, source in sources.items():
        with source.opened() as path:
            assert path.name == name.split("/")[-1]
            found[name] = path.read_text()
    return found


def test_a_folder_an_archive_and_archives_in_a_folder_hold_the_same(tmp_path):
    members = {"training/a/x.txt": "1", "training/b/x.txt": "2"}
    for name, text in members.items():
        (tmp_path / "plain" / name).parent.mkdir(parents=True)
        (tmp_path / "plain" / name).write_text(text)
    pack(tmp_path / "all.zip", members)
    pack(tmp_path / "part" / "training.zip", {"a/x.txt": "1", "b/x.txt": "2"})
    pack(tmp_path / "deep" / "training" / "a.zip", {"x.txt": "1"})
    pack(tmp_path / "deep" / "training" / "b.zip", {"x.txt": "2"})
    for root in ("plain", "all.zip", "part", "deep"):
        assert contents(find_sources(tmp_path / root)) == members, root


def test_an_archive_beside_what_it_held_is_not_looked_into(tmp_path):
    pack(tmp_path / "a.zip", {"x.txt": "packed"})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("unpacked")
    assert contents(find_sources(tmp_path)) == {"a/x.txt": "unpacked"}


def test_hidden_files_are_left_out_and_links_followed_once(tmp_path):
    root = tmp_path / "root"
    pack(root / "z.zip", {"__MACOSX/._x.txt": "", "._x.txt": "", "x.txt": "1"})
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x.txt").write_text("")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "y.txt").write_text("2")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "loop").symlink_to(root)
    assert contents(find_sources(root)) == {"z/x.txt": "1", "link/y.txt": "2"}


def test_stamps_change_with_the_content(tmp_path):
    before = find_sources(pack(tmp_path / "a.zip", {"x": "1", "y": "1"}))
    after = find_sources(pack(tmp_path / "a.zip", {"x": "2", "y": "1"}))
    assert before["x"].stamp != after["x"].stamp
    assert before["y"].stamp == after["y"].stamp


def test_members_cannot_leave_the_folder_they_are_unpacked_to(tmp_path):
    sources = find_sources(pack(tmp_path / "in" / "a.zip", {"../../evil.txt": "1"}))
    for source in sources.values():
        with source.opened() as path:
            assert path.resolve().parent.parent != tmp_path
    assert not list(tmp_path.rglob("evil.txt"))


def test_what_is_no_source(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        find_sources(tmp_path / "none")
    (tmp_path / "a.tar").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="expected a folder or a zip archive"):
        find_sources(tmp_path / "a.tar")


def test_a_damaged_member(tmp_path):
    path = pack(tmp_path / "a.zip", {"x.txt": "abc" * 1000})
    content = bytearray(path.read_bytes())
    content[40] ^= 0xFF
    path.write_bytes(content)
    with (
        pytest.raises(ValueError, match="cannot be unpacked"),
        find_sources(path)["x.txt"].opened(),
    ):
        pass


@pytest.mark.parametrize("name", ["a.1.mhd", "a.nhdr", "a.hdr"])
@pytest.mark.parametrize("packed", [False, True])
def test_volumes_in_two_files_are_unpacked_whole(tmp_path, name, packed):
    """Of a header alone nothing could be read."""
    labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    (tmp_path / "in").mkdir()
    sitk.WriteImage(sitk.GetImageFromArray(labels), str(tmp_path / "in" / name), packed)
    members = {f"training/{p.name}": p.read_bytes() for p in (tmp_path / "in").iterdir()}
    assert len(members) == 2
    other = {"training/b.raw": "1", "training/a.2.raw": "1", "a.raw": "1"}
    sources = find_sources(pack(tmp_path / "a.zip", {**members, **other}))
    with sources[f"training/{name}"].opened() as path:
        np.testing.assert_array_equal(read_labels(path).array, labels)
        assert len(list(path.parent.iterdir())) == 2
