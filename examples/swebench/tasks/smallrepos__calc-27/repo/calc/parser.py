"""Evaluating a formula by recursive descent."""

from calc.tokens import tokenize


class CalcError(Exception):
    """The formula cannot be evaluated."""


def evaluate(text: str) -> float:
    """The value of a formula."""
    try:
        tokens = tokenize(text)
    except ValueError as error:
        raise CalcError(str(error)) from error
    value = _sum(tokens)
    if tokens:
        raise CalcError(f"unexpected {tokens[0]!r}")
    return value


def _sum(tokens: list[str]) -> float:
    value = _term(tokens)
    if tokens and tokens[0] in "+-":
        operator = tokens.pop(0)
        right = _sum(tokens)
        return value + right if operator == "+" else value - right
    return value


def _term(tokens: list[str]) -> float:
    value = _power(tokens)
    if tokens and tokens[0] in "*/":
        operator = tokens.pop(0)
        right = _term(tokens)
        if operator == "*":
            return value * right
        if right == 0:
            raise CalcError("division by zero")
        return value / right
    return value


def _power(tokens: list[str]) -> float:
    base = _atom(tokens)
    if tokens and tokens[0] == "^":
        tokens.pop(0)
        return base ** _power(tokens)
    return base


def _atom(tokens: list[str]) -> float:
    if not tokens:
        raise CalcError("the formula ends too early")
    token = tokens.pop(0)
    if token == "-":
        return -_atom(tokens)
    if token == "(":
        value = _sum(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise CalcError("a parenthesis is not closed")
        return value
    try:
        return float(token)
    except ValueError as error:
        raise CalcError(f"unexpected {token!r}") from error
