"""From files of predictions and labels to numbers of cases, of a cohort, and of several methods."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segcal.evaluation.api import Comparison, Report, compare_methods, evaluate

__all__ = ["Comparison", "Report", "compare_methods", "evaluate"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, and not before: ``segcal check`` needs none of it."""
    if name in __all__:
        from segcal.evaluation import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
