"""Transforms for post-processing: post-hoc calibration, and selecting one of two heads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from monai.config import KeysCollection, NdarrayOrTensor
from monai.data import MetaTensor
from monai.data.utils import affine_to_spacing
from monai.transforms import MapTransform, Transform
from monai.utils import TransformBackends, convert_to_dst_type, convert_to_tensor
from torch import Tensor

from segcal.arrays import check_choice
from segcal.heads import HEADS, Head
from segcal.posthoc.calibrator import Calibrator
from segcal.posthoc.links import logits_of
from segcal.repair.saved import SavedCalibrator, read_calibrator
from segcal.tensors import check_probabilities, is_softmax

__all__ = [
    "Calibrate",
    "CalibrateD",
    "CalibrateDict",
    "Calibrated",
    "SelectHead",
    "SelectHeadD",
    "SelectHeadDict",
    "SelectHeadd",
]

CalibratorOrPath = Calibrator | SavedCalibrator | str | PathLike[str]


class Calibrate(Transform):
    """Calibrated probabilities of one sample's logits, in place of Activations.

    Example::

        post = Compose([Calibrate("calibrator.json"), AsDiscrete(argmax=True)])
        labels = post(SlidingWindowInferer(roi_size)(images, network)[0])

    Hand over whole images, as above, and not patches: how difficult a case is
    (``class_region_case``) and what lies at a boundary are seen in the whole alone.

    A MetaTensor stays a MetaTensor, with its affine and applied operations. A calibrator with bands
    of distance to the boundary measures them in mm by the voxel size of the affine; for any other
    array it counts voxels.

    Args:
        calibrator: path of a file that ``segcal calibrate fit`` wrote, or a fitted calibrator.
        from_probabilities: True if the network or an earlier transform has applied the softmax (or
            the sigmoid, for a calibrator per channel); log-probabilities then replace the logits.

    Raises:
        ValueError: a file that holds no calibrator, or a calibrator that has not been fitted.
    """

    backend: ClassVar = [TransformBackends.TORCH]

    def __init__(self, calibrator: CalibratorOrPath, *, from_probabilities: bool = False) -> None:
        if isinstance(calibrator, str | PathLike):
            calibrator = read_calibrator(Path(calibrator))
        if isinstance(calibrator, SavedCalibrator):
            calibrator = calibrator.calibrator
        if not isinstance(calibrator, Calibrator):
            raise ValueError(
                f"calibrator: expected a path or a Calibrator, got {type(calibrator).__name__}"
            )
        if not calibrator.facts:
            raise ValueError(
                f"calibrator: {type(calibrator).__name__} is not fitted yet; call fit, or give the "
                "path of a calibrator.json"
            )
        self.calibrator = calibrator
        self.from_probabilities = from_probabilities

    def __call__(self, img: NdarrayOrTensor) -> NdarrayOrTensor:
        """Return probabilities like `img`, at least float32.

        Args:
            img: channel-first logits ``(K, *S)``, K as in the fit; not a batch.

        Raises:
            ValueError: another shape, or logits where probabilities were announced and vice versa.
        """
        x = convert_to_tensor(img, track_meta=False)
        self._check(x)
        per_channel = self.calibrator.per_channel
        logits = logits_of(x, regions=per_channel) if self.from_probabilities else x
        found = self.calibrator.apply(logits[None], spacing_mm=_spacing_mm(img))[0]
        return convert_to_dst_type(found, img, dtype=found.dtype)[0]

    def _check(self, x: Tensor) -> None:
        expected = self.calibrator.facts["num_classes"]
        if x.ndim < 1 or len(x) != expected or not x.is_floating_point():
            what = "probabilities" if self.from_probabilities else "logits"
            raise ValueError(
                f"img: expected floating, channel-first {what} ({expected}, *S) of one sample, as "
                f"in the fit, got {x.dtype} {tuple(x.shape)}"
            )
        exclusive = not self.calibrator.per_channel
        if self.from_probabilities:
            check_probabilities(x)
            if exclusive and x.numel() and not is_softmax(x[None]):
                raise ValueError(
                    "img: expected probabilities whose channels sum to 1 in every voxel, got "
                    f"sums of {float(x.sum(0).min()):.4g} to {float(x.sum(0).max()):.4g}; Invertd "
                    "pads with 0 what a crop left out, so calibrate before it"
                )
        elif exclusive and is_softmax(x[None]):
            raise ValueError(
                "img: expected logits, got channels that sum to 1 in every voxel; take the softmax "
                "out of the network and Activations out of the pipeline, or say "
                "from_probabilities=True"
            )


class Calibrated(MapTransform):
    """Dictionary version of :class:`Calibrate`.

    Example, of a bundle's ``postprocessing``::

        - _target_: segcal.adapters.monai.transforms.Calibrated
          keys: pred
          calibrator: $@bundle_root + '/models/calibrator.json'

    Put it before Invertd to calibrate on the grid that the network saw, or after Invertd to
    calibrate on the grid of the image. Choose the grid that the calibrator was fitted on.

    Args:
        keys: of the logits to calibrate.
        calibrator: see :class:`Calibrate`.
        from_probabilities: see :class:`Calibrate`.
        allow_missing_keys: whether samples may lack keys.

    Raises:
        ValueError: as :class:`Calibrate`; an error in a sample names its key.
    """

    backend: ClassVar = Calibrate.backend

    def __init__(
        self,
        keys: KeysCollection,
        calibrator: CalibratorOrPath,
        *,
        from_probabilities: bool = False,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.calibrate = Calibrate(calibrator, from_probabilities=from_probabilities)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the sample with probabilities in place of logits."""
        found = dict(data)
        for key in self.key_iterator(found):
            try:
                found[key] = self.calibrate(found[key])
            except ValueError as error:
                raise ValueError(f"key {key!r}: {error}") from None
        return found


