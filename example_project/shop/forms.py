"""The order form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django import forms

if TYPE_CHECKING:
    from .models import Product


class OrderForm(forms.Form):
    """The customer's e-mail address and the quantity."""

    email = forms.EmailField(label="Your e-mail", widget=forms.EmailInput(attrs={"placeholder": "you@example.com"}))
    quantity = forms.IntegerField(min_value=1, max_value=20, initial=1)
    locale = forms.ChoiceField(label="Receipt in", choices=[("en", "English"), ("fr", "French")], initial="en")

    def __init__(self, product: Product, *args: object, **kwargs: object) -> None:
        super().__init__(*args, label_suffix="", **kwargs)  # type: ignore[arg-type]
        self.product = product

    def clean_quantity(self) -> int:
        """Refuse more than is on the shelf now; the job `book_stock` decides in the end."""
        quantity: int = self.cleaned_data["quantity"]
        if quantity > self.product.stock:
            raise forms.ValidationError(f"Only {self.product.stock} left.")
        return quantity
