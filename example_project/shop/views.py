"""The pages of the shop; every push happens here or in orders.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.db import transaction
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import NoReverseMatch, reverse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from django_jobs.models import JobExecution
from django_jobs.states import FINAL

from . import orders
from .forms import OrderForm
from .jobs import flaky_webhook, import_catalog, stock_take
from .models import Order, Product

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse


SHELF = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One line of the table of an order's jobs; `execution` is None when its row is gone."""

    name: str
    execution: JobExecution | None
    admin_url: str

    @property
    def live(self) -> bool:
        """Whether the line may still change."""
        return self.execution is not None and self.execution.status not in FINAL


@require_GET
def product_list(request: HttpRequest) -> HttpResponse:
    """Show the shelf."""
    context = {
        # The first ones: a catalogue may have been imported since.
        "products": Product.objects.order_by("pk")[:SHELF],
        "count": Product.objects.count(),
        "recent": Order.objects.select_related("product")[:5],
    }
    return render(request, "shop/product_list.html", context)


@require_http_methods(["GET", "POST"])
def order_form(request: HttpRequest, pk: int) -> HttpResponse:
    """Take an order: the order and its jobs are committed together."""
    product = get_object_or_404(Product, pk=pk)
    form = OrderForm(product, request.POST or None)
    if request.method == "POST" and form.is_valid():
        order = orders.place(product, **form.cleaned_data)
        messages.success(request, "Thank you! The order and its jobs were committed in one transaction.")
        return redirect(order)
    return render(request, "shop/order_form.html", {"product": product, "form": form})


@require_GET
def order_page(request: HttpRequest, pk: int) -> HttpResponse:
    """Show an order and what its jobs are doing."""
    return render(request, "shop/order.html", _order_context(pk))


@require_GET
def order_jobs(request: HttpRequest, pk: int) -> HttpResponse:
    """Return only the part of the order page that changes; the page fetches it every second."""
    return render(request, "shop/_jobs.html", _order_context(pk))


@require_POST
def call_webhook(request: HttpRequest, pk: int) -> HttpResponse:
    """Start the job that fails twice before it works."""
    with transaction.atomic():
        order = get_object_or_404(Order, pk=pk)
        orders.start(order, flaky_webhook)
    messages.info(request, "The partner will not answer at once: watch the attempts below.")
    return redirect(order)


@require_POST
def start_stock_take(request: HttpRequest) -> HttpResponse:
    """Start the long job, unless one is live already."""
    return _start_one(request, stock_take, "Counting the shelves.", "Somebody is counting already.")


@require_POST
def start_import(request: HttpRequest) -> HttpResponse:
    """Start the import of the catalogue, unless one is alive already."""
    return _start_one(request, import_catalog, "The catalogue is being read.", "It is being read already.")


def _start_one(request: HttpRequest, job: Any, started: str, alive: str) -> HttpResponse:
    by = request.user if request.user.is_authenticated else "a visitor"
    # All pushes have one key, so there is one live execution at a time.
    execution = job.using(key="one", by=by).push()
    messages.info(request, started if execution.created else alive)
    return redirect(_admin_url(execution.pk) or "shop:products")


def _order_context(pk: int) -> dict[str, Any]:
    order = get_object_or_404(Order.objects.select_related("product"), pk=pk)
    started = list(order.jobs.all())
    rows = JobExecution.objects.in_bulk([line.execution_id for line in started])
    lines = [
        JobLine(name=line.job_name, execution=rows.get(line.execution_id), admin_url=_admin_url(line.execution_id))
        for line in started
    ]
    waiting = order.status == Order.Status.PLACED or any(line.live for line in lines)
    return {"order": order, "lines": lines, "waiting": waiting}


def _admin_url(execution_id: object) -> str:
    try:
        return reverse("admin:django_jobs_jobexecution_change", args=[execution_id])
    except NoReverseMatch:
        return ""
