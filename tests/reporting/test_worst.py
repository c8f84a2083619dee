"""The slice that is shown, what counts as which error, and names that no font would expect."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from segcal.reporting.picture import draw
from segcal.reporting.worst import ERRORS, IGNORED, error_map, plot_case

NAMES = {1: "_one $x", 2: "two & more"}


def volumes(dtype=np.int64):
    reference = np.zeros((4, 6, 5), dtype=dtype)
    prediction = reference.copy()
    prediction[2, :3], prediction[1, 0] = 1, 1
    return reference, prediction


def titles(figure):
    return [axis.get_title() for axis in figure.axes if axis.get_title()]


def legends(figure):
    return [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]


@pytest.mark.parametrize("image", [True, False])
@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
def test_the_slice_with_most_errors_is_drawn(image, confidence, dtype):
    reference, prediction = volumes(dtype)
    levels = np.full(reference.shape, 0.9, dtype=np.float16) if confidence else None
    grey = np.full(reference.shape, 3, dtype=np.int16) if image else None
    figure = plot_case(
        reference, prediction, levels, names=NAMES, spacing_mm=(8.0, 2.0, 1.0), title="a_$",
        image=grey,
    )  # fmt: skip
    assert figure.get_suptitle() == "a_$, slice 3 of 4, as stored"
    assert titles(figure) == [
        *(["image"] if image else []), "reference", "prediction",
        *(["confidence"] if confidence else []), "errors",
    ]  # fmt: skip
    assert {axis.get_aspect() for axis in figure.axes if axis.get_title()} == {2.0}
    assert legends(figure) == [["false positive"], ["_one $x"]]
    assert draw(figure, "").png.startswith(b"\x89PNG")


def test_errors_by_hand():
    reference = np.array([0, 0, 1, 1, 1, 2, 9, 9], np.uint8)
    prediction = np.array([0, 1, 0, 1, 2, 1, 1, 0], np.uint8)
    kinds = list(ERRORS)
    found = ["" if v == 0 else kinds[v - 1] for v in error_map(prediction, reference, 9)]
    assert found == [
        "", "false positive", "false negative", "", "wrong class", "wrong class", IGNORED, IGNORED,
    ]  # fmt: skip
    assert error_map(prediction, reference, None)[-2:].tolist() == [3, 2]


def test_what_is_ignored_decides_nothing():
    reference, prediction = volumes()
    reference[2] = 7
    figure = plot_case(
        reference, prediction, None, names=NAMES, spacing_mm=(1, 1, 1), title="a", ignore_index=7
    )
    assert figure.get_suptitle() == "a, slice 2 of 4, as stored"
    reference[1] = 7
    figure = plot_case(
        reference, prediction, None, names=NAMES, spacing_mm=(1, 1, 1), title="a", ignore_index=7
    )
    assert figure.get_suptitle() == "a, slice 2 of 4, as stored"  # no error: most labelled
    assert legends(figure) == [[IGNORED], ["_one $x", IGNORED]]


def test_colours_of_the_errors():
    reference, prediction = np.zeros((2, 1, 2, 2), int)
    reference[0, 0, 0], prediction[0, 1, 1] = 1, 2  # in slice 1 of 1
    figure = plot_case(reference, prediction, None, names=NAMES, spacing_mm=(1, 1, 1), title="a")
    errors = next(axis for axis in figure.axes if axis.get_title() == "errors")
    (painted,) = [image.get_array() for image in errors.images]
    assert painted[0, 0][:3].tolist() == list(to_rgba(ERRORS["false negative"])[:3])
    assert painted[1, 1][:3].tolist() == list(to_rgba(ERRORS["false positive"])[:3])
    assert painted[0, 1, 3] == painted[1, 0, 3] == 0


def test_many_labels_and_images_that_are_odd():
    rng = np.random.default_rng(0)
    names = {v: f"organ {v}" for v in range(1, 30)}
    reference, prediction = rng.integers(0, 30, (2, 2, 9, 40))
    image = np.full(reference.shape, np.nan, np.float32)
    figure = plot_case(
        reference, prediction, None, names=names, spacing_mm=(5, 0.5, 2), title="a", image=image
    )
    assert len(legends(figure)[1]) == 29
    assert draw(figure, "").png.startswith(b"\x89PNG")
