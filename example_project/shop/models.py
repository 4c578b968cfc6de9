"""Products, the orders for them, and which jobs an order has started."""

from __future__ import annotations

from decimal import Decimal

from django.core.validators import MinValueValidator
from django.db import models
from django.urls import reverse


class Product(models.Model):
    """A thing on the shelf."""

    name = models.CharField(max_length=80, unique=True)
    tagline = models.CharField(max_length=120, blank=True)
    price = models.DecimalField(max_digits=8, decimal_places=2, validators=[MinValueValidator(Decimal("0.01"))])
    stock = models.PositiveIntegerField(default=0)
    image = models.ImageField(upload_to="products", blank=True)
    thumbnail = models.ImageField(upload_to="thumbnails", blank=True, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Order(models.Model):
    """One customer's order of one product."""

    class Status(models.TextChoices):
        """PLACED until the job `book_stock` has looked at the shelf."""

        PLACED = "placed", "Placed"
        BOOKED = "booked", "Booked"
        SOLD_OUT = "sold_out", "Sold out"

    product = models.ForeignKey(Product, on_delete=models.PROTECT, related_name="orders")
    email = models.EmailField()
    quantity = models.PositiveSmallIntegerField(default=1, validators=[MinValueValidator(1)])
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.PLACED)
    created_at = models.DateTimeField(auto_now_add=True)
    receipt_sent_at = models.DateTimeField(null=True, blank=True)
    warehouse_told_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"Order {self.pk}"

    def get_absolute_url(self) -> str:
        """Return the page that shows the order and its jobs."""
        return reverse("shop:order", args=[self.pk])

    @property
    def total(self) -> Decimal:
        """The price of everything ordered."""
        return self.product.price * self.quantity


class OrderJob(models.Model):
    """The id of a job that an order started; the job's own row may be gone before this one."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="jobs")
    job_name = models.CharField(max_length=100)
    execution_id = models.UUIDField(unique=True)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return f"{self.job_name} of order {self.order_id}"
