"""Raises when it is imported: looking at a row that names it must not do so."""

raise RuntimeError("imported")
