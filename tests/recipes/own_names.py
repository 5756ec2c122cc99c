"""What a person registers by name in a file of their own, and gives to the recipes as ``imports``."""

from __future__ import annotations

from hetero_strategy.plan.balance import POLICIES, register_policy
from hetero_strategy.schedule.policies import SchedulePolicy, register_schedule, schedule_policy

register_schedule(SchedulePolicy("own_schedule", schedule_policy("1f1b").programs))
register_policy("own_policy", POLICIES["lpt"])
