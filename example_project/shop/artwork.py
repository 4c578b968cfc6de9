"""Draw the pictures of the sample products and cut thumbnails, with Pillow."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from django.core.files.base import ContentFile
from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Callable

    from .models import Product

SIZE = 960
THUMBNAIL = 480

Draw = ImageDraw.ImageDraw
INK, PAPER, SHADE = "#26332f", "#fdfaf3", "#00000022"


def _mug(draw: Draw) -> None:
    draw.ellipse((590, 360, 800, 620), outline="#c8553d", width=44)
    draw.rounded_rectangle((250, 290, 660, 720), 60, fill="#c8553d")
    draw.rounded_rectangle((250, 290, 660, 370), 36, fill=PAPER)
    draw.ellipse((400, 470, 510, 580), fill=PAPER)


def _notebook(draw: Draw) -> None:
    draw.rounded_rectangle((290, 200, 700, 770), 34, fill="#2f6f62")
    draw.rectangle((290, 200, 360, 770), fill="#24574d")
    draw.rounded_rectangle((420, 300, 640, 410), 14, fill=PAPER)
    draw.rectangle((610, 700, 640, 830), fill="#e0a526")


def _pencil(draw: Draw) -> None:
    draw.polygon([(250, 640), (590, 300), (680, 390), (340, 730)], fill="#e0a526")
    draw.polygon([(590, 300), (630, 260), (720, 350), (680, 390)], fill="#c8553d")
    draw.polygon([(250, 640), (340, 730), (205, 775)], fill="#f3d9b1")
    draw.polygon([(225, 710), (270, 755), (205, 775)], fill=INK)


def _lamp(draw: Draw) -> None:
    draw.line([(480, 330), (400, 520), (500, 720)], fill=INK, width=28, joint="curve")
    draw.polygon([(390, 330), (600, 210), (720, 430), (470, 440)], fill="#2f6f62")
    draw.ellipse((560, 400, 650, 470), fill="#ffe08a")
    draw.rounded_rectangle((350, 710, 650, 770), 28, fill=INK)


def _blanket(draw: Draw) -> None:
    for row, colour in enumerate(["#6b7fa3", "#8fa1c0", "#6b7fa3", "#56688a"]):
        top = 320 + row * 100
        draw.rounded_rectangle((220, top, 740, top + 92), 44, fill=colour)
    for x in range(260, 720, 60):
        draw.line([(x, 712), (x, 762)], fill="#56688a", width=12)


def _tea(draw: Draw) -> None:
    draw.rounded_rectangle((310, 330, 650, 770), 30, fill="#3d5a45")
    draw.rounded_rectangle((290, 250, 670, 350), 30, fill="#2c4433")
    draw.rounded_rectangle((360, 440, 600, 660), 20, fill=PAPER)
    draw.pieslice((410, 480, 550, 620), 20, 200, fill="#7ba05b")
    draw.pieslice((410, 480, 550, 620), 200, 380, fill="#9dbb7d")


PICTURES: dict[str, tuple[str, Callable[[Draw], None]]] = {
    "mug": ("#f4d9cf", _mug),
    "notebook": ("#d5e6df", _notebook),
    "pencil": ("#f7ebcc", _pencil),
    "lamp": ("#dfe9e4", _lamp),
    "blanket": ("#e1e6f0", _blanket),
    "tea": ("#e6ecd9", _tea),
}


def picture(name: str) -> ContentFile[bytes]:
    """Draw one of PICTURES as a PNG file."""
    background, draw_it = PICTURES[name]
    image = Image.new("RGB", (SIZE, SIZE), background)
    draw = ImageDraw.Draw(image, "RGBA")
    draw.ellipse((180, 740, 780, 830), fill=SHADE)
    draw_it(draw)
    return _png(image, f"{name}.png")


def save_thumbnail(product: Product) -> None:
    """Write a smaller copy of the product's image and point the product at it."""
    with product.image.open() as file, Image.open(file) as image:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        small = _png(image, f"{product.pk}.png")
    # A second run overwrites its own file, so that a job run twice leaves no litter.
    product.thumbnail.storage.delete(f"thumbnails/{product.pk}.png")
    product.thumbnail.save(f"{product.pk}.png", small, save=False)
    product.save(update_fields=["thumbnail"])


def _png(image: Image.Image, name: str) -> ContentFile[bytes]:
    buffer = BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return ContentFile(buffer.getvalue(), name=name)
