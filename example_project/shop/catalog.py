"""The catalogue of a fictitious supplier: a CSV file that is generated while it is read."""

from __future__ import annotations

import csv
import itertools
from decimal import Decimal
from typing import TYPE_CHECKING

from .models import Product

if TYPE_CHECKING:
    from collections.abc import Iterator

THINGS = ["Basket", "Bowl", "Brush", "Candle", "Clock", "Cushion", "Frame", "Hook", "Jug", "Tray"]
STUFFS = ["ash", "brass", "clay", "cork", "glass", "linen", "oak", "slate", "steel", "wool"]


def batches(lines: int, size: int) -> Iterator[list[Product]]:
    """Yield the unsaved products of the catalogue in lists of `size`, without ever loading all of it."""
    reader = csv.DictReader(_file(lines))
    products = (
        Product(name=row["name"], tagline=row["tagline"], price=Decimal(row["price"]), stock=int(row["stock"]))
        for row in reader
    )
    while batch := list(itertools.islice(products, size)):
        yield batch


def _file(lines: int) -> Iterator[str]:
    yield "name,tagline,price,stock\n"
    for number in range(1, lines + 1):
        thing, stuff = THINGS[number % 10], STUFFS[number // 10 % 10]
        yield f'{thing} {number:05},"Of {stuff}, from the catalogue.",{number % 90 + 5}.90,{number % 40 + 10}\n'
