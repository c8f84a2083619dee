"""nnU-Net's predictor in single precision, with a choice of average, logits and single folds.

nnU-Net averages a voxel's values over mirrored copies of a window, overlapping windows and folds.
Averaging logits gives a geometric mean of probabilities, which can be more confident than any of
the predictions where they disagree; averaging probabilities keeps the disagreement as uncertainty.
Which of the two is better calibrated depends on the model, so the predictions record which was
used.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial, wraps
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
from nnunetv2.inference import predict_from_raw_data
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.inference.sliding_window_prediction import compute_gaussian
from torch import Tensor, nn
from tqdm import tqdm

from segcal import __version__
from segcal.adapters.nnunet.calibrators import check_continued, find_calibrator
from segcal.adapters.nnunet.checkpoints import read_checkpoint
from segcal.adapters.nnunet.exporting import export, logits_path
from segcal.adapters.nnunet.foreign_code import no_foreign_code
from segcal.adapters.nnunet.patching import Aggregation, RefusedError, replaced
from segcal.heads import head_layer, output_of
from segcal.io.files import write_json
from segcal.io.pairing import DECISION_HEAD, RECORD_NAME
from segcal.posthoc.links import logits_of
from segcal.repair.saved import SavedCalibrator
from segcal.training.checkpoints import weights_digest


class AveragingPredictor(nnUNetPredictor):
    """nnU-Net's predictor that averages logits or probabilities, in single precision.

    A calibrator that was fitted to single networks is applied to each fold, and the calibrated
    probabilities are averaged. A calibrator that was fitted to the mean of several networks is
    applied to the mean.

    In a network with two heads (:mod:`segcal.heads`) each head is averaged separately. The decision
    head gives the label map; the probability head gives probabilities and logits, and the
    calibrator applies to it.

    Args:
        aggregation: what is averaged, and what is written.
        *args: arguments of nnU-Net's predictor.
        **kwargs: arguments of nnU-Net's predictor.
    """

    list_of_parameters: list[dict[str, Any]]

    def __init__(self, aggregation: Aggregation, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aggregation = aggregation
        self.fold_names: tuple[str, ...] = ()
        self.checkpoint_name = ""
        self.configuration_name = ""
        self.weights: dict[str, str] = {}
        self.saved: SavedCalibrator | None = None

    def initialize_from_trained_model_folder(
        self,
        model_training_output_dir: str,
        use_folds: tuple[int | str, ...] | None,
        checkpoint_name: str = "checkpoint_final.pth",
    ) -> None:
        """Load the folds, remember their names, and find the calibrator.

        Raises:
            RefusedError: a damaged checkpoint; a checkpoint or plans that could run code; a
                calibrator that cannot be read or belongs to another model.
        """
        if use_folds is None:
            use_folds = self.auto_detect_available_folds(model_training_output_dir, checkpoint_name)
        with no_foreign_code():
            super().initialize_from_trained_model_folder(
                model_training_output_dir, use_folds, checkpoint_name
            )
        self.fold_names = tuple(f"fold_{fold}" for fold in use_folds)
        self.checkpoint_name = checkpoint_name
        model = Path(model_training_output_dir)
        self.configuration_name = _configuration_of(model / self.fold_names[0] / checkpoint_name)
        digests = map(weights_digest, self.list_of_parameters)
        self.weights = dict(zip(self.fold_names, digests, strict=True))
        heads = self.label_manager.num_segmentation_heads
        try:
            self.saved = find_calibrator(self.aggregation, model, self.record(), heads)
        except (ValueError, OSError) as error:
            raise RefusedError(str(error)) from error

    def of_fold(self, name: str, configuration_name: str) -> None:
        """Remember what a network does not say that a trainer hands over at its end."""
        self.fold_names = (name,)
        self.checkpoint_name = "checkpoint_final.pth"
        self.configuration_name = configuration_name
        self.weights = {name: digest_of(self.network)}

    @torch.inference_mode()
    def predict_logits_from_preprocessed_data(self, data: Tensor) -> Tensor:
        """Return the averaged logits ``(K, *S)``; with those of each fold ``(1 + folds, K, *S)``.

        With two heads these are ``2 K`` channels, the decision head's first.
        """
        every_fold = self.list_of_parameters
        total = torch.zeros(())
        of_folds = []
        try:
            for parameters in every_fold:
                self.list_of_parameters = [parameters]
                values = super().predict_logits_from_preprocessed_data(data)
                if self._folds_apart:
                    of_folds.append(self._as_logits(values))
                total = total + values
        finally:
            self.list_of_parameters = every_fold
        mean = self._as_logits(total / len(every_fold))
        return torch.stack([mean, *of_folds]) if of_folds else mean

    @property
    def _folds_apart(self) -> bool:
        """Whether the predictions of single folds are needed beside the mean."""
        each = self.saved is not None and not self.saved.of_mean and len(self.fold_names) > 1
        return self.aggregation.per_fold or each

    def _as_logits(self, values: Tensor) -> Tensor:
        if self.aggregation.average == "logit":
            return values
        regions = self.label_manager.has_regions
        heads = torch.split(values, self.label_manager.num_segmentation_heads)
        return torch.cat([logits_of(of_head, regions=regions) for of_head in heads])

    def _voter(self, window: Tensor) -> Tensor:
        """The values to average, for one window ``(1, C, *S)``."""
        logits = self.network(window).float()
        if self.aggregation.average == "logit":
            return logits
        heads = torch.split(logits[0], self.label_manager.num_segmentation_heads)
        return torch.cat([self.label_manager.apply_inference_nonlin(x) for x in heads])[None]

    @property
    def heads(self) -> int:
        """Number of heads of the network."""
        return 1 if head_layer(self.network) is None else 2

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
        channels = self.heads * self.label_manager.num_segmentation_heads
        total = torch.zeros((channels, *data.shape[1:]), device=place)
        weights = torch.zeros(data.shape[1:], device=place)
        with output_of(self.network, "both"):
            for window in tqdm(slicers, disable=not self.allow_tqdm):
                x = data[window][None].to(self.device)
                total[window] += self._internal_maybe_mirror_and_predict(x)[0].to(place) * weight
                weights[window[1:]] += weight
        total /= weights
        if not torch.isfinite(total).all():
            raise ValueError(
                "the network's output is NaN or infinite; was it trained until its loss was NaN, "
                "or is an image NaN? Half precision, which nnU-Net uses on a GPU, ends at 65504: "
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
        """List the cases to predict; when continuing, the cases that lack any of their files."""
        images, names, stages = super()._manage_input_and_output_lists(
            source, output, previous_stage, True, part_id, num_parts, save_probabilities
        )
        if names is None:
            return images, names, stages
        if isinstance(output, str):
            if not overwrite:
                check_continued(Path(output), self.saved)
            self.describe(Path(output))
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

    @wraps(nnUNetPredictor.predict_from_files_sequential)  # nnU-Net looks at its own signature
    def predict_from_files_sequential(self, *args: Any, **kwargs: Any) -> Any:
        """Predict and write cases, in this process."""
        with self._exporting():
            return super().predict_from_files_sequential(*args, **kwargs)

    def _exporting(self) -> AbstractContextManager[None]:
        """Make nnU-Net write what it has no option for."""
        ours = partial(
            export,
            fold_names=self.fold_names if self.aggregation.per_fold else (),
            save_logits=self.aggregation.save_logits,
            calibrator=None if self.saved is None else self.saved.calibrator,
        )
        return replaced(predict_from_raw_data, "export_prediction_from_logits", ours)

    def record(self) -> dict[str, Any]:
        """How the predictions are made, see :func:`segcal.repair.saved.model_of`."""
        return {
            "segcal": __version__,
            "dataset": self.plans_manager.dataset_name,
            "trainer": self.trainer_name,
            "plans": self.plans_manager.plans_name,
            "configuration": self.configuration_name,
            "checkpoint": self.checkpoint_name,
            "weights": self.weights,
            "folds": list(self.fold_names),
            "members": len(self.fold_names),
            "heads": self.heads,
            "average": self.aggregation.average,
            "over": ["mirrors", "windows", "folds"],
            "mirroring": bool(self.use_mirroring and self.allowed_mirroring_axes),
            "tile_step_size": self.tile_step_size,
            "sums": "float32",
        }

    def describe(self, output: Path) -> None:
        """Write how predictions are made, and what nnU-Net needs to read the folds' predictions."""
        record = self.record()
        if self.heads == 2:
            record["decision"] = DECISION_HEAD
        if self.saved is not None:
            record["calibrator"] = self.saved.summary()
        write_json(output / RECORD_NAME, record)
        for fold in self.fold_names if self.aggregation.per_fold else ():
            write_json(output / fold / RECORD_NAME, {**record, "folds": [fold], "members": 1})
            write_json(output / fold / "dataset.json", self.dataset_json)
            write_json(output / fold / "plans.json", self.plans_manager.plans)


def digest_of(network: nn.Module) -> str:
    """Digest of the weights as nnU-Net's checkpoint holds them, also of a compiled network."""
    return weights_digest(getattr(network, "_orig_mod", network).state_dict())


def _configuration_of(checkpoint: Path) -> str:
    """Name of the configuration that a checkpoint was trained with; nnU-Net forgets it."""
    return str(read_checkpoint(checkpoint)["init_args"]["configuration"])
