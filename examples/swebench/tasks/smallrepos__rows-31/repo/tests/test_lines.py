from rows import format_line, parse_line


def test_fields():
    assert parse_line("a,b,c") == ["a", "b", "c"]


def test_spaces_are_removed():
    assert parse_line(" a , b") == ["a", "b"]


def test_empty_fields():
    assert parse_line("a,,") == ["a", "", ""]


def test_format():
    assert format_line(["a", "b"]) == "a,b"
