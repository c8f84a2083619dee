"""Shapes, checks, one-hot encoding and masks, which all other modules share.

Canonical layouts, everywhere in segcal: ``logits`` and ``probs`` are floating ``(N, K, *S)``,
``labels`` integer ``(N, *S)``, ``mask`` bool ``(N, *S)``; ``S`` has 1 to 3 axes, or none for
classification. Half precision is promoted to float32, float64 stays.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from segcal.arrays import (
    MANY,
    PROBABILITY_TOLERANCE,
    applied_twice,
    check_choice,
    holds_masks,
)
from segcal.late_checks import LATE_DEVICES, label_watch

HALF = (torch.float16, torch.bfloat16)
SUMS_TO_ONE = 1e-2
"""Largest distance to 1 of a voxel's sum of probabilities after a softmax (in bfloat16)."""
UNKNOWN = -1
"""Target of a label of which it is unknown whether it applies."""
Reduction = Literal["mean", "sum", "none"]
ClassReduction = Literal["mean", "sum"]


@contextmanager
def full_precision(x: Tensor) -> Iterator[Tensor]:
    """Yield `x` in at least float32, with autocast switched off inside the block.

    Squares and cubes of logits leave the range of fp16 from 256 on, and autocast does not
    protect ``abs``, ``mul`` or ``mean``.
    """
    with torch.autocast(x.device.type, enabled=False):
        yield x.float() if x.dtype in HALF else x


@contextmanager
def double_needed(what: str) -> Iterator[None]:
    """Say what to do where a device such as Apple's ``mps`` has no float64.

    Args:
        what: what is being moved to the device.

    Raises:
        ValueError: instead of torch's TypeError.
    """
    try:
        yield
    except TypeError as error:
        if "float64" not in str(error):
            raise
        raise ValueError(
            f"{what}: keeps its multipliers and their sums in float64, which this device does not "
            f"have ({error}); train on the CPU or on an NVIDIA GPU. To run the network alone on "
            "this device, leave the loss on the CPU and give it logits.cpu() and labels.cpu()"
        ) from error


def check_logits_labels(
    logits: Tensor, labels: Tensor, num_classes: int | None = None, ignore_index: int | None = None
) -> None:
    """Check that `logits` ``(N, K, *S)`` and `labels` ``(N, *S)`` match.

    Args:
        logits: floating, ``(N, K, *S)``.
        labels: integer, ``(N, *S)``, values in ``[0, K)`` or `ignore_index`; on a GPU a later call
            may raise the error (:mod:`segcal.late_checks`).
        num_classes: the K that is expected; None takes it from `logits`.
        ignore_index: label of voxels to leave out; None when there are none.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    check_shapes(logits, labels, num_classes)
    check_labels_of_step(labels, logits.shape[1], ignore_index)


def check_shapes(logits: Tensor, labels: Tensor, num_classes: int | None = None) -> None:
    """Check `logits` ``(N, K, *S)`` and `labels` ``(N, *S)``, except for the values of the labels.

    Args:
        logits: floating.
        labels: integer.
        num_classes: the K that is expected; None takes it from `logits`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if not logits.is_floating_point() or logits.ndim < 2:
        raise ValueError(
            f"logits: expected floating (N, K, *S), got {logits.dtype} {tuple(logits.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels: expected integers, got {labels.dtype}; use .long() if these are labels"
        )
    expected = (logits.shape[0], *logits.shape[2:])
    if tuple(labels.shape) != expected:
        raise ValueError(
            f"labels: expected (N, *S) = {expected} for logits {tuple(logits.shape)}, "
            f"got {tuple(labels.shape)}"
            + ("; use .squeeze(1)" if labels.ndim > 1 and labels.shape[1] == 1 else "")
            + ("; labels per channel need per_channel" if labels.shape == logits.shape else "")
        )
    if num_classes is not None:
        check_num_classes(logits, num_classes)
    if logits.shape[1] < 2:
        raise ValueError(
            "logits: a softmax needs at least 2 classes on axis 1, got 1; "
            "give a binary problem two channels"
        )


