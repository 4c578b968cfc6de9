"""Sphinx configuration; build with `sphinx-build -W docs docs/_build/html`."""

from __future__ import annotations

import sys
from pathlib import Path

import django
from django.conf import settings

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

# The diagram of the statuses is drawn from the code, which needs a configured Django and no database.
if not settings.configured:
    settings.configure(INSTALLED_APPS=["django_jobs"], USE_TZ=True)
    django.setup()

project = "django_jobs"
author = "django_jobs contributors"
copyright = "django_jobs contributors"
html_title = "django_jobs"

extensions = ["myst_parser", "state_diagram"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["state-diagram.css"]
html_theme_options = {"source_directory": "docs/"}
