"""The whole model: named modules and the edges between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hetero_strategy.errors import ModelError
from hetero_strategy.model.adapter import Adapter
from hetero_strategy.model.combine import ModelOutput, StepSums
from hetero_strategy.model.inputs import ModuleInputs
from hetero_strategy.model.kind import ModuleKind, check_edges, check_output, usual_edges
from hetero_strategy.model.materialize import materialize
from hetero_strategy.model.packed_alone import Pair, check_packed_alone, due
from hetero_strategy.model.random_numbers import RandomNumbers, draws_others, random_state_kept
from hetero_strategy.model.routing import counting, note_choices
from hetero_strategy.model.without_values import made_without_values

__all__ = ["BatchLike", "Edge", "ModelOutput", "MultimodalModel"]


@dataclass(frozen=True)
class Edge:
    """An edge: rows of ``source`` fill slots of ``target``."""

    source: str
    target: str


class BatchLike(Protocol):
    """A protocol of the batch that :meth:`MultimodalModel.forward` reads."""

    @property
    def plan(self) -> Any: ...

    @property
    def inputs(self) -> Mapping[str, Sequence[ModuleInputs | None]]: ...

    def local_rows(self, source: str, source_microbatch: int, target: str, target_microbatch: int) -> Tensor | None:
        """Return the source row of each target slot that these two microbatches share; None if they are in order."""


class MultimodalModel(nn.Module):
    """A model of named modules and edges; ``model(batch)`` runs on one device, or with an attached runner.

    Args:
        modules: name -> :class:`Encoder`, :class:`CausalLM`, :class:`Generator` or an :class:`Adapter` of a custom
            kind; they become children under their names.
        edges: (source, target) pairs, such as from encoders to language models and from language models to generators;
            default, with a single language model: all edges that the modules' kinds allow.
        freeze: modules or parts ("vision", "vision.backbone") whose parameters are not trained; "llm.router": all
            routers of a mixture of experts.
        loss_weights: module with a loss -> factor of its loss; default 1.
        seed: seed of initial values and random numbers inside modules.
        check_packing: before a module's first step, run two of its units together and each alone; an error reports
            different rows.

    Raises:
        ModelError: names, edges, widths, weights or frozen parts do not fit together.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        edges: Sequence[Edge | tuple[str, str]] | None = None,
        *,
        freeze: Sequence[str] = (),
        loss_weights: Mapping[str, float] | None = None,
        seed: int = 0,
        check_packing: bool = True,
    ) -> None:
        super().__init__()
        self.modules_by_name: dict[str, Adapter] = {}
        for name, module in modules.items():
            _check_module(name, module, self)
            self.modules_by_name[name] = module  # type: ignore[assignment]
            module.name = name  # type: ignore[assignment]
            self.add_module(name, module)
        self.edges = _checked_edges(self.modules_by_name, edges)
        self._loss_weights: dict[str, float] = {}
        self.loss_weights = loss_weights or {}
        self.seed = seed
        self._runner: Callable[..., ModelOutput] | None = None
        if isinstance(freeze, str) or not isinstance(freeze, Iterable):
            one, part = (" is one string", freeze) if isinstance(freeze, str) else ("", "vision.backbone")
            raise ModelError(f"freeze={freeze!r}{one}; give a list, [{part!r}]")
        for part in freeze:
            for frozen in _parts(self, part):
                frozen.requires_grad_(False)
        for name, adapter in self.modules_by_name.items():
            adapter.meta_copy()
            adapter.packed_equals_alone = not check_packing
            others = draws_others(adapter)
            adapter.random_numbers = RandomNumbers(seed, name, adapter.blocks(), others=others)
        self._called: tuple[Any, ...] = ()
        self._calls = 0
        if not made_without_values():
            materialize(self, seed)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Return the factor of the loss of each module that has one."""
        return self._loss_weights

    @loss_weights.setter
    def loss_weights(self, weights: Mapping[str, float]) -> None:
        checked = _checked_weights(self.with_loss(), weights)
        self._loss_weights.clear()  # keep the object, which step executors hold too
        self._loss_weights.update(checked)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the whole model; refuse one that is distributed over ranks."""
        if self.attached or any(isinstance(p, DTensor) for p in self.parameters()):
            raise ModelError(
                "a copy of a model that a strategy has placed (copy.deepcopy, AveragedModel, torch.save of a module)"
                " would have a part of its weights; average in a callback over those of self.parameters() that are not"
                " on the meta device, and save with trainer.save_checkpoint"
            )
        return super().__reduce_ex__(protocol)

    def topological(self) -> tuple[str, ...]:
        """Return all module names, every source before its targets.

        Modules at equal depth below the modules without sources keep the order of the constructor.
        """
        depth = dict.fromkeys(self.modules_by_name, 0)
        for _ in depth:
            depth |= {edge.target: max(depth[edge.target], depth[edge.source] + 1) for edge in self.edges}
        return tuple(sorted(depth, key=depth.__getitem__))

    def meta_copy(self) -> MultimodalModel:
        """Return this model on the meta device as it was before parallelisation; it costs no memory."""
        with torch.device("meta"):
            modules = {name: module.meta_copy() for name, module in self.modules_by_name.items()}
            return MultimodalModel(modules, self.edges, loss_weights=self.loss_weights, seed=self.seed)

    def language_models(self) -> tuple[str, ...]:
        """Return the names of language models in the order of the constructor; their units are whole samples."""
        return tuple(name for name, module in self.modules_by_name.items() if module.kind.samplewise)

    def with_loss(self) -> tuple[str, ...]:
        """Return the names of modules with a loss, every source before its targets."""
        return tuple(name for name in self.topological() if self.modules_by_name[name].kind.has_loss)

    def attach(self, runner: Callable[..., ModelOutput]) -> None:
        """Let ``runner(batch)`` compute :meth:`forward` from now on."""
        self._runner = runner

    def detach(self) -> None:
        """Undo :meth:`attach`: compute :meth:`forward` on one device."""
        self._runner = None

    @property
    def attached(self) -> bool:
        """Return whether a runner computes :meth:`forward`, as during a Trainer's run."""
        return self._runner is not None

    @override
    def forward(self, batch: BatchLike, *, keep_logits: bool = False) -> ModelOutput:
        """Run one global batch, all microbatches of all modules; ``keep_logits`` returns the first language model's
        logits.

        Raises:
            ModelError: the batch is one rank's part of a step, and no strategy is attached any more to run it.
        """
        output = self._output(batch, keep_logits)
        for name, rows in output.expert_rows.items():
            note_choices(self.modules_by_name[name], rows)
        return output

    def _output(self, batch: BatchLike, keep_logits: bool) -> ModelOutput:
        """Run one global batch on one device, or with the attached runner."""
        call = self._call(batch)
        if self._runner is not None:
            return self._runner(batch, call=call, keep_logits=keep_logits)
        if getattr(batch, "program", None) is not None:
            raise ModelError(
                "model(batch) after the Trainer's run: the batch is one rank's part of a step, which the strategy runs"
                " until on_train_end (on_validation_end, ...); on_fit_end, teardown and what follows fit are too late:"
                " call the model before, or evaluate with trainer.validate, test or predict"
            )
        with random_state_kept(self._device()):
            return self._forward(batch, call, keep_logits)

    def _call(self, batch: BatchLike) -> int:
        """Count consecutive earlier calls with this batch: each call has its own random numbers."""
        metadata = getattr(getattr(batch, "plan", None), "metadata", None)
        moment = (self.training, getattr(metadata, "epoch", None), getattr(metadata, "step", None))
        self._calls = self._calls + 1 if moment == self._called else 0
        self._called = moment
        return self._calls

    def _forward(self, batch: BatchLike, call: int, keep_logits: bool) -> ModelOutput:
        device, dtype = self._device(), next(self.parameters()).dtype
        exact = dtype if dtype == torch.float64 else torch.float32
        names, with_gradient = self.with_loss(), self.training and torch.is_grad_enabled()
        step = StepSums(
            self.modules_by_name, names, batch.plan, evaluation=not with_gradient, device=device, dtype=exact
        )
        edge_rows: dict[Hashable, Tensor] = {}
        # Even if a module has no work or nothing trains below it, its loss has a (zero) gradient.
        losses = {n: torch.zeros((), device=device, requires_grad=with_gradient) for n in names}
        logits: list[Tensor] = []
        for name in self.topological():
            module = self.modules_by_name[name]
            self._check_packing(module, batch, device)
            options = {"keep_logits": True} if keep_logits and name == self.language_models()[0] else {}
            routed = step.routing(name, seed=self.loss_weights.get(name, 0.0))
            for number, inputs in enumerate(batch.inputs.get(name, ())):
                if inputs is None:  # no work in this microbatch
                    continue
                assert module.random_numbers is not None
                module.random_numbers.start(batch.plan.metadata, call, number, 0, 0, device, rows_of=0)
                rows = _rows_for(batch, name, number, inputs.slots, edge_rows)
                units = batch.plan.assignments[name][number].units
                with counting(routed, number, units, by_autograd=True):
                    output = module(inputs, rows, **options)
                check_output(module, output)
                if isinstance(output, Tensor):
                    edge_rows[name, number] = output
                    continue
                losses[name] = losses[name] + output.loss_sum * (self.loss_weights[name] / batch.plan.normalizer(name))
                step.add(name, units, inputs, output)
                logits += [output.logits] if options else []
                if output.hidden is not None:
                    edge_rows[name, number] = output.hidden
            if routed is not None:
                losses[name] = losses[name] + routed.finish().to(exact)
        total = sum(losses.values(), torch.zeros((), device=device))
        return step.output(total, losses, tuple(logits) or None)

    def _check_packing(self, module: Adapter, batch: BatchLike, device: torch.device) -> None:
        """Check packing before the first step in which a module has two units in a microbatch."""
        number = due(module, batch.plan)
        inputs = None if number is None else batch.inputs[module.name][number]
        if number is not None and inputs is not None:
            sources = [edge.source for edge in self.edges if edge.target == module.name]
            pair = Pair.of(module, batch.plan, number, sources)
            check_packed_alone(module, inputs, pair, f"module '{module.name}'", device)
            module.packed_equals_alone = True

    def _device(self) -> torch.device:
        return next(self.parameters()).device