def check_channels(
    logits: Tensor, labels: Tensor, num_classes: int | None = None, ignore_index: int | None = None
) -> None:
    """Check labels per channel: `labels` like `logits` ``(N, K, *S)``, 0 and 1, overlap allowed.

    Args:
        logits: floating ``(N, K, *S)``.
        labels: integer or bool ``(N, K, *S)``, 0, 1, or `ignore_index`.
        num_classes: the K that is expected; None takes it from `logits`.
        ignore_index: value of voxels to leave out of their channel.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if not logits.is_floating_point() or logits.ndim < 2:
        raise ValueError(
            f"logits: expected floating (N, K, *S), got {logits.dtype} {tuple(logits.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.shape != logits.shape:
        raise ValueError(
            f"labels: expected integers or bool like logits {tuple(logits.shape)} (one channel per "
            f"region), got {labels.dtype} {tuple(labels.shape)}"
            + ("; use .long()" if labels.is_floating_point() else "")
        )
    if num_classes is not None:
        check_num_classes(logits, num_classes)
    check_labels_of_step(labels, 2, ignore_index)


def is_soft(logits: Tensor, labels: Tensor) -> bool:
    """Whether labels are shares of the classes, floating like `logits`, in place of their numbers.

    Args:
        logits: ``(N, K, *S)``.
        labels: integer ``(N, *S)``, or floating ``(N, K, *S)``.
    """
    return labels.is_floating_point() and labels.shape == logits.shape


def check_shares(logits: Tensor, shares: Tensor, num_classes: int | None = None) -> Tensor:
    """Check soft labels: the share of the raters, or the probability, of every class.

    Args:
        logits: floating ``(N, K, *S)``.
        shares: floating, like `logits`; they sum to 1 over K, or are all 0 in a voxel that is left
            out, which takes the place of an ignored label.
        num_classes: the K that is expected; None takes it from `logits`.

    Returns:
        bool ``(N, *S)``: which voxels count.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if num_classes is not None:
        check_num_classes(logits, num_classes)
    if not logits.is_floating_point() or logits.shape != shares.shape or logits.shape[1] < 2:
        raise ValueError(
            f"labels: expected shares of the classes like logits {tuple(logits.shape)}, of 2 "
            f"classes or more, got {shares.dtype} {tuple(shares.shape)}"
        )
    total = shares.double().sum(1)
    counts = total != 0
    wrong = counts & ~((total - 1).abs() < SUMS_TO_ONE) | (shares < 0).any(1)
    if wrong.any():
        raise ValueError(
            "labels: expected shares of 0 or more that sum to 1 over the classes (or are all 0 in "
            f"voxels to leave out), got a sum of {float(total[wrong].flatten()[0]):.4g} and a "
            f"smallest of {float(shares.min()):.4g}, in {int(wrong.sum())} voxels"
        )
    return counts


