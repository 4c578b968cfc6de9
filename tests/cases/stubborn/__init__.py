"""An app of unruly handlers; only processes with its settings know its jobs."""
