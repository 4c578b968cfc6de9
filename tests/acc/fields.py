"""A key of the kind projects choose for DEFAULT_AUTO_FIELD."""

from __future__ import annotations

from django.db import models


class WideAutoField(models.BigAutoField):
    """A BigAutoField of the project's own."""