def label_masks(logits: Tensor, targets: Tensor, *, name: str = "logits") -> tuple[Tensor, Tensor]:
    """Return where multi-label `targets` are 1, and where they are 0; -1 is unknown, in neither.

    Args:
        logits: floating ``(B, T)``, a score per sample and label.
        targets: ``(B, T)`` of 0, 1 and -1, integer, bool or floating.
        name: what messages call the first argument.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    if not logits.is_floating_point() or logits.ndim != 2:
        raise ValueError(
            f"{name}: expected floating (B, T), a value per sample and label, got {logits.dtype} "
            f"{tuple(logits.shape)}"
        )
    if targets.shape != logits.shape or targets.is_complex():
        raise ValueError(
            f"targets: expected 0, 1 or -1 like {name} {tuple(logits.shape)}, got {targets.dtype} "
            f"{tuple(targets.shape)}"
        )
    if not targets.is_floating_point():
        targets = targets.long()  # comparing uint8 with -1 would wrap around
    positive, negative = targets == 1, targets == 0
    wrong = ~(positive | negative | (targets == UNKNOWN))
    if wrong.any():
        raise ValueError(
            f"targets: expected 0, 1 or {UNKNOWN} (unknown), got "
            f"{torch.unique(targets[wrong])[:5].tolist()} in {int(wrong.sum())} entries"
        )
    return positive, negative


def check_background(include_background: bool, per_channel: bool) -> None:
    """Raise ValueError if channel 0 is to be left out where no channel is the background."""
    if per_channel and not include_background:
        raise ValueError("include_background: no channel is the background with per_channel")


def check_num_classes(logits: Tensor, num_classes: int) -> None:
    """Raise ValueError unless `logits` ``(N, K, *S)`` have K = `num_classes`."""
    if logits.ndim < 2 or logits.shape[1] != num_classes:
        raise ValueError(
            f"logits: expected {num_classes} classes on axis 1, got shape {tuple(logits.shape)}"
        )


def check_label_values(labels: Tensor, num_classes: int, ignore_index: int | None) -> None:
    """Raise ValueError unless every label lies in ``[0, K)`` or equals `ignore_index`."""
    if labels.numel() == 0:
        return
    labels = labels.long()  # comparing uint8 with -1 would wrap around
    low, high = torch.aminmax(labels)
    if low >= 0 and high < num_classes:
        return
    wrong = (labels < 0) | (labels >= num_classes)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if wrong.any():
        values = torch.unique(labels[wrong])[:5].tolist()
        raise ValueError(
            f"labels: expected 0 to {num_classes - 1}"
            + (f" or ignore_index {ignore_index}" if ignore_index is not None else "")
            + f", got {values} in {int(wrong.sum())} voxels"
            + ("" if ignore_index is not None else "; is an ignore_index missing?")
        )


def check_labels_of_step(labels: Tensor, num_classes: int, ignore_index: int | None) -> None:
    """Raise ValueError as :func:`check_label_values` does; on a GPU in a later call.

    On a GPU wrong labels may pass, so labels must not be used as an index; take
    :func:`label_index`.
    """
    if labels.device.type not in LATE_DEVICES or torch.compiler.is_compiling():
        check_label_values(labels, num_classes, ignore_index)
        return
    watch = label_watch(labels.device, num_classes, ignore_index)
    watch.look()
    wrong = valid_mask(labels, ignore_index) & ((labels < 0) | (labels >= num_classes))
    watch.add(wrong, labels)
    watch.ask()


def label_index(labels: Tensor, valid: Tensor, num_classes: int) -> Tensor:
    """Return int64 like `labels`, 0 where `valid` is False, that can be used as an index.

    A wrong label that :func:`check_labels_of_step` has let through for now becomes one of the
    classes, because an index out of bounds would end a program on a GPU.
    """
    index = torch.where(valid, labels, 0).long()
    return index.clamp_(0, num_classes - 1) if labels.device.type in LATE_DEVICES else index


def valid_mask(labels: Tensor, ignore_index: int | None) -> Tensor:
    """Return bool like `labels`, False where the label is `ignore_index`."""
    if ignore_index is None:
        return torch.ones_like(labels, dtype=torch.bool)
    return labels.long() != ignore_index


def one_hot(
    labels: Tensor,
    num_classes: int,
    *,
    ignore_index: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``(N, K, *S)`` of 0 and 1 from `labels` ``(N, *S)``; ignored voxels are all 0."""
    valid = valid_mask(labels, ignore_index)
    index = label_index(labels, valid, num_classes).unsqueeze(1)
    shape = (labels.shape[0], num_classes, *labels.shape[1:])
    out = torch.zeros(shape, dtype=dtype, device=labels.device)
    return out.scatter_(1, index, valid.unsqueeze(1).to(dtype))