CalibrateD = CalibrateDict = Calibrated
"""Other spellings, as MONAI's dictionary transforms have them."""


class SelectHead(Transform):
    """The channels of one head of a network with two heads, see :mod:`segcal.heads`.

    Example::

        masks = Compose([SelectHead("decision"), AsDiscrete(argmax=True)])
        probabilities = Compose([SelectHead("probability"), Activations(softmax=True)])

    Args:
        head: ``decision`` or ``probability``.

    Raises:
        ValueError: another name.
    """

    backend: ClassVar = [TransformBackends.TORCH, TransformBackends.NUMPY]

    def __init__(self, head: Head) -> None:
        check_choice("head", head, HEADS)
        self.place = HEADS.index(head)

    def __call__(self, img: NdarrayOrTensor) -> NdarrayOrTensor:
        """Return the channels ``(K, *S)`` of channel-first logits ``(2 K, *S)``; not a batch.

        Raises:
            ValueError: an odd number of channels.
        """
        channels = img.shape[0]
        if channels % 2:
            raise ValueError(f"img: expected the channels of two heads, (2 K, *S), got {channels}")
        half = channels // 2
        return img[self.place * half : (self.place + 1) * half]


class SelectHeadd(MapTransform):
    """Dictionary version of :class:`SelectHead`.

    Args:
        keys: of the logits.
        head: ``decision`` or ``probability``.
        allow_missing_keys: whether samples may lack keys.
    """

    backend: ClassVar = SelectHead.backend

    def __init__(
        self, keys: KeysCollection, head: Head, *, allow_missing_keys: bool = False
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.select = SelectHead(head)

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return `data` with the channels of one head in place of the channels of both."""
        done = dict(data)
        for key in self.key_iterator(done):
            done[key] = self.select(done[key])
        return done


SelectHeadD = SelectHeadDict = SelectHeadd


def _spacing_mm(img: NdarrayOrTensor) -> list[float] | None:
    """Voxel size along the spatial axes of ``(K, *S)``; None where it is unknown."""
    if not isinstance(img, MetaTensor):
        return None
    axes, affine = img.ndim - 1, img.affine
    spacing = torch.as_tensor(affine_to_spacing(affine, r=len(affine) - 1)).tolist()
    return spacing[:axes] if len(spacing) >= axes else None
