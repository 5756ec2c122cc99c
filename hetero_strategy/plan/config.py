"""``BalanceConfig``: the options of balancing, and what follows from them for a model in its layouts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from hetero_strategy.errors import ConfigError, is_whole
from hetero_strategy.plan.balance import POLICIES, Cost
from hetero_strategy.plan.deal_rows import Dealing
from hetero_strategy.plan.masks import AttentionRules
from hetero_strategy.plan.near_home import REARRANGEMENTS
from hetero_strategy.plan.plan_step import AS_SAMPLED, Near, Orderer, OtherWork, ResolvedBalance
from hetero_strategy.plan.reorder import SEARCHES

PAPERS = "names of papers need their import, such as imports=[hetero_strategy.papers.orchmllm_padding]"
TYPICAL = np.array([128])
"""Rows of the item whose cost stays the same if a user's cost replaces the default one."""


@dataclass(frozen=True)
class ModelContext:
    """The facts of a model and its layouts that balancing needs."""

    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Module -> its cost, in FLOPs of the forward."""
    near: Mapping[str, Near] = field(default_factory=dict)
    """Encoder or generator -> which of its instances are near which instances of the language model."""
    orderer: Callable[[str], Orderer | None] | None = None
    """Name of a search -> function that orders microbatches, or None if their order does not matter."""
    other_work: Mapping[str, OtherWork] = field(default_factory=dict)
    """Modules whose instances need not keep step with each other -> other work of their ranks."""
    dealing: Mapping[str, Dealing] = field(default_factory=dict)
    """Module with context parallelism -> how its rows are dealt to the ranks of an instance."""
    rules: Mapping[str, AttentionRules] = field(default_factory=dict)
    """Module whose rows do not see all earlier ones -> its rules of attention."""


@dataclass(frozen=True)
class BalanceConfig:
    """A description of how the work of every step is spread over instances and microbatches.

    Costs also decide the order of microbatches and the turns of modules on the same ranks. None of this changes the
    result of a step: losses and gradients belong to the samples as drawn, up to rounding.

    Args:
        policy: for all modules or by module: ``auto`` (the best for the module's cost), ``none`` (as sampled: samples
            dealt in turn, items with their samples), or one of :data:`hetero_strategy.plan.balance.POLICIES`. Modules
            that are not named use ``auto``.
        costs: module -> :class:`Cost` or its fields; default: the FLOPs of the module's forward, or 1 per row. If all
            modules have one, costs share a unit, such as the seconds of a run's ``balance.json``; otherwise each is
            scaled so that an item of 128 rows keeps its default cost.
        budget: module -> most rows inside it that an instance may have in a microbatch. An encoder's or a generator's
            microbatches are split until they keep it; a step has as many as the first language model's takes.
        rearrange: how items are kept near their samples if modules share ranks or nodes: ``home`` (balance around the
            instances of their samples), ``none``, or a name given to
            :func:`~hetero_strategy.plan.near_home.register_rearrangement`.
        reorder: order of microbatches in pipelines: ``search``, ``none`` (as planned), or a name given to
            :func:`~hetero_strategy.plan.reorder.register_reordering`.
        window: number of steps among which samples may move so that steps have nearly as many tokens.
            Above 1 global batches change.

    Raises:
        ConfigError: an option or a value does not exist.
    """

    policy: str | Mapping[str, str] = "auto"
    costs: Mapping[str, Any] = field(default_factory=dict)
    budget: Mapping[str, int] = field(default_factory=dict)
    rearrange: str = "home"
    reorder: str = "search"
    window: int = 1

    def __post_init__(self) -> None:
        for name in ("costs", "budget"):
            by_module = getattr(self, name)
            if not isinstance(by_module or {}, Mapping):
                raise ConfigError(f"balance: {name}={by_module!r}; give it by module, such as {name}={{'llm': ...}}")
            object.__setattr__(self, name, dict(by_module or {}))
        chosen = self.policy.values() if isinstance(self.policy, Mapping) else [self.policy]
        for policy in chosen:
            _one_of("policy", policy, (*POLICIES, AS_SAMPLED))
        _one_of("rearrange", self.rearrange, tuple(REARRANGEMENTS))
        _one_of("reorder", self.reorder, tuple(SEARCHES))
        if not is_whole(self.window, 1):
            raise ConfigError(f"balance: window is {self.window!r}; use 1 (no sample leaves its step) or more steps")
        for module, rows in self.budget.items():
            if not is_whole(rows, 1):
                raise ConfigError(f"balance: budget of '{module}' is {rows!r}; use a number of rows, at least 1")
        costs = {m: c if isinstance(c, Cost) else _cost(m, c) for m, c in self.costs.items()}
        object.__setattr__(self, "costs", costs)

    @classmethod
    def of(cls, value: BalanceConfig | str | Mapping[str, Any] | None) -> BalanceConfig:
        """Build a ``BalanceConfig`` from a configuration's value: nothing, a policy, fields, or a ``BalanceConfig``
        itself.
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
        """Refuse options for modules that do not exist."""
        for name in ("policy", "costs", "budget"):
            option = getattr(self, name)
            for module in option if isinstance(option, Mapping) else ():
                if module not in modules:
                    raise ConfigError(f"balance: {name} names '{module}'; the modules are {', '.join(modules)}")

    def policy_of(self, module: str) -> str:
        """Return the policy of a module; default: ``auto``."""
        return self.policy.get(module, "auto") if isinstance(self.policy, Mapping) else self.policy

    def resolve(self, instances: Mapping[str, int], context: ModelContext) -> ResolvedBalance:
        """Apply the options to modules; ``instances``: module -> number of its data-parallel instances."""
        return ResolvedBalance(
            policy={module: self.policy_of(module) for module in instances},
            costs={**context.costs, **self._costs(instances, context)},
            budget=self.budget,
            near={} if self.rearrange == "none" else context.near,
            rearrange=REARRANGEMENTS[self.rearrange],
            other_work=context.other_work,
            dealing=context.dealing,
            rules=context.rules,
            order=None if context.orderer is None else context.orderer(self.reorder),
        )

    def _costs(self, instances: Mapping[str, int], context: ModelContext) -> dict[str, Cost]:
        """Return the user's costs, scaled to the unit of the default ones if some modules keep these."""
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
        raise ConfigError(f"balance: {name} is {value!r}; use one of {', '.join(known)}; {PAPERS}")


def _cost(module: str, fields: Mapping[str, Any]) -> Cost:
    """Build a cost from its fields; those of earlier versions hold ``padding``, which only papers' policies know."""
    try:
        fields = dict(fields)
        if fields.pop("padding", "none") != "none":
            raise ValueError(
                "costs have no padding; import hetero_strategy.papers.orchmllm_padding and use policy='padded'"
            )
        return Cost(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"balance: costs of '{module}': {error}") from None
