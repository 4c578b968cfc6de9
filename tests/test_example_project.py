"""The example shop works: each test runs its manage.py as a person would, on a database of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import die_with_parent
from tests.support import ROOT, wait_for

MANAGE = ROOT / "example_project" / "manage.py"

# It brings its own SQLite database, whatever engine the other tests run on.
pytestmark = [pytest.mark.subprocess, pytest.mark.sqlite]


class Shop:
    """The example project with its database and files in a folder."""

    def __init__(self, folder: Path, shell: Shell | None = None) -> None:
        self.folder = folder
        self._shell = shell
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("DJANGO", "DATABASE", "REDIS"))},
            "DATABASE_URL": f"sqlite:///{folder / 'shop.sqlite3'}",
            "VAR_DIR": str(folder / "var"),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }

    def manage(self, *arguments: str, code: int = 0) -> str:
        """Run a command that must end with this exit code; return what it printed."""
        done = subprocess.run(
            [sys.executable, str(MANAGE), *arguments],
            env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def ask(self, script: str) -> Any:
        """Run Python in the project and return what it left in `answer`, through JSON."""
        code = f"{PREFIX}\n{textwrap.dedent(script)}\nprint('answer', json.dumps(answer, default=str))"
        said = self._shell.run(code) if self._shell is not None else self.manage("shell", "-c", code)
        # Behind it may be lines of the log.
        return json.loads(said.rpartition("answer ")[2].splitlines()[0])


PREFIX = """
import json
from collections import Counter
from django.test import Client
from django_jobs.models import JobExecution
from shop.models import Order, Product
client = Client(SERVER_NAME="localhost")
"""


class Shell:
    """A process with the project loaded, which forks for each script: to load it for each took most of the time."""

    SCRIPT = """
import json, os, sys, traceback, django
django.setup()
import django.test
from config import urls
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        code = 0
        try:
            exec(json.loads(line), {})
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        # Without the end of an interpreter, which in a fork takes longer than a script.
        os._exit(code)
    print(f"\\nended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)
"""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT],
            env={**environment, "DJANGO_SETTINGS_MODULE": "config.settings"},
            cwd=MANAGE.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=die_with_parent,
        )  # fmt: skip

    def run(self, script: str) -> str:
        """Return what the script printed; it must come to its end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(script), file=self._process.stdin, flush=True)
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith("ended "):
                assert line == "ended 0\n", f"{line}{''.join(lines)}"
                return "".join(lines)
            lines.append(line)
        raise AssertionError(f"It broke off:\n{''.join(lines)}")

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a shop whose tables are there; copied for each test, since migrating takes seconds."""
    shop = Shop(tmp_path_factory.mktemp("pattern"))
    shop.manage("migrate", "--verbosity=0")
    return shop.folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop with a shell, in a folder that each test fills anew."""
    folder = tmp_path_factory.mktemp("home")
    shell = Shell(Shop(folder).environment)
    yield Shop(folder, shell)
    shell.close()


@pytest.fixture
def empty_shop(home: Shop, pattern: Path) -> Shop:
    shutil.rmtree(home.folder)
    shutil.copytree(pattern, home.folder)
    return home


@pytest.fixture
def shop(empty_shop: Shop) -> Shop:
    """A shop with one product."""
    with contextlib.closing(sqlite3.connect(empty_shop.folder / "shop.sqlite3")) as connection, connection:
        connection.execute(
            "INSERT INTO shop_product (id, name, tagline, price, stock, image, thumbnail) "
            "VALUES (1, 'Mug', '', 14.5, 5, '', '')"
        )
    return empty_shop


ORDER = "client.post('/products/1/order/', {'email': 'ada@example.com', 'quantity': 2, 'locale': 'fr'})"


