from slugs import slugify, unique_slug


def test_lower_case():
    assert slugify("Hello") == "hello"


def test_space_becomes_a_dash():
    assert slugify("hello world") == "hello-world"


def test_separator():
    assert slugify("hello world", separator="_") == "hello_world"


def test_unique_slug_counts_up():
    assert unique_slug("Hello", {"hello", "hello-2"}) == "hello-3"
