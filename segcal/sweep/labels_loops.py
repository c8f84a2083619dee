"""The loop that reads the labels of a sweep on CPUs, compiled by Numba.

Labels of any integer type become codes of one byte; they are checked and counted in the same pass,
since a pass over labels of eight bytes reads twice as much as one over a class of the logits.
"""

from __future__ import annotations

import numpy as np

from segcal.compiling import compiled
from segcal.sweep.sharing import take
from segcal.sweep.terms import NOTHING

BLOCK = 2**16
"""Number of voxels of a block."""
VALID, WRONG = 0, 1
"""First places in a block's counts; the voxels of every class follow."""
PLACES = 2


@compiled
def encode_blocks(labels, num_classes, ignores, ignore, by_class, codes, found, counter):
    """Write the codes of the blocks that `counter` gives, and what was found.

    Args:
        labels: integer ``(V,)``.
        num_classes: K.
        ignores: whether there is a label that does not count.
        ignore: this label.
        by_class: whether to count the voxels of every class, too.
        codes: uint8 ``(V,)``, ``NOTHING`` where a voxel does not count or its label is wrong.
        found: int64 ``(blocks, PLACES + K)``, zeros.
        counter: see :func:`segcal.sweep.sharing.take`.
    """
    block = take(counter)
    while block < found.shape[0]:
        start = block * BLOCK
        mine, out = labels[start : start + BLOCK], codes[start : start + BLOCK]
        valid, wrong, nothing = 0, 0, np.uint8(NOTHING)
        for x in range(mine.shape[0]):
            label = np.int64(mine[x])
            counts = not (ignores and label == ignore)
            right = (label >= 0) & (label < num_classes)
            valid += counts & right
            wrong += counts & (not right)
            out[x] = np.uint8(label) if counts & right else nothing
        found[block, VALID], found[block, WRONG] = valid, wrong
        if by_class:
            for k in range(num_classes):
                code, voxels = np.uint8(k), 0
                for x in range(mine.shape[0]):
                    voxels += out[x] == code
                found[block, PLACES + k] = voxels
        block = take(counter)