def test_the_shop_passes_the_system_checks_and_its_migrations_are_up_to_date(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    assert "no issues" in shop.manage("check", "--fail-level=WARNING")
    assert "No changes detected" in shop.manage("makemigrations", "--check", "--dry-run")


def test_an_order_pushes_one_receipt(shop: Shop) -> None:
    answer = shop.ask(f"""
        response = {ORDER}
        rows = JobExecution.objects.filter(job_name="shop.send_receipt")
        answer = [response.status_code, Order.objects.count(), [row.payload for row in rows]]
    """)
    assert answer == [302, 1, [{"order_id": 1, "locale": "fr"}]]


def test_an_order_that_is_rolled_back_leaves_no_job(shop: Shop) -> None:
    answer = shop.ask("""
        from unittest import mock
        from shop import orders
        try:
            # The second push of the same transaction fails.
            with mock.patch("shop.jobs.book_stock", None):
                orders.place(Product.objects.get(), email="ada@example.com", quantity=1)
        except AttributeError:
            answer = [Order.objects.count(), JobExecution.objects.count()]
    """)
    assert answer == [0, 0]


def test_a_worker_sends_the_receipt_books_the_goods_and_tells_the_warehouse(shop: Shop) -> None:
    shop.ask(f"answer = {ORDER}.status_code")
    # Without the scheduler: the shelf is filled up each two minutes.
    shop.manage("runjobs", "--worker", "--once")
    # The warehouse's job was pushed by the job that booked the goods.
    shop.manage("runjobs", "--worker", "--once")
    answer = shop.ask("""
        order = Order.objects.get()
        answer = [
            order.status, Product.objects.get().stock, order.receipt_sent_at is not None,
            order.warehouse_told_at is not None, sorted(JobExecution.objects.values_list("job_name", "status")),
        ]
    """)
    assert answer[:4] == ["booked", 3, True, True]
    assert answer[4] == [["shop.book_stock", "ok"], ["shop.ping_warehouse", "ok"], ["shop.send_receipt", "ok"]]
    (receipt,) = (shop.folder / "var" / "mail").iterdir()
    assert "Subject: Votre commande 1" in receipt.read_text()


def test_the_shelf_is_filled_up_by_the_clock(shop: Shop) -> None:
    kind = shop.ask("""
        from shop.jobs import restock
        Product.objects.update(stock=2)
        restock.trigger(by="the test")
        answer = restock.kind
    """)
    assert kind == "cron"
    shop.manage("runjobs", "--once")
    assert shop.ask("answer = Product.objects.get().stock") == 12


def test_old_orders_are_purged_by_the_clock_of_paris(shop: Shop) -> None:
    answer = shop.ask("""
        from datetime import timedelta
        from django.utils import timezone
        from shop.jobs import purge_orders
        for days in (1, 400):
            order = Order.objects.create(product_id=1, email="ada@example.com")
            Order.objects.filter(pk=order.pk).update(created_at=timezone.now() - timedelta(days=days))
        purge_orders()
        answer = [list(Order.objects.values_list("pk", flat=True)), str(purge_orders.cron)]
    """)
    assert answer == [[1], "30 3 * * * Europe/Paris"]


def test_the_catalogue_is_imported_in_batches_and_twice_is_once(shop: Shop) -> None:
    answer = shop.ask("""
        from shop.jobs import BATCH, import_catalog
        lines = BATCH + 100
        import_catalog(lines=lines)
        Product.objects.filter(name="Bowl 00001").update(stock=99)
        import_catalog(lines=lines)
        answer = [Product.objects.count() - lines, Product.objects.get(name="Bowl 00001").stock]
    """)
    assert answer == [1, 99]


def test_an_import_stops_between_two_batches_when_it_is_told_to(shop: Shop) -> None:
    answer = shop.ask("""
        from django_jobs import JobContext
        from shop.jobs import BATCH, import_catalog
        context = JobContext.detached(import_catalog.name, {})
        context.signal.set("cancelled")
        import_catalog(context)
        answer = Product.objects.count() - 1 == BATCH
    """)
    assert answer is True


def test_one_import_is_started_at_a_time_from_the_first_page(shop: Shop) -> None:
    answer = shop.ask("""
        urls = [client.post("/import/").url for _ in range(2)]
        rows = JobExecution.objects.filter(job_name="shop.import_catalog")
        answer = [urls, [str(row.pk) for row in rows], rows.get().payload, rows.get().triggered_by_name]
    """)
    urls, (pk,), payload, by = answer
    assert urls == [f"/admin/django_jobs/jobexecution/{pk}/change/"] * 2
    assert (payload, by) == ({"lines": 20_000}, "a visitor")


@pytest.mark.slow
def test_a_running_import_can_be_cancelled(shop: Shop) -> None:
    shop.ask("answer = client.post('/import/').status_code")
    worker = subprocess.Popen(
        [sys.executable, str(MANAGE), "runjobs"],
        env=shop.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    database = f"file:{shop.folder / 'shop.sqlite3'}?mode=ro"

    def value(sql: str) -> Any:
        with contextlib.closing(sqlite3.connect(database, uri=True, timeout=20)) as connection:
            return connection.execute(sql).fetchone()[0]

    status = "SELECT status FROM django_jobs_jobexecution WHERE job_name = 'shop.import_catalog'"
    try:
        wait_for(lambda: value("SELECT COUNT(*) FROM shop_product") > 1, 30, "the first batch is there")
        shop.ask("answer = JobExecution.objects.get(job_name='shop.import_catalog').cancel(by='the test').status")
        wait_for(lambda: value(status) == "cancelled", 20, "the import has stopped")
    finally:
        worker.terminate()
        worker.wait(60)
    assert 1 < value("SELECT COUNT(*) FROM shop_product") < 20_000


def test_the_pages_answer_and_hold_no_inline_script_or_style(shop: Shop) -> None:
    shop.ask(f"answer = {ORDER}.status_code")
    pages = shop.ask("""
        paths = ["/", "/products/1/order/", "/orders/1/", "/orders/1/jobs/", "/admin/login/"]
        responses = {path: client.get(path) for path in paths}
        answer = {path: [r.status_code, r.headers["Content-Security-Policy"], r.content.decode()]
                  for path, r in responses.items()}
    """)
    for path, (status, policy, html) in pages.items():
        assert status == 200, path
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html), path


def test_the_order_page_shows_the_status_of_each_job(shop: Shop) -> None:
    shop.ask(f"answer = {ORDER}.status_code")
    count = """
        html = client.get("/orders/1/").content.decode()
        answer = {word: html.count(f'class="chip {word}"') for word in ("pending", "ok")}
    """
    before = shop.ask(count)
    shop.manage("runjobs", "--once")
    after = shop.ask(count)
    assert before["pending"] == 2
    assert after["ok"] >= 2


def test_sample_data_is_added_once(empty_shop: Shop) -> None:
    count = """
        from django.contrib.auth import get_user_model
        answer = [Product.objects.count(), Order.objects.count(), JobExecution.objects.count(),
                  get_user_model().objects.count()]
    """
    empty_shop.manage("demo_data")
    first = empty_shop.ask(count)
    empty_shop.manage("demo_data")
    assert empty_shop.ask(count) == first
    assert first[0] >= 6
    assert first[3] == 1


def test_one_job_of_the_sample_data_fails_and_says_why_that_is_meant(empty_shop: Shop) -> None:
    said = empty_shop.manage("demo_data")
    assert "a job will fail on purpose: shop.resize_image, for product 0." in said
    empty_shop.ask("answer = [row.start_now().status for row in JobExecution.objects.scheduled()]")
    empty_shop.manage("runjobs", "--once")
    ended = "JobExecution.objects.filter(status='error')"
    errors = empty_shop.ask(f"answer = [[row.error, row.attempt] for row in {ended}]")
    # A product that is not there is not looked for again.
    assert errors == [["NoSuchProductError: There is no product 0.", 1]]


def test_sample_data_makes_no_admin_without_debug(empty_shop: Shop) -> None:
    without_debug = Shop(empty_shop.folder)
    without_debug.environment |= {"DEBUG": "0", "SECRET_KEY": "from the environment"}
    without_debug.manage("demo_data")
    assert not empty_shop.ask("from django.contrib.auth.models import User; answer = User.objects.exists()")


def test_without_debug_a_secret_key_must_be_given(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.environment["DEBUG"] = "0"
    assert "SECRET_KEY" in shop.manage("check", code=1)


def test_the_demo_says_clearly_that_its_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = Shop(tmp_path).manage("demo", "--port", str(port), code=1)
    assert f"Port {port} cannot be used" in said
    assert "Traceback" not in said


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A running demo: the process, its port, and the file that gets its output."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(MANAGE), "demo", "--port", str(port)],
            env=Shop(tmp_path).environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    yield process, port, output
    if process.poll() is None:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_serves_and_works_until_a_signal_ends_both(
    demo: tuple[subprocess.Popen[bytes], int, Path], tmp_path: Path, number: signal.Signals
) -> None:
    process, port, output = demo

    def page() -> bytes:
        assert process.poll() is None, output.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as response:
                return bytes(response.read())
        except OSError:
            return b""

    wait_for(page, 60, "the shop answers")
    wait_for(lambda: list((tmp_path / "var" / "mail").glob("*")), 30, "the worker has sent a receipt")
    wait_for(lambda: "admin, password: admin" in output.read_text(), 60, "the welcome is written")
    process.send_signal(number)
    assert process.wait(60) == 0, output.read_text()
    assert not page_answers(port)
    assert "Traceback" not in output.read_text().partition("failed shop.resize_image")[0]


@pytest.mark.slow
def test_a_second_signal_ends_the_demo_without_waiting_for_what_runs(
    demo: tuple[subprocess.Popen[bytes], int, Path], tmp_path: Path
) -> None:
    process, _port, output = demo
    shop = Shop(tmp_path)
    status = 'answer = JobExecution.objects.get(job_name="shop.stock_take").status'
    wait_for(lambda: "admin, password: admin" in output.read_text(), 60, "the welcome is written")
    shop.manage("jobs", "push", "shop.stock_take")
    wait_for(lambda: shop.ask(status) == "running", 30, "the stock take runs")

    process.send_signal(signal.SIGINT)
    wait_for(lambda: "waiting up to" in output.read_text(), 30, "it waits for the stock take")
    process.send_signal(signal.SIGINT)

    assert process.wait(60) == 0, output.read_text()
    # Nobody waited until it could be ended.
    assert shop.ask(status) == "running"


def page_answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
