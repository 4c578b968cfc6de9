"""A table for the effects of jobs, and a user model of the project's own."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.auth.models import AbstractBaseUser, BaseUserManager
from django.db import models


class Thing(models.Model):
    """Something that a job makes; one row is one effect."""

    name = models.CharField(max_length=100)

    def __str__(self) -> str:
        return self.name


class Person(AbstractBaseUser):
    """For AUTH_USER_MODEL, in tests of projects that have their own."""

    name = models.CharField(max_length=100, unique=True)

    USERNAME_FIELD = "name"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    objects = BaseUserManager()

    def __str__(self) -> str:
        return self.name
