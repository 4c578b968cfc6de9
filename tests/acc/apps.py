"""The fixture app."""

from __future__ import annotations

from django.apps import AppConfig


class AccConfig(AppConfig):
    """Jobs that tell in a ledger when they ran."""

    name = "tests.acc"
    label = "acc"
    default_auto_field = "django.db.models.BigAutoField"
