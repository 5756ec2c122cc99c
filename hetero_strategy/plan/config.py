"""Options of balancing as a user gives them, and what follows from them for given modules. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from hetero_strategy.errors import ConfigError, is_whole, require
from hetero_strategy.plan.balance import POLICIES, Cost
from hetero_strategy.plan.orchestrator import AS_SAMPLED, Beside, Near, Orderer, ResolvedBalance
from hetero_strategy.plan.reorder import SEARCHES

REARRANGE = ("home", "permute", "ilp", "none")
TYPICAL = np.array([128])
"""Rows of the item whose cost is kept where a user's cost replaces the default one."""


@dataclass(frozen=True)
class ModelContext:
    """What follows from the model and its layouts for balancing."""

    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Module -> its cost, in FLOPs of the forward."""
    near: Mapping[str, Near] = field(default_factory=dict)
    """Encoder or generator -> which of its instances lie near which instances of the language model."""
    orderer: Callable[[str], Orderer | None] | None = None
    """Takes the name of a search; gives what orders microbatches, or None where their order does not matter."""
    beside: Mapping[str, Beside] = field(default_factory=dict)
    """Modules whose instances need not keep step with each other -> what else their ranks do."""
    islands: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Module -> number of the island of each instance, see :func:`~hetero_strategy.layout.islands.islands_of`."""


