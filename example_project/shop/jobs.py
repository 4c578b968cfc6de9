"""The background work of the shop; django_jobs imports this module by itself."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from django.core.mail import send_mail
from django.db.models import F
from django.utils import timezone

from django_jobs import Backoff, JobContext, Keep, Retry, job

from . import artwork, catalog, orders
from .models import Order, Product

logger = logging.getLogger(__name__)

RECEIPTS = {
    "en": ("Your order {order.pk}", "Thank you!\n\n{order.quantity} x {order.product}, {order.total} EUR in all."),
    "fr": ("Votre commande {order.pk}", "Merci !\n\n{order.quantity} x {order.product}, soit {order.total} EUR."),
}


BATCH = 500


class WebhookDownError(Exception):
    """The partner does not answer."""


class NoSuchProductError(Exception):
    """The product of a job does not exist."""


@job(retry=Retry(5), timeout=timedelta(seconds=30))
def send_receipt(ctx: JobContext, order_id: int, locale: str = "en") -> None:
    """Email the receipt of one paid order."""
    order = Order.objects.select_related("product").get(pk=order_id)
    subject, body = RECEIPTS.get(locale, RECEIPTS["en"])
    send_mail(subject.format(order=order), body.format(order=order), None, [order.email])
    Order.objects.filter(pk=order_id).update(receipt_sent_at=timezone.now())
    logger.info("Receipt of order %s sent at attempt %s", order_id, ctx.attempt)


@job(atomic=True, retry=3)
def book_stock(order_id: int) -> None:
    """Take an order's goods off the shelf, exactly once."""
    order = Order.objects.select_related("product").get(pk=order_id)
    shelf = Product.objects.filter(pk=order.product_id, stock__gte=order.quantity)
    taken = shelf.update(stock=F("stock") - order.quantity)
    order.status = Order.Status.BOOKED if taken else Order.Status.SOLD_OUT
    order.save(update_fields=["status"])
    logger.info("Order %s is %s", order_id, order.status)
    if taken:
        # In the same transaction as the stock: the warehouse is told if, and only if, the goods are booked.
        orders.start(order, ping_warehouse)


@job(retry=3, timeout=10)
async def ping_warehouse(order_id: int) -> None:
    """Tell the warehouse to pack one order."""
    await asyncio.sleep(0.3)
    await Order.objects.filter(pk=order_id).aupdate(warehouse_told_at=timezone.now())
    logger.info("The warehouse packs order %s", order_id)


@job(retry=Retry(3, backoff=Backoff(initial=2, factor=2, jitter=None)))
def flaky_webhook(ctx: JobContext, order_id: int) -> None:
    """Call a partner who answers only at the third attempt."""
    logger.info("Calling the partner about order %s, attempt %s of %s", order_id, ctx.attempt, ctx.max_attempts)
    if ctx.attempt < 3:
        raise WebhookDownError(f"503 Service Unavailable (order {order_id}, attempt {ctx.attempt})")


# A full disk may pass; a missing product does not come back.
@job(priority="low", retry=Retry(2, when=OSError))
def resize_image(product_id: int) -> None:
    """Make the thumbnail of one product's image."""
    product = Product.objects.filter(pk=product_id).first()
    if product is None:
        raise NoSuchProductError(f"There is no product {product_id}.")
    if not product.image:
        logger.warning("Product %s has no image", product_id)
        return
    artwork.save_thumbnail(product)


@job(cron="*/2 * * * *")
def restock() -> None:
    """Restock products that have run low, every two minutes."""
    filled = Product.objects.filter(stock__lt=3).update(stock=F("stock") + 10)
    logger.info("%s products filled up", filled)


@job(cron="30 3 * * *", timezone="Europe/Paris", misfire_grace=timedelta(hours=1), keep=Keep(ok=30))
def purge_orders() -> None:
    """Delete orders that are more than a year old, every night in Paris."""
    deleted, _ = Order.objects.filter(created_at__lt=timezone.now() - timedelta(days=365)).delete()
    logger.info("%s old rows deleted", deleted)


@job(priority="low", retry=2, timeout=timedelta(minutes=10))
def import_catalog(ctx: JobContext, lines: int = 20_000) -> None:
    """Import a supplier's catalogue, batch after batch; existing products stay as they are."""
    done = 0
    for batch in catalog.batches(lines, BATCH):
        Product.objects.bulk_create(batch, ignore_conflicts=True)
        done += len(batch)
        ctx.progress(done, lines, note=batch[-1].name)
        # A pause, so that others can write as well: SQLite has one writer at a time.
        if ctx.signal.wait(0.2):
            # Each batch is committed, and another run skips it: there is nothing to undo.
            logger.warning("Stopped after %s of %s lines: %s", done, lines, ctx.signal.reason)
            return
    logger.info("Took over %s lines", done)


@job(timeout=120)
def stock_take(ctx: JobContext, seconds: int = 40) -> None:
    """Count every shelf, slowly: watch its progress in the admin, and cancel it."""
    for done in range(seconds):
        ctx.progress(done, seconds, note=f"shelf {done + 1}")
        if ctx.signal.wait(1):
            logger.warning("Stopped at shelf %s: %s", done + 1, ctx.signal.reason)
            return
    logger.info("Counted %s shelves", seconds)