def reduce_voxels(values: Tensor, mask: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Reduce `values` ``(N, *S)`` over `mask`; 0 with zero gradient where nothing is valid.

    Args:
        values: one per voxel.
        mask: voxels that count.
        reduction: ``mean`` over the valid voxels, their ``sum``, or ``none``, which gives
            ``(N, *S)`` with 0 at the others.

    Raises:
        ValueError: an unknown reduction.
    """
    kept = torch.where(mask, values, 0.0)
    if reduction == "none":
        return kept
    if reduction == "sum":
        return kept.sum()
    if reduction == "mean":
        return kept.sum() / mask.sum().clamp(min=1)
    raise ValueError(f"reduction: expected one of {get_args(Reduction)}, got {reduction!r}")


def reduce_classes(values: Tensor, reduction: ClassReduction) -> Tensor:
    """Mean or sum of `values` ``(N, K, *S)`` over K, giving ``(N, *S)``.

    The published weights of penalties on logits belong to the mean, while the papers print the sum.

    Raises:
        ValueError: an unknown reduction.
    """
    if reduction == "mean":
        return values.mean(1)
    if reduction == "sum":
        return values.sum(1)
    raise ValueError(
        f"class_reduction: expected one of {get_args(ClassReduction)}, got {reduction!r}"
    )


def reduce_labels(
    values: Tensor, known: Tensor, reduction: Reduction, class_reduction: ClassReduction
) -> Tensor:
    """Reduce `values` ``(B, T)`` over the `known` entries; 0 with zero gradient if there is none.

    Args:
        values: one per sample and label.
        known: entries that count.
        reduction: as in :func:`reduce_voxels`.
        class_reduction: how the mean is taken: ``mean`` divides by the number of entries, ``sum``
            by the number of samples that have an entry, as papers print it.

    Raises:
        ValueError: an unknown reduction.
    """
    check_choice("class_reduction", class_reduction, get_args(ClassReduction))
    if reduction == "mean" and class_reduction == "sum":
        return torch.where(known, values, 0.0).sum() / known.any(1).sum().clamp(min=1)
    return reduce_voxels(values, known, reduction)


def is_softmax(x: Tensor) -> bool:
    """Whether `x` ``(N, K, *S)`` went through a softmax: its channels sum to 1 in every voxel."""
    p = x.detach()
    if p.shape[1] < 2 or not p.numel() or not bool((p >= 0).all()):
        return False
    return bool(((p.sum(1) - 1).abs() < SUMS_TO_ONE).all())


def check_logits(x: Tensor, *, per_channel: bool = False) -> None:
    """Refuse probabilities in place of logits ``(N, K, *S)``, where this is certain.

    Args:
        x: the logits to check.
        per_channel: whether every channel is a sigmoid of its own; this can only give a warning.

    Raises:
        ValueError: values that have gone through a softmax.
    """
    if is_softmax(x) and (x.numel() >= MANY or bool(((x > 0) & (x < 1)).any())):
        raise ValueError(  # a few zeros and ones may be logits
            "logits: expected logits, got channels that sum to 1 in every voxel; take the softmax "
            "out of the network, the loss applies its own"
        )
    if per_channel and x.numel() >= MANY:
        low, high = (float(v) for v in torch.aminmax(x.detach()))
        if 0 <= low < high <= 1:
            warnings.warn(
                "logits: all lie between 0 and 1, as if a sigmoid were applied in the network; the "
                "loss applies its own",
                stacklevel=3,
            )


def as_tensor(x: Any) -> Tensor:
    """Return `x` (tensor, array or nested list) as a tensor, sharing its memory where torch can.

    Arrays that torch does not take are copied: negative strides (a flipped view), foreign byte
    order, read-only memory, unsigned integers wider than 8 bits (to int64), long doubles.
    """
    if isinstance(x, Tensor):
        return x
    array = np.asarray(x)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.as_tensor(array)


def select_voxels(
    probs: Any, labels: Any, mask: Any = None, ignore_index: int | None = None
) -> tuple[Tensor, Tensor]:
    """Flatten probabilities and labels to the voxels that count.

    Args:
        probs: ``(N, K, *S)`` with labels ``(N, *S)`` or ``(N, 1, *S)``; or, without a batch axis,
            ``(K, *S)`` with labels ``(*S)``. Where both readings fit (N = K), the class axis is
            the axis along which the sums are closer to 1; if they are alike, the batch form is
            taken.
        labels: integers.
        mask: bool like `labels`; False leaves a voxel out. None keeps all.
        ignore_index: label to leave out.

    Returns:
        probs ``(K, n)`` in their own dtype (half is promoted to float32) and labels ``(n,)`` int64.

    Raises:
        ValueError: shapes that do not match, labels outside [0, K), values that are not
            probabilities, or do not sum to 1 over the classes.
    """
    probs, labels = as_tensor(probs), as_tensor(labels)
    if not probs.is_floating_point() or probs.ndim < 2:
        raise ValueError(
            f"probs: expected floating (N, K, *S), got {probs.dtype} {tuple(probs.shape)}"
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels: expected integers, got {labels.dtype}")
    labels = labels.long()
    class_axis = _class_axis(probs, labels)
    if class_axis == 1:
        flat = probs.movedim(1, 0).reshape(probs.shape[1], -1)
    else:
        flat = probs.reshape(probs.shape[0], -1)
    k = flat.shape[0]
    y = labels.reshape(-1)
    check_label_values(y, k, ignore_index)
    keep = None
    if mask is not None:
        mask = as_tensor(mask)
        fits = mask.shape in (labels.shape, (labels.shape[0], *labels.shape[2:]))
        if mask.dtype != torch.bool or not fits or mask.numel() != labels.numel():
            raise ValueError(
                f"mask: expected bool {tuple(labels.shape)}, got {mask.dtype} {tuple(mask.shape)}"
            )
        keep = mask.reshape(-1)
    if ignore_index is not None:
        valid = y != ignore_index
        keep = valid if keep is None else keep & valid
    if keep is not None and not bool(keep.all()):
        flat, y = flat[:, keep], y[keep]
    if flat.dtype in HALF:
        flat = flat.float()
    check_distribution(flat)
    return flat, y


def check_distribution(probs: Tensor) -> None:
    """Check that the columns of ``(K, n)`` are probabilities of K classes that exclude each other.

    It warns if they look like masks, or as if a softmax were applied twice.

    Raises:
        ValueError: values that are no probabilities, or columns whose sum is not 1.
    """
    low, high = check_probabilities(probs)
    k, n = probs.shape
    if k < 2 or not n:
        return
    least, most = (float(x) for x in torch.aminmax(probs.sum(0)))
    if least < 1 - SUMS_TO_ONE or most > 1 + SUMS_TO_ONE:
        raise ValueError(
            f"probs: expected classes that sum to 1 in every voxel, got sums of {least:.4g} to "
            f"{most:.4g}; if channels may overlap, evaluate each together with 1 - p, and leave "
            "out voxels that padding set to 0"
        )
    said = applied_twice(low, high, k) if n >= MANY else ""
    if not said and n >= MANY and holds_masks(probs):
        said = "0 and 1 alone, a mask in place of probabilities: its ECE is 1 - accuracy"
    if said:
        warnings.warn(f"probs: {said}", stacklevel=4)


def check_probabilities(probs: Tensor) -> tuple[float, float]:
    """Raise ValueError unless all values lie in [0, 1] up to rounding; return their bounds."""
    if probs.numel() == 0:
        return 0.0, 1.0
    low, high = (float(x) for x in torch.aminmax(probs))
    if not low >= -PROBABILITY_TOLERANCE or not high <= 1 + PROBABILITY_TOLERANCE:
        raise ValueError(
            f"probs: expected values in [0, 1], got {low:.4g} to {high:.4g}"
            " (logits need a softmax first; NaN and inf are refused)"
        )
    return low, high


def _class_axis(probs: Tensor, labels: Tensor) -> int:
    p, y = tuple(probs.shape), tuple(labels.shape)
    batch = y in ((p[0], *p[2:]), (p[0], 1, *p[2:]))
    single = y == p[1:]
    if batch and single:
        off = [float((probs.sum(axis) - 1).abs().sum()) for axis in (0, 1)]
        return 0 if off[0] < off[1] else 1
    if batch or single:
        return 1 if batch else 0
    raise ValueError(
        f"probs {p} and labels {y} do not belong together: expected probs (N, K, *S) with labels "
        "(N, *S), or probs (K, *S) with labels (*S)"
    )
