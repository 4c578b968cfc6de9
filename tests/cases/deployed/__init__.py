"""An app in two versions; only processes with its settings know its jobs."""
