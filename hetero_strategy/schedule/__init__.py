"""Schedules: the order in which a step's work runs."""
