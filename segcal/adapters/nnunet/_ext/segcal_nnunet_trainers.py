"""What nnU-Net's trainer search imports: the classes live in segcal.adapters.nnunet.trainers."""

from segcal.adapters.nnunet.trainers import *  # noqa: F403
