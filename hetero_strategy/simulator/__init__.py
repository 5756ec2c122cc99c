"""Simulate a schedule: the schedule that the runtime runs, with costs in place of devices. Pure."""
