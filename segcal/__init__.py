"""segcal: calibrated medical image segmentation.

Import what you need from its own module, e.g. ``from segcal.penalties.crac import CRaC`` or
``from segcal.metrics.ece import ece``.
"""

__version__ = "0.1.0"
