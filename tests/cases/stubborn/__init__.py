"""An app whose handlers do not stop when they are told to; only processes with its settings know its jobs."""