@dataclass(frozen=True)
class BalanceConfig:
    """How the work of every step is spread over instances and microbatches.

    Costs and speeds also decide in which order microbatches run and how modules on the same ranks take turns. None of
    this changes what a step computes: losses and gradients are those of the samples as drawn, up to rounding.

    Args:
        policy: for all modules or by module: ``auto`` (the best for the module's cost), ``none`` (as sampled: samples
            dealt in turn, items with their samples), or one of :data:`hetero_strategy.plan.balance.POLICIES`. Modules
            that are not named are ``auto``.
        costs: module -> :class:`Cost` or its fields; default: the FLOPs of the module's forward, or 1 per row. If all
            modules have one, costs share a unit, such as the seconds of a run's ``balance.json``; otherwise each is
            scaled so that an item of 128 rows costs what it costs by default.
        speeds: module -> relative speed of each of its instances; default: all 1.
        budget: module -> most rows inside it that an instance may have in a microbatch. An encoder's or a generator's
            microbatches are split until they keep it; a step has as many as the first language model's takes.
        rearrange: how items are kept near their samples where modules share ranks or nodes: ``home`` (balance around
            where their samples are), ``permute`` (balance, then permute whole batches: OrchMLLM, algorithm 3), ``ilp``
            (the same by integer program), ``none``.
        reorder: order of microbatches in pipelines: ``search``, ``interval`` (DistTrain, algorithm 3) or ``none``.
        window: number of steps among which samples may move so that steps have nearly as many tokens.
            Above 1 global batches change.

    Raises:
        ConfigError: an option or a value does not exist.
    """

    policy: str | Mapping[str, str] = "auto"
    costs: Mapping[str, Any] = field(default_factory=dict)
    speeds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)
    rearrange: str = "home"
    reorder: str = "search"
    window: int = 1

    def __post_init__(self) -> None:
        for name in ("costs", "speeds", "budget"):
            given = getattr(self, name)
            if not isinstance(given or {}, Mapping):
                raise ConfigError(f"balance: {name}={given!r}; give it by module, such as {name}={{'llm': ...}}")
            object.__setattr__(self, name, dict(given or {}))
        chosen = self.policy.values() if isinstance(self.policy, Mapping) else [self.policy]
        for policy in chosen:
            _one_of("policy", policy, (*POLICIES, AS_SAMPLED))
        _one_of("rearrange", self.rearrange, REARRANGE)
        if self.rearrange == "ilp":
            require("cvxpy", "planner", "balance: rearrange='ilp'")
        _one_of("reorder", self.reorder, SEARCHES)
        if not is_whole(self.window, 1):
            raise ConfigError(f"balance: window is {self.window!r}; use 1 (no sample leaves its step) or more steps")
        for module, rows in self.budget.items():
            if not is_whole(rows, 1):
                raise ConfigError(f"balance: budget of '{module}' is {rows!r}; use a number of rows, at least 1")
        for module, speeds in self.speeds.items():
            if not isinstance(speeds, Sequence | np.ndarray) or not all(
                isinstance(speed, int | float | np.number) and 0 < speed < np.inf for speed in speeds
            ):
                raise ConfigError(f"balance: speeds of '{module}' are {speeds!r}; give a list of finite ones above 0")
        costs = {m: c if isinstance(c, Cost) else _cost(m, c) for m, c in self.costs.items()}
        object.__setattr__(self, "costs", costs)

    @classmethod
    def of(cls, value: BalanceConfig | str | Mapping[str, Any] | None) -> BalanceConfig:
        """Make one from what a configuration holds: nothing, a policy, fields, or a ``BalanceConfig`` itself.

        Raises:
            ConfigError: a field does not exist.
        """
        if isinstance(value, BalanceConfig):
            return value
        if value == AS_SAMPLED:
            return cls(policy=AS_SAMPLED, rearrange="none", reorder="none")
        if value is None or isinstance(value, str):
            return cls(policy=value or "auto")
        if not isinstance(value, Mapping):
            raise ConfigError(f"MultimodalDataModule: balance={value!r}; give a policy, or fields of BalanceConfig")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(value) - known):
            raise ConfigError(f"balance has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**{name: option for name, option in value.items() if option is not None})

    def check(self, modules: Sequence[str]) -> None:
        """Refuse options for modules that do not exist.

        Raises:
            ConfigError: an option names an unknown module.
        """
        for name in ("policy", "costs", "speeds", "budget"):
            option = getattr(self, name)
            for module in option if isinstance(option, Mapping) else ():
                if module not in modules:
                    raise ConfigError(f"balance: {name} names '{module}'; the modules are {', '.join(modules)}")

    def policy_of(self, module: str) -> str:
        """The policy of a module, ``auto`` where none is given."""
        return self.policy.get(module, "auto") if isinstance(self.policy, Mapping) else self.policy

    def resolve(self, instances: Mapping[str, int], context: ModelContext) -> ResolvedBalance:
        """Say how the work of given modules is spread; ``instances``: module -> number of its data-parallel instances.

        Raises:
            ConfigError: a module has speeds for another number of instances.
        """
        for module, speeds in self.speeds.items():
            if len(speeds) != instances[module]:
                raise ConfigError(
                    f"balance: speeds of '{module}' has {len(speeds)} numbers, the module {instances[module]} instances"
                    " (dp_replicate * dp_shard); give one for each"
                )
        return ResolvedBalance(
            policy={module: self.policy_of(module) for module in instances},
            costs={**context.costs, **self._costs(instances, context)},
            speeds={module: tuple(float(s) for s in speeds) for module, speeds in self.speeds.items()},
            budget=self.budget,
            near={} if self.rearrange == "none" else context.near,
            rearrange="home" if self.rearrange == "none" else self.rearrange,  # type: ignore[arg-type]
            beside=context.beside,
            order=None if context.orderer is None else context.orderer(self.reorder),
            islands=context.islands,
        )

    def _costs(self, instances: Mapping[str, int], context: ModelContext) -> dict[str, Cost]:
        """The user's costs, scaled to the unit of the default ones if some modules keep these."""
        costs: dict[str, Cost] = dict(self.costs)
        if set(instances) <= set(costs):
            return costs
        for module, cost in costs.items():
            usual, new = (float(c.alone(TYPICAL)[0]) for c in (context.costs.get(module, Cost()), cost))
            if new:
                parts = {name: getattr(cost, name) * usual / new for name in ("linear", "quadratic", "fixed")}
                costs[module] = replace(cost, **parts)
        return costs


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"balance: {name} is {value!r}; use one of {', '.join(known)}")


def _cost(module: str, fields: Mapping[str, Any]) -> Cost:
    try:
        return Cost(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"balance: costs of '{module}': {error}") from None
