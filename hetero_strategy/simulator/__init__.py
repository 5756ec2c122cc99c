"""What a schedule would cost: the schedule that the runtime runs, with costs in place of devices. Pure."""