def _rows_for(
    batch: BatchLike, name: str, number: int, slots: Mapping[Hashable, Tensor], edge_rows: Mapping[Hashable, Tensor]
) -> dict[Hashable, Tensor]:
    """Select from (source, its microbatch) -> rows the rows of one microbatch's slots, in the slots' order."""
    rows: dict[Hashable, Tensor] = {}
    for key in slots:
        if key in edge_rows:
            assert isinstance(key, tuple)
            source, source_microbatch = key
            order = batch.local_rows(source, source_microbatch, name, number)
            rows[key] = edge_rows[key] if order is None else edge_rows[key][order.to(edge_rows[key].device)]
    return rows


def _check_module(name: str, module: nn.Module, model: nn.Module) -> None:
    if not isinstance(getattr(module, "kind", None), ModuleKind):
        raise ModelError(
            f"module {name!r} is a {type(module).__name__}: wrap it in Encoder, CausalLM or Generator, or write an"
            " Adapter with a kind of its own"
        )
    if not name.isidentifier() or hasattr(model, name):
        raise ModelError(f"module name {name!r} is taken or not an identifier: choose another")
    if any(module is other for other in model.children()):
        raise ModelError(f"module {name!r} is given under two names")
    for fqn, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise ModelError(
                f"module {name!r}: {fqn or 'it'} ({type(part).__name__}) has a state of its own (get_extra_state),"
                " which no checkpoint of parts could hold: register a buffer in its place"
            )


