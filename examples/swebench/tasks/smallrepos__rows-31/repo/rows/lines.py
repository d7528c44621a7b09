"""Reading and writing one line."""


def parse_line(line: str) -> list[str]:
    """The fields of a line, without the spaces around them."""
    return [field.strip() for field in line.split(",")]


def format_line(fields: list[str]) -> str:
    """The fields as a line."""
    return ",".join(fields)
