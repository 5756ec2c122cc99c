"""Plans from few simulations and short measurements, for tests of what is done with a plan.

It changes the process that imports it: one that a test starts, by ``imports=[tests.planner.brief_plans]`` for recipes.
"""

from functools import partial

from hetero_strategy.planner import auto, search
from hetero_strategy.profiling.cache import profile_on

search.NEIGHBOURS = 0
auto.Planner = partial(search.Planner, simulations=2)
auto.SECONDS = profile_on.__kwdefaults__["seconds"] = 0.1