def _checked_edges(modules: Mapping[str, Adapter], edges: Sequence[Edge | tuple[str, str]] | None) -> tuple[Edge, ...]:
    kinds = {name: module.kind for name, module in modules.items()}
    language_models = [name for name, kind in kinds.items() if kind.samplewise]
    if not language_models:
        raise ModelError(f"no CausalLM among modules {list(modules)}: nothing has a loss")
    if edges is None:
        if len(language_models) != 1:
            raise ModelError(f"modules {language_models} are all CausalLMs: say edges=[(source, target), ...]")
        edges = usual_edges(kinds)
    if not (isinstance(edges, Sequence) and all(map(_is_edge, edges))):
        raise ModelError(f"edges={edges!r}; give pairs of modules, [(source, target), ...]")
    checked = tuple(edge if isinstance(edge, Edge) else Edge(*edge) for edge in edges)
    check_edges(kinds, [(edge.source, edge.target) for edge in checked], ModelError)
    for edge in checked:
        source_width, width = modules[edge.source].width, modules[edge.target].width
        if source_width != width:
            fix = f"width={source_width} for {edge.target}"
            if not kinds[edge.source].has_loss:
                fix = f"out_width={width} for {edge.source}, or Projector(..., {width}) in an Encoder of your own"
            raise ModelError(
                f"edge {edge.source} -> {edge.target}: source rows have width {source_width}, the target takes {width}:"
                f" set {fix}"
            )
    return checked


def _is_edge(given: object) -> bool:
    return isinstance(given, Edge) or (isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2)


def _checked_weights(names: Sequence[str], weights: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(weights, Mapping):
        raise ModelError(f"loss_weights={weights!r}; give a number by module, such as {{'{names[0]}': 1.0}}")
    for name, weight in weights.items():
        if name not in names:
            raise ModelError(f"loss_weights: {name!r} has no loss: modules with a loss are {', '.join(names)}")
        if not isinstance(weight, int | float | np.number | Tensor) or not 0 <= weight < math.inf:
            raise ModelError(f"loss_weights: the weight of {name!r} is {weight!r}: use a number of at least 0")
    return {name: float(weights.get(name, 1.0)) for name in names}


def _parts(model: MultimodalModel, name: str) -> list[nn.Module]:
    """Return the parts of a name: one, or the routers of a module."""
    try:
        return [model.get_submodule(name) if name else model]
    except AttributeError:
        module = model.modules_by_name.get(name.removesuffix(".router"))
        if module is not None and module.routing is not None:
            return [module.get_submodule(router) for router in module.routing.routers]
        parts = [part for part, _ in model.named_modules() if part and part.count(".") <= 1]
        raise ModelError(f"freeze={name!r} is no part of the model: parts are such as {parts}") from None
