"""Fill the shop with sample products, orders and jobs; safe to repeat."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand
from django.db import transaction

from shop import artwork, orders
from shop.jobs import flaky_webhook, resize_image
from shop.models import Order, Product

PRODUCTS = [
    ("Enamel mug", "For coffee that waits longer than you do.", "14.50", 25, "mug"),
    ("Linen notebook", "160 pages, nobody will cancel them.", "12.00", 40, "notebook"),
    ("Brass pencil", "Writes at least once.", "19.90", 8, "pencil"),
    ("Desk lamp", "Wakes up at once.", "64.00", 5, "lamp"),
    ("Wool blanket", "For the night shift.", "89.00", 3, "blanket"),
    ("Tin of tea", "Steeps in the background.", "9.80", 60, "tea"),
]
ORDERS = [
    ("Enamel mug", "ada@example.com", 2, "en"),
    ("Tin of tea", "blaise@example.com", 1, "fr"),
    ("Desk lamp", "grace@example.com", 1, "en"),
]
# Seconds, so that the traceback does not appear in the midst of the first lines.
FAILS_AFTER = 10


class Command(BaseCommand):
    """Create missing data and leave existing data alone."""

    help = "Fill the shop with sample products, orders and jobs; safe to repeat."

    def handle(self, *args: Any, **options: Any) -> None:
        """See the module."""
        made = sum(self._product(*line) for line in PRODUCTS)
        placed = self._orders()
        self.stdout.write(f"{made} products and {placed} orders added.")
        if placed:
            self.stdout.write(f"In {FAILS_AFTER} s a job will fail on purpose: shop.resize_image, for product 0.")
        if settings.DEBUG:
            self._admin()

    def _product(self, name: str, tagline: str, price: str, stock: int, picture: str) -> bool:
        with transaction.atomic():
            product, created = Product.objects.get_or_create(
                name=name, defaults={"tagline": tagline, "price": Decimal(price), "stock": stock}
            )
            if created:
                product.image.save(f"{picture}.png", artwork.picture(picture))
                resize_image.push(product_id=product.pk)
        return created

    def _orders(self) -> int:
        if Order.objects.exists():
            return 0
        for name, email, quantity, locale in ORDERS:
            order = orders.place(Product.objects.get(name=name), email=email, quantity=quantity, locale=locale)
        orders.start(order, flaky_webhook)
        # The product does not exist: this job ends as an error, to be inspected and retried in the admin.
        resize_image.using(delay=FAILS_AFTER).push(product_id=0)
        return len(ORDERS)

    def _admin(self) -> None:
        users = get_user_model().objects
        if not users.filter(username="admin").exists():
            users.create_superuser("admin", "admin@example.com", "admin")
            self.stdout.write("User admin added, password admin (because DEBUG is on).")
