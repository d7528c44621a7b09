import pytest

from calc import CalcError, evaluate


@pytest.mark.parametrize(("text", "value"), [("1 + 2 * 3", 7), ("(1 + 2) * 3", 9), ("-2 + 5", 3), ("7 - 2", 5)])
def test_values(text, value):
    assert evaluate(text) == value


def test_a_power_groups_from_the_right():
    assert evaluate("2 ^ 3 ^ 2") == 512


@pytest.mark.parametrize("text", ["1 +", "(1", "1 / 0", "1 $ 2"])
def test_errors(text):
    with pytest.raises(CalcError):
        evaluate(text)
