"""Evaluates files of predictions against labels: single cases, whole data sets, several methods."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segcal.evaluation.api import Comparison, Report, compare_methods, evaluate

__all__ = ["Comparison", "Report", "compare_methods", "evaluate"]


def __getattr__(name: str) -> Any:
    """Import a name only when it is used, since ``segcal check`` needs none of them."""
    if name in __all__:
        from segcal.evaluation import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
