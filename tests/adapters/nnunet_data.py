"""Preprocessed data of nnU-Net, written in a second; trainings of it in this process."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from segcal.datasets.phantom import PhantomSettings, make_phantom

NAME = "Dataset902_Tiny"
CLASSES = {"background": 0, "right ventricle": 1, "myocardium": 2, "left ventricle": 3}
REGIONS = {"background": 0, "heart": [1, 2, 3], "left": [2, 3], "cavity": [3]}
CASES = [f"case_{i}" for i in range(5)]
SPLIT = {"train": CASES[:2], "val": CASES[2:4], "calib": CASES[4:]}
SHAPE = (6, 32, 32)
SPACING = (8.0, 1.5, 1.5)


def architecture(axes):
    k = 3
    return {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": {
            "n_stages": k, "features_per_stage": [4, 8, 8], "kernel_sizes": [[3] * axes] * k,
            "conv_op": f"torch.nn.modules.conv.Conv{axes}d",
            "strides": [[1] * axes, *([[1, 2, 2][-axes:]] * (k - 1))],
            "n_conv_per_stage": [1] * k, "n_conv_per_stage_decoder": [1] * (k - 1),
            "conv_bias": True, "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{axes}d",
            "norm_op_kwargs": {"eps": 1e-5, "affine": True}, "dropout_op": None,
            "dropout_op_kwargs": None, "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }  # fmt: skip


def configuration(axes, channels):
    resampling = {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None}
    kinds = ("data", "seg", "probabilities")
    return {
        "data_identifier": "nnUNetPlans_3d", "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 3, "patch_size": [4, 16, 16][-axes:], "spacing": SPACING[-axes:],
        "median_image_size_in_voxels": SHAPE[-axes:], "batch_dice": axes == 2,
        "normalization_schemes": ["ZScoreNormalization"] * channels,
        "use_mask_for_norm": [False] * channels, "architecture": architecture(axes),
        **{f"resampling_fn_{k}": "resample_data_or_seg_to_shape" for k in kinds},
        **{f"resampling_fn_{k}_kwargs": resampling for k in kinds},
    }  # fmt: skip


class Tiny:
    """A data set under `root`."""

    def __init__(self, root, labels=CLASSES, channels=1, calib=False):
        self.root = root
        self.folder = root / "preprocessed" / NAME
        self.folder.mkdir(parents=True)
        dataset = {
            "channel_names": {str(i): f"channel {i}" for i in range(channels)}, "labels": labels,
            "numTraining": len(CASES), "file_ending": ".nii.gz",
        }  # fmt: skip
        if labels["background"] == 0 and "heart" in labels:
            dataset["regions_class_order"] = [1, 2, 3]
        low = {"inherits_from": "3d", "next_stage": "3d_cascade"}
        high = {"inherits_from": "3d", "previous_stage": "3d_low"}
        plans = {
            "dataset_name": NAME, "plans_name": "nnUNetPlans", "image_reader_writer": "SimpleITKIO",
            "original_median_spacing_after_transp": SPACING,
            "original_median_shape_after_transp": SHAPE,
            "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2],
            "configurations": {
                "2d": configuration(2, channels), "3d": configuration(3, channels),
                "3d_low": low, "3d_cascade": high,
            },
            "experiment_planner_used": "ExperimentPlanner", "label_manager": "LabelManager",
            "foreground_intensity_properties_per_channel": {str(i): {} for i in range(channels)},
        }  # fmt: skip
        split = SPLIT if calib else {k: SPLIT[k] for k in ("train", "val")}
        for name, content in (
            ("dataset", dataset), ("nnUNetPlans", plans), ("splits_final", [split]),
            ("dataset_fingerprint", {}),
        ):  # fmt: skip
            (self.folder / f"{name}.json").write_text(json.dumps(content))
        self._write_cases(plans, dataset, labels.get("ignore"), channels)

    def _write_cases(self, plans, dataset, ignore, channels):
        from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

        manager = PlansManager(plans).get_label_manager(dataset)
        wanted = list(
            manager.foreground_regions if manager.has_regions else manager.foreground_labels
        )
        if ignore is not None:
            wanted.append([-1, *manager.all_labels])
        locations = tuple(tuple(w) if isinstance(w, (list, tuple)) else w for w in wanted)
        written, labels = _cases(locations, ignore, channels)
        shutil.copytree(written.name, self.folder / "nnUNetPlans_3d")
        self.labels = {case: seg.copy() for case, seg in labels.items()}

    def set_plans(self, name, base, **entries):
        path = self.folder / "nnUNetPlans.json"
        plans = json.loads(path.read_text())
        plans["configurations"][name] = {"inherits_from": base, **entries}
        path.write_text(json.dumps(plans))

    def write_references(self):
        """The labels as files, which nnU-Net measures its validation by; return their folder."""
        folder = self.folder / "gt_segmentations"
        for case, seg in self.labels.items():
            write_nifti(folder / f"{case}.nii.gz", seg)
        return folder

    def write_images(self):
        """The images as files, those of all cases; return their folder."""
        from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2

        cases = nnUNetDatasetBlosc2(str(self.folder / "nnUNetPlans_3d"), CASES)
        for case in CASES:
            image = cases.load_case(case)[0][:][0]
            write_nifti(self.root / "images" / f"{case}_0000.nii.gz", image)
        return self.root / "images"

    def write_previous_stage(self, trainer):
        """What the low resolution of the cascade would have predicted: the labels, almost."""
        folder = self.root / "results" / NAME / f"{trainer}__nnUNetPlans__3d_low"
        folder = folder / "predicted_next_stage" / "3d_cascade"
        folder.mkdir(parents=True, exist_ok=True)
        from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2

        for case, seg in self.labels.items():
            previous = np.roll(np.where(seg == 4, 0, seg), 1, -1).astype(np.int8)
            nnUNetDatasetBlosc2.save_seg(previous, str(folder / case))


def write_nifti(path, array):
    """Write ``(z, y, x)`` with the voxel size of the data."""
    import SimpleITK as sitk  # noqa: N813

    path.parent.mkdir(parents=True, exist_ok=True)
    volume = sitk.GetImageFromArray(array)
    volume.SetSpacing(SPACING[::-1])
    sitk.WriteImage(volume, str(path))


@functools.cache
def _cases(locations, ignore, channels):
    """A folder of cases, for copying, and their labels by name."""
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
    from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2

    folder = tempfile.TemporaryDirectory()
    wanted = [list(w) if isinstance(w, tuple) else w for w in locations]
    labels = {}
    for i, case in enumerate(CASES):
        phantom = make_phantom(np.random.default_rng(i), PhantomSettings(shape=SHAPE))
        image = (phantom.image - phantom.image.mean()) / phantom.image.std()
        seg = phantom.labels.astype(np.int16)
        if ignore is not None:
            seg[:, 8:14] = ignore
        labels[case] = seg
        properties = {
            "class_locations": DefaultPreprocessor._sample_foreground_locations(seg[None], wanted),
            **as_read(),
        }
        data = np.stack([image] * channels).astype(np.float32)
        nnUNetDatasetBlosc2.save_case(data, seg[None], properties, str(Path(folder.name) / case))
    return folder, labels


def as_read():
    """What nnU-Net remembers of a case that it neither cropped nor resampled."""
    identity = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    return {
        "spacing": list(SPACING), "shape_before_cropping": SHAPE,
        "shape_after_cropping_and_before_resampling": SHAPE,
        "bbox_used_for_cropping": [[0, n] for n in SHAPE],
        "sitk_stuff": {
            "spacing": SPACING[::-1], "origin": (0.0, 0.0, 0.0), "direction": identity
        },
    }  # fmt: skip


def set_environment(monkeypatch, root):
    """Point nnU-Net to `root`; one process, no figure of its own."""
    for name in ("raw", "preprocessed", "results"):
        monkeypatch.setenv(f"nnUNet_{name}", str(root / name))
    monkeypatch.setenv("nnUNet_n_proc_DA", "0")
    from nnunetv2.training.logging.nnunet_logger import LocalLogger
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    monkeypatch.setattr(LocalLogger, "plot_progress_png", lambda self, folder: None)
    monkeypatch.setattr(nnUNetTrainer, "plot_network_architecture", lambda self: None)


def trainer(name, configuration, fold=0, *, epochs=2, resume=False):
    """Return nnU-Net's trainer of that name, its epochs short."""
    from nnunetv2.run.run_training import get_trainer_from_args

    from segcal.adapters.nnunet.registration import register
    from segcal.adapters.nnunet.running import Budget, seed_everything

    register()
    seed_everything(0)
    found = get_trainer_from_args(
        NAME, configuration, fold, name, continue_training=resume, device=torch.device("cpu")
    )
    Budget(epochs=epochs, iterations=2, val_iterations=2, save_every=1, seed=0).apply(found)
    return found


def records(of):
    lines = (Path(of.output_folder) / "segcal_log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
