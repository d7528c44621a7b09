"""Making slugs."""


def slugify(title: str, separator: str = "-") -> str:
    """The title in lower case, with a separator in place of all that is no letter or digit."""
    out = []
    for char in title.lower():
        if char.isalnum():
            out.append(char)
        else:
            out.append(separator)
    return "".join(out)


def unique_slug(title: str, taken: set[str]) -> str:
    """A slug that is not among those taken: a number is added if need be."""
    slug = slugify(title)
    if slug not in taken:
        return slug
    number = 2
    while f"{slug}-{number}" in taken:
        number += 1
    return f"{slug}-{number}"
