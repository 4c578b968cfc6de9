"""Running claimed rows: from the call of the handler to the outcome that is written."""
