"""How a person says that work is to be spread, and what follows from it for given modules. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from hetero_strategy.errors import ConfigError
from hetero_strategy.plan.balance import POLICIES, Cost
from hetero_strategy.plan.orchestrator import AS_SAMPLED, Near, Orderer, ResolvedBalance
from hetero_strategy.plan.reorder import SEARCHES

REARRANGE = ("home", "permute", "ilp", "none")
TYPICAL = np.array([128])
"""Rows of an item whose cost is the same by a cost that is given and by the one it replaces."""


@dataclass(frozen=True)
class ModelContext:
    """What the model and its layouts say about balancing."""

    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Module -> FLOPs of its forward."""
    near: Mapping[str, Near] = field(default_factory=dict)
    """Encoders and generators some of whose instances lie near instances of the language model."""
    orderer: Callable[[str], Orderer | None] | None = None
    """Search -> what orders microbatches, or None where their order does not matter."""


@dataclass(frozen=True)
class BalanceConfig:
    """How the work of every step is spread over instances and microbatches.

    Costs and speeds also decide in which order microbatches run and how modules on the same ranks take turns. Nothing
    of it changes what a step computes: losses and gradients are those of the samples as drawn, up to rounding.

    Args:
        policy: for all modules or by module: ``auto`` (the best for the module's cost), ``none`` (as sampled: samples
            dealt in order, items with their samples), or one of :data:`hetero_strategy.plan.balance.POLICIES`. Modules
            not named are ``auto``.
        costs: module -> :class:`Cost` or its fields; default: the FLOPs of the module's forward, or a row counts 1.
            Given for all modules, they are in one unit, such as the seconds of a run's ``balance.json``; for some, each
            is scaled so that an item of 128 rows costs what it costs by default.
        speeds: module -> how fast each of its instances is, 1: as its cost says; default: all 1.
        budget: module -> most rows inside it that an instance may have in a microbatch. An encoder's or a generator's
            microbatches are split until it is kept; the language model's are, if ``microbatches`` is ``auto``.
        rearrange: how items are kept near their samples, where modules share ranks or nodes: ``home`` (balance around
            where their samples are), ``permute`` (balance, then permute whole batches: OrchMLLM, algorithm 3), ``ilp``
            (the same by integer programme), ``none``.
        reorder: order of microbatches in pipelines: ``search``, ``interval`` (DistTrain, algorithm 3) or ``none``.
        window: steps among which samples may move so that steps cost the same; 1: none leaves its step. Above 1 the
            global batches are other ones.

    Raises:
        ConfigError: an option that does not exist.
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
            object.__setattr__(self, name, dict(getattr(self, name) or {}))
        chosen = self.policy.values() if isinstance(self.policy, Mapping) else [self.policy]
        for policy in chosen:
            _one_of("policy", policy, (*POLICIES, AS_SAMPLED))
        _one_of("rearrange", self.rearrange, REARRANGE)
        _one_of("reorder", self.reorder, SEARCHES)
        if self.window < 1:
            raise ConfigError(f"balance: window is {self.window}; use 1 (no sample leaves its step) or more steps")
        for module, rows in self.budget.items():
            if rows < 1:
                raise ConfigError(f"balance: budget of '{module}' is {rows} rows; use at least 1")
        for module, speeds in self.speeds.items():
            if not all(speed > 0 for speed in speeds):
                raise ConfigError(f"balance: speeds of '{module}' are {list(speeds)}; every speed must be above 0")
        made = {m: c if isinstance(c, Cost) else _cost(m, c) for m, c in self.costs.items()}
        object.__setattr__(self, "costs", made)

    @classmethod
    def of(cls, value: BalanceConfig | str | Mapping[str, Any] | None) -> BalanceConfig:
        """From what a configuration has: nothing, a policy, fields, or the thing itself.

        Raises:
            ConfigError: a field that does not exist.
        """
        if isinstance(value, BalanceConfig):
            return value
        if value is None or isinstance(value, str):
            return cls(policy=value or "auto")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(value) - known):
            raise ConfigError(f"balance has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**{name: given for name, given in value.items() if given is not None})

    def check(self, modules: Sequence[str]) -> None:
        """Refuse what names no module.

        Raises:
            ConfigError: naming field and module.
        """
        for name in ("policy", "costs", "speeds", "budget"):
            given = getattr(self, name)
            for module in given if isinstance(given, Mapping) else ():
                if module not in modules:
                    raise ConfigError(f"balance: {name} names '{module}'; the modules are {', '.join(modules)}")

    def resolve(self, instances: Mapping[str, int], around: ModelContext) -> ResolvedBalance:
        """For given modules.

        Args:
            instances: data-parallel instances of every module.
            around: what model and layouts say.

        Raises:
            ConfigError: speeds of another number of instances.
        """
        for module, speeds in self.speeds.items():
            if len(speeds) != instances[module]:
                raise ConfigError(
                    f"balance: speeds of '{module}' has {len(speeds)} numbers, the module {instances[module]} instances"
                    " (dp_replicate * dp_shard); give one for each"
                )
        given = self.policy if isinstance(self.policy, Mapping) else dict.fromkeys(instances, self.policy)
        return ResolvedBalance(
            policy={module: given.get(module, "auto") for module in instances},
            costs={**around.costs, **self._costs(instances, around)},
            speeds={module: tuple(float(s) for s in speeds) for module, speeds in self.speeds.items()},
            budget=self.budget,
            near={} if self.rearrange == "none" else around.near,
            rearrange="home" if self.rearrange == "none" else self.rearrange,  # type: ignore[arg-type]
            order=None if around.orderer is None else around.orderer(self.reorder),
        )

    def _costs(self, instances: Mapping[str, int], around: ModelContext) -> dict[str, Cost]:
        """Those given, in one unit with those that are not."""
        found: dict[str, Cost] = dict(self.costs)
        if set(instances) <= set(found):
            return found
        for module, cost in found.items():
            usual, given = (float(c.alone(TYPICAL)[0]) for c in (around.costs.get(module, Cost()), cost))
            if given:
                parts = {name: getattr(cost, name) * usual / given for name in ("linear", "quadratic", "fixed")}
                found[module] = replace(cost, **parts)
        return found


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"balance: {name} is {value!r}; use one of {', '.join(known)}")


def _cost(module: str, given: Mapping[str, Any]) -> Cost:
    try:
        return Cost(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"balance: costs of '{module}': {error}") from None
