"""nnU-Net's predictor with the averaging chosen, single precision, and what it throws away kept.

nnU-Net averages a voxel's values over mirrored copies of a window, overlapping windows and folds.
Averaging logits is a geometric mean of probabilities, sharper than any voter where voters
disagree; averaging probabilities keeps their disagreement as doubt. Which of the two is better
calibrated depends on the model, so it is named and recorded with the predictions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nnunetv2.inference import predict_from_raw_data
from nnunetv2.inference.export_prediction import export_prediction_from_logits
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.inference.sliding_window_prediction import compute_gaussian
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from segcal import __version__
from segcal.adapters.nnunet.patching import Aggregation, replaced
from segcal.io.files import whole_file, write_json
from segcal.io.pairing import LOGITS_FOLDER, RECORD_NAME
from segcal.posthoc.links import logits_of

OUTSIDE = -110.0
"""Logit of what is impossible outside nnU-Net's crop: e^-110 is 0 in single precision."""


class AveragingPredictor(nnUNetPredictor):
    """nnU-Net's predictor that averages logits or probabilities, in single precision.

    Args:
        aggregation: what is averaged, and what is kept.
        *args: nnU-Net's.
        **kwargs: nnU-Net's.
    """

    list_of_parameters: list[dict[str, Any]]

    def __init__(self, aggregation: Aggregation, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aggregation = aggregation
        self.fold_names: tuple[str, ...] = ()
        self.checkpoint_name = ""

    def initialize_from_trained_model_folder(
        self,
        model_training_output_dir: str,
        use_folds: tuple[int | str, ...] | None,
        checkpoint_name: str = "checkpoint_final.pth",
    ) -> None:
        """Load the folds, and remember their names."""
        if use_folds is None:
            use_folds = self.auto_detect_available_folds(model_training_output_dir, checkpoint_name)
        super().initialize_from_trained_model_folder(
            model_training_output_dir, use_folds, checkpoint_name
        )
        self.fold_names = tuple(f"fold_{fold}" for fold in use_folds)
        self.checkpoint_name = checkpoint_name

    @torch.inference_mode()
    def predict_logits_from_preprocessed_data(self, data: Tensor) -> Tensor:
        """Return the logits ``(K, *S)`` of all folds; with per-fold also ``(1 + folds, K, *S)``."""
        every_fold = self.list_of_parameters
        total = torch.zeros(())
        of_folds = []
        try:
            for parameters in every_fold:
                self.list_of_parameters = [parameters]
                values = super().predict_logits_from_preprocessed_data(data)
                if self.aggregation.per_fold:
                    of_folds.append(self._as_logits(values))
                total = total + values
        finally:
            self.list_of_parameters = every_fold
        mean = self._as_logits(total / len(every_fold))
        return torch.stack([mean, *of_folds]) if self.aggregation.per_fold else mean

    def _as_logits(self, values: Tensor) -> Tensor:
        if self.aggregation.average == "logit":
            return values
        return logits_of(values, regions=self.label_manager.has_regions)

    def _voter(self, window: Tensor) -> Tensor:
        """What is averaged, of one window ``(1, K, *S)``."""
        logits = self.network(window).float()
        if self.aggregation.average == "logit":
            return logits
        return self.label_manager.apply_inference_nonlin(logits[0])[None]

    @torch.inference_mode()
    def _internal_maybe_mirror_and_predict(self, x: Tensor) -> Tensor:
        axes = [a + 2 for a in (self.allowed_mirroring_axes or ())] if self.use_mirroring else []
        flips = list(chain.from_iterable(combinations(axes, n) for n in range(len(axes) + 1)))
        total = torch.zeros((), device=x.device)
        for flip in flips:
            total = total + torch.flip(self._voter(torch.flip(x, flip)), flip)
        return total / len(flips)

    @torch.inference_mode()
    def _internal_predict_sliding_window_return_logits(
        self, data: Tensor, slicers: list[tuple[Any, ...]], do_on_device: bool = True
    ) -> Tensor:
        place = self.device if do_on_device else torch.device("cpu")
        data = data.to(place)
        patch = tuple(self.configuration_manager.patch_size)
        weight = torch.ones(patch, device=place)
        if self.use_gaussian:
            weight = compute_gaussian(patch, dtype=torch.float32, device=place)
        total = torch.zeros(
            (self.label_manager.num_segmentation_heads, *data.shape[1:]), device=place
        )
        weights = torch.zeros(data.shape[1:], device=place)
        for window in tqdm(slicers, disable=not self.allow_tqdm):
            x = data[window][None].to(self.device)
            total[window] += self._internal_maybe_mirror_and_predict(x)[0].to(place) * weight
            weights[window[1:]] += weight
        total /= weights
        if not torch.isfinite(total).all():
            raise ValueError(
                "the network's output is NaN or infinite; was it trained until its loss was NaN, "
                "or is an image NaN? Half precision, which nnU-Net has on a GPU, ends at 65504: "
                "try the CPU (-device cpu)"
            )
        return total

    def _manage_input_and_output_lists(
        self,
        source: str | list[list[str]],
        output: str | list[str] | None,
        previous_stage: str | None = None,
        overwrite: bool = True,
        part_id: int = 0,
        num_parts: int = 1,
        save_probabilities: bool = False,
    ) -> tuple[list[Any], list[str] | None, list[Any]]:
        """List what is to be predicted: when continuing, what lacks any of its files."""
        images, names, stages = super()._manage_input_and_output_lists(
            source, output, previous_stage, True, part_id, num_parts, save_probabilities
        )
        if names is None:
            return images, names, stages
        if isinstance(output, str):
            self._describe(Path(output))
        ending = self.dataset_json["file_ending"]
        left = [
            i
            for i, name in enumerate(names)
            if overwrite or not all(f.is_file() for f in self._files(name, ending))
        ]
        if not overwrite:
            print(f"{len(left)} cases lack a file and are predicted")
        return [images[i] for i in left], [names[i] for i in left], [stages[i] for i in left]

    def _files(self, output: str, ending: str) -> list[Path]:
        folder, case = Path(output).parent, Path(output).name
        folders = [
            folder,
            *(folder / fold for fold in self.fold_names if self.aggregation.per_fold),
        ]
        files = [f / f"{case}{e}" for f in folders for e in (".npz", ending)]
        return files + ([logits_path(output)] if self.aggregation.save_logits else [])

    def predict_from_data_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Predict and write cases, in several processes."""
        with self._exporting():
            return super().predict_from_data_iterator(*args, **kwargs)

    def predict_from_files_sequential(self, *args: Any, **kwargs: Any) -> Any:
        """Predict and write cases, in this process."""
        with self._exporting():
            return super().predict_from_files_sequential(*args, **kwargs)

    def _exporting(self) -> AbstractContextManager[None]:
        """Make nnU-Net write what it has no word for."""
        names = self.fold_names if self.aggregation.per_fold else ()
        ours = partial(export, fold_names=names, save_logits=self.aggregation.save_logits)
        return replaced(predict_from_raw_data, "export_prediction_from_logits", ours)

    def _describe(self, output: Path) -> None:
        """Write what the predictions are made of, and what nnU-Net needs to read those of folds."""
        write_json(
            output / RECORD_NAME,
            {
                "segcal": __version__,
                "average": self.aggregation.average,
                "over": ["mirrors", "windows", "folds"],
                "mirroring": bool(self.use_mirroring and self.allowed_mirroring_axes),
                "tile_step_size": self.tile_step_size,
                "folds": list(self.fold_names),
                "checkpoint": self.checkpoint_name,
                "trainer": self.trainer_name,
            },
        )
        if self.aggregation.per_fold:
            for fold in self.fold_names:
                write_json(output / fold / "dataset.json", self.dataset_json)
                write_json(output / fold / "plans.json", self.plans_manager.plans)


def export(
    predicted: Any,
    properties: dict[str, Any],
    configuration_manager: Any,
    plans_manager: Any,
    dataset_json: Any,
    output: str,
    save_probabilities: bool = False,
    *,
    fold_names: tuple[str, ...],
    save_logits: bool,
) -> None:
    """Write a case as nnU-Net does, and its logits and folds where they are asked for.

    Args:
        predicted: ``(K, *S)``, or with `fold_names` ``(1 + folds, K, *S)``, their mean first.
        properties: of the case, from nnU-Net's preprocessing.
        configuration_manager: nnU-Net's.
        plans_manager: nnU-Net's.
        dataset_json: nnU-Net's.
        output: path of the case without ending.
        save_probabilities: whether probabilities are written.
        fold_names: sub-folders for the folds' own predictions, or none.
        save_logits: whether logits are written.
    """
    common = (plans_manager, dataset_json)
    mean, of_folds = (predicted[0], predicted[1:]) if fold_names else (predicted, [])
    for fold, values in zip(fold_names, of_folds, strict=True):
        place = Path(output).parent / fold / Path(output).name
        export_prediction_from_logits(
            values, properties, configuration_manager, *common, str(place), save_probabilities
        )
    watched = _Resampling(configuration_manager)
    export_prediction_from_logits(mean, properties, watched, *common, output, save_probabilities)
    if save_logits:
        regions = plans_manager.get_label_manager(dataset_json).has_regions
        full = _put_back(np.asarray(watched.result, np.float32), properties, regions=regions)
        axes = [0, *(axis + 1 for axis in plans_manager.transpose_backward)]
        with whole_file(logits_path(output)) as temporary:
            np.savez_compressed(temporary, logits=full.transpose(axes))


class _Resampling:
    """nnU-Net's configuration that remembers what its resampling returned last."""

    def __init__(self, configuration_manager: Any) -> None:
        self.host = configuration_manager
        self.result: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.host, name)

    def resampling_fn_probabilities(self, *args: Any) -> Any:
        self.result = self.host.resampling_fn_probabilities(*args)
        return self.result


def _put_back(
    cropped: NDArray[np.float32], properties: dict[str, Any], *, regions: bool
) -> NDArray[np.float32]:
    """Surround logits ``(K, *S)`` of the crop by background, or by no region."""
    shape = (len(cropped), *properties["shape_before_cropping"])
    full = np.full(shape, OUTSIDE, np.float32)
    if not regions:
        full[0] = 0
    box = (slice(None), *(slice(*side) for side in properties["bbox_used_for_cropping"]))
    full[box] = cropped
    return full


def logits_path(output: str) -> Path:
    """Where the logits of a case go whose probabilities are ``output.npz``.

    In a folder of their own: nnU-Net's ensembling and segcal's evaluation take every ``.npz`` that
    lies beside the predictions for a case.
    """
    return Path(output).parent / LOGITS_FOLDER / f"{Path(output).name}.npz"
