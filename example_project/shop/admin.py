"""The shelf and the orders in the admin; the jobs bring their own pages."""

from __future__ import annotations

from django.contrib import admin

from .models import Order, Product


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    """The shelf."""

    list_display = ["name", "price", "stock"]
    search_fields = ["name"]


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    """The orders."""

    list_display = ["__str__", "product", "quantity", "email", "status", "created_at", "receipt_sent_at"]
    list_filter = ["status"]
    list_select_related = ["product"]
    search_fields = ["email"]
