"""Place orders and start their jobs; called by the views, the jobs and the sample data."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from .models import Order, OrderJob, Product


def place(product: Product, *, email: str, quantity: int, locale: str = "en") -> Order:
    """Create an order together with its jobs: all or nothing."""
    # jobs.py imports this module.
    from .jobs import book_stock, send_receipt

    with transaction.atomic():
        order = Order.objects.create(product=product, email=email, quantity=quantity)
        start(order, send_receipt, locale=locale)
        start(order, book_stock)
    return order


def start(order: Order, job: Any, **payload: Any) -> None:
    """Push a job for an order and record its id."""
    execution = job.using(key=f"order-{order.pk}").push(order_id=order.pk, **payload)
    OrderJob.objects.get_or_create(order=order, execution_id=execution.pk, defaults={"job_name": execution.job_name})
