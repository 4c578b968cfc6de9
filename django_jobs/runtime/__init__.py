"""What `runjobs` consists of: the worker, and the ticks that stage, schedule, rescue, sweep and trim."""
