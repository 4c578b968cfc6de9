"""The app `shop`; its jobs are named shop.<function>."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """A corner shop with a counter and a back room."""

    name = "shop"
    default_auto_field = "django.db.models.BigAutoField"
