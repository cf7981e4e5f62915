"""Name the convention error that most likely separates two tensors, on evidence."""

from .hypotheses import HYPOTHESES, Hypothesis
from .report import DiffReport, Explanation, explain_diff

__all__ = ["HYPOTHESES", "DiffReport", "Explanation", "Hypothesis", "explain_diff"]
