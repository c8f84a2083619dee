"""Counts classes of a case while later ones are still being read."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from numpy.typing import NDArray

from segcal.evaluation.case import labelled_scopes, prepare_voxels
from segcal.evaluation.settings import EvaluationSettings
from segcal.tally import Voxels
from segcal.threads import threads_for

FROM_ELSEWHERE = ("crop", "roi")
"""Scopes that are known only when all is read, and which nearly every voxel may be in."""


class EarlyCounts:
    """Counts the classes that have been read of a case, in a thread of its own.

    Unpacking a file keeps one core busy, and takes as long as everything else together; other cores
    have nothing to do meanwhile. What is not counted when all is read is left to all threads.
    """

    def __init__(self, settings: EvaluationSettings) -> None:
        """Prepare for a case that is evaluated with these settings."""
        self._settings = settings
        self._pool = ThreadPoolExecutor(1)
        self._begun: tuple[NDArray[Any], Future[Voxels]] | None = None
        self._classes: list[Future[None]] = []

    def __enter__(self) -> EarlyCounts:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Wait for the class that is being counted, and leave out the others."""
        self._pool.shutdown(cancel_futures=True)

    @property
    def possible(self) -> bool:
        """Whether the scopes allow it, and there is a core for it."""
        return threads_for(2) > 1 and not set(FROM_ELSEWHERE) & set(self._settings.chosen)

    def arrived(
        self,
        reference: NDArray[Any],
        ignore_index: int | None,
        probabilities: NDArray[Any],
        classes: int,
    ) -> None:
        """Count the classes that are there, unless they are already, and return at once.

        Args:
            reference: integer ``(*S)``.
            ignore_index: reference label that is left out of everything.
            probabilities: ``(K, *S)``, the same array in every call.
            classes: number of classes whose probabilities are there.
        """
        if self._begun is None:
            prepared = self._pool.submit(self._prepare, reference, ignore_index, probabilities)
            self._begun = probabilities, prepared
        _, prepared = self._begun
        for k in range(len(self._classes), classes):
            self._classes.append(self._pool.submit(_count, prepared, k))

    def voxels(self, probabilities: NDArray[Any] | None) -> Voxels | None:
        """The voxels, with the classes counted so far; None where these are of other probabilities.

        Args:
            probabilities: what is evaluated, ``(K, *S)``.
        """
        self._pool.shutdown(cancel_futures=True)
        if probabilities is None or self._begun is None:
            return None
        counted, prepared = self._begun
        same = probabilities.__array_interface__ == counted.__array_interface__
        if not same or prepared.cancelled() or _failed(prepared):
            return None
        if any(map(_failed, self._classes)):
            return None
        return prepared.result()

    def _prepare(
        self, reference: NDArray[Any], ignore_index: int | None, probabilities: NDArray[Any]
    ) -> Voxels:
        settings = self._settings
        scopes = labelled_scopes(reference, ignore_index, settings)
        return prepare_voxels(probabilities, reference, scopes, ignore_index, settings)


def _count(prepared: Future[Voxels], k: int) -> None:
    prepared.result().count_class(k)


def _failed(work: Future[Any]) -> bool:
    """Whether work was begun and failed; whoever checks the file says why in better words."""
    return not work.cancelled() and work.exception() is not None
