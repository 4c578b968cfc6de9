"""The URLs to include if jobs are run over HTTP: path("jobs/", include("django_jobs.urls"))."""

from __future__ import annotations

from django.urls import re_path

from django_jobs import views

app_name = "django_jobs"
# With or without the slash: a redirect from one to the other would reveal that the URL exists.
urlpatterns = [re_path(r"^run/?$", views.run, name="run")]
