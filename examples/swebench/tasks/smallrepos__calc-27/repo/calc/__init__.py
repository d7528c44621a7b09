"""A small calculator."""

from calc.parser import CalcError, evaluate

__all__ = ["CalcError", "evaluate"]
