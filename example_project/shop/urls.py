"""The URLs of the shop."""

from __future__ import annotations

from django.urls import path

from . import views

app_name = "shop"
urlpatterns = [
    path("", views.product_list, name="products"),
    path("products/<int:pk>/order/", views.order_form, name="order_form"),
    path("orders/<int:pk>/", views.order_page, name="order"),
    path("orders/<int:pk>/jobs/", views.order_jobs, name="order_jobs"),
    path("orders/<int:pk>/webhook/", views.call_webhook, name="webhook"),
    path("import/", views.start_import, name="import"),
    path("stock-take/", views.start_stock_take, name="stock_take"),
]
