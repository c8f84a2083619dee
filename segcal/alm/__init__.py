"""Augmented Lagrangian: functions of a constraint, and weights updated in validation."""

from segcal.alm.functions import FUNCTIONS, p2, p3, phr, relu
from segcal.alm.lagrangian import AugmentedLagrangian

__all__ = ["FUNCTIONS", "AugmentedLagrangian", "p2", "p3", "phr", "relu"]
