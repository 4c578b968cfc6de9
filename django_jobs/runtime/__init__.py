"""The parts of `runjobs`: the worker, and the ticks that stage, schedule, rescue, sweep and trim."""
