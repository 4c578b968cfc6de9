"""A table for the effects of jobs."""

from __future__ import annotations

from django.db import models


class Thing(models.Model):
    """Something that a job makes; one row is one effect."""

    name = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.name
