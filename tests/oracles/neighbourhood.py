"""Loops over voxels and patches in float64, straight from the definitions."""

from __future__ import annotations

import itertools

import numpy as np


def kernel_weights(sizes, kernel):
    """Weights of the patch, centre in the middle."""
    w = np.ones(sizes)
    if kernel == "svls":
        for offset in itertools.product(*(range(k) for k in sizes)):
            w[offset] = np.exp(
                -0.5 * sum((o - k // 2) ** 2 for o, k in zip(offset, sizes, strict=False))
            )
        centre = tuple(k // 2 for k in sizes)
        w /= w.sum()
        others = w.sum() - w[centre]
        w[centre] = others if others > 0 else 1.0
        w /= w.sum()
    return w


def proportions_and_outer(labels, num_classes, sizes, kernel, padding, ignore):
    """Return tau (K, *S) and the mixed-patch mask (*S)."""
    shape = labels.shape
    tau = np.zeros((num_classes, *shape))
    outer = np.zeros(shape, bool)
    w = kernel_weights(sizes, kernel)
    for centre in np.ndindex(*shape):
        if labels[centre] == ignore:
            continue
        numerator, denominator, values = np.zeros(num_classes), 0.0, set()
        for offset in itertools.product(*(range(k) for k in sizes)):
            at = tuple(c + o - k // 2 for c, o, k in zip(centre, offset, sizes, strict=False))
            inside = all(0 <= a < n for a, n in zip(at, shape, strict=False))
            if padding == "replicate":
                at = tuple(min(max(a, 0), n - 1) for a, n in zip(at, shape, strict=False))
                inside = True
            if inside:
                label = labels[at]
                if label == ignore:
                    continue
            elif padding == "background":
                label = 0
            else:
                if padding == "zeros":
                    denominator += w[offset]
                continue
            numerator[label] += w[offset]
            denominator += w[offset]
            values.add(int(label))
        tau[(slice(None), *centre)] = numerator / denominator
        outer[centre] = len(values) > 1
    return tau, outer


def distance_to_another_class(label_map, looked, ignore):
    """Largest distance along the axes to the nearest voxel of another class; infinite without.

    Along axes that are not `looked` at there is no way.
    """
    found = np.full(label_map.shape, np.inf)
    voxels = [v for v in np.ndindex(label_map.shape) if label_map[v] != ignore]
    for a, b in itertools.product(voxels, voxels):
        steps = np.abs(np.subtract(a, b))
        if label_map[a] != label_map[b] and not steps[~looked].any():
            found[a] = min(found[a], steps.max())
    return found
