"""Wrong labels that a GPU has counted, which the host reads later.

Asking a GPU in every training step whether labels are right means waiting for it. Here the GPU
counts wrong labels beside its work, and the host reads the count when it has arrived anyway: in a
later step or, at the latest, when :func:`raise_wrong_labels` waits for it at the end of a pass. The
code that counts leaves voxels with wrong labels out, so that nothing worse happens in between.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LATE_DEVICES = {"cuda"}
"""Types of devices that the host does not wait for."""
NONE_SEEN = (0.0, math.inf, -math.inf)


class LabelWatch:
    """Wrong labels on a device, for losses that expect the same labels.

    Args:
        device: where wrong labels are counted.
        num_classes: right labels lie in ``[0, num_classes)``.
        ignore_index: right label outside this range, or None.

    Attributes:
        seen: float64 ``(3,)`` on the device: number of wrong voxels, and the smallest and the
            largest wrong label among them. The code that counts adds to it there.
    """

    def __init__(self, device: torch.device, num_classes: int, ignore_index: int | None) -> None:
        self._expected = (num_classes, ignore_index)
        self._on_gpu = device.type == "cuda"
        with torch.inference_mode(False):  # both outlive the block in which they are made
            self.seen = torch.tensor(NONE_SEEN, dtype=torch.float64, device=device)
            self._told = torch.zeros(3, dtype=torch.float64, pin_memory=self._on_gpu)
        event: Any = torch.cuda.Event  # which is untyped
        self._arrives = event() if self._on_gpu else None
        self._asked = False

    def look(self) -> None:
        """Read the counts of earlier steps that have arrived; a step calls it before it counts.

        Raises:
            ValueError: labels of an earlier step were wrong.
        """
        if not self._asked or self._captured():
            return
        if self._arrives is None or self._arrives.query():
            self._read(self._told)

    def ask(self) -> None:
        """Request the count from the device; a step calls it after it has counted."""
        if self._asked or self._captured():
            return
        self._told.copy_(self.seen, non_blocking=True)
        if self._arrives is not None:
            self._arrives.record(torch.cuda.current_stream(self.seen.device))
        self._asked = True

    def _captured(self) -> bool:
        """Whether a CUDA graph is captured, which must neither read nor send."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def wait(self) -> None:
        """Wait for all counts.

        Raises:
            ValueError: labels were wrong.
        """
        self._read(self.seen.cpu())

    def add(self, wrong: Tensor, labels: Tensor) -> None:
        """Count labels where bool `wrong` says so, on the device."""
        if not wrong.numel():
            return
        values = [torch.where(wrong, labels, bound) for bound in NONE_SEEN[1:]]
        low, high = values[0].amin(), values[1].amax()
        self.seen[0] += wrong.sum()
        self.seen[1] = torch.minimum(self.seen[1], low)
        self.seen[2] = torch.maximum(self.seen[2], high)

    def _read(self, told: Tensor) -> None:
        wrong, low, high = told.tolist()
        self._asked = False
        if not wrong:
            return
        self.seen.copy_(torch.tensor(NONE_SEEN))
        k, ignored = self._expected
        values = f"{low:.0f}" if low == high else f"values from {low:.0f} to {high:.0f}"
        raise ValueError(
            f"labels: expected 0 to {k - 1}"
            + (f" or ignore_index {ignored}" if ignored is not None else "")
            + f", got {values} in {wrong:.0f} voxels, on {self.seen.device} in this batch or one "
            "before" + ("" if ignored is not None else "; is an ignore_index missing?")
        )


_WATCHES: dict[tuple[torch.device, int, int | None], LabelWatch] = {}


def label_watch(device: torch.device, num_classes: int, ignore_index: int | None) -> LabelWatch:
    """Return the watch of a device and of the labels expected there, always the same object."""
    key = (device, num_classes, ignore_index)
    if key not in _WATCHES:
        _WATCHES[key] = LabelWatch(*key)
    return _WATCHES[key]


def raise_wrong_labels() -> None:
    """Wait for the devices on which labels have been counted.

    Raises:
        ValueError: labels were wrong since the last time.
    """
    for watch in _WATCHES.values():
        watch.wait()
