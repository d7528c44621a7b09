"""Titles as parts of web addresses."""

from slugs.core import slugify, unique_slug

__all__ = ["slugify", "unique_slug"]
