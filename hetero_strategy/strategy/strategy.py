"""`HeteroStrategy`: the only room that speaks Lightning's Strategy protocol. It delegates to the other rooms."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_only, rank_zero_warn
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch.optim import Optimizer

from hetero_strategy.errors import ConfigError, check_options
from hetero_strategy.layout.placement import Placement, place
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.context import TrainingContext
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.without_values import models_without_values, nothing_lost
from hetero_strategy.parallelize.compile import compiles
from hetero_strategy.parallelize.float8 import float8s, use_float8
from hetero_strategy.parallelize.gradients import Owned, global_norm
from hetero_strategy.parallelize.kernels import async_tp, known_flash, use_async_tp, use_flash
from hetero_strategy.parallelize.offload import offloads
from hetero_strategy.parallelize.optimizer import choose_kernels
from hetero_strategy.parallelize.recompute import recomputes
from hetero_strategy.planner.context import aligned_rows
from hetero_strategy.planner.given import check_schedule
from hetero_strategy.runtime.agreement import Stop
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.runtime.memory import out_of_memory
from hetero_strategy.runtime.side_stream import prefer_others
from hetero_strategy.runtime.step import StepRunner
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.strategy.assembly import Assembled, assemble, find_model, move_rest
from hetero_strategy.strategy.auto import choose, given
from hetero_strategy.strategy.checkpoints import OwnCheckpoints
from hetero_strategy.strategy.ending import end_together, free, stop_together, tear_down
from hetero_strategy.strategy.launch import (
    MultiProcessingLauncher,
    ScriptLauncher,
    bound_device,
    check_process_count,
    die_with_script,
    minutes,
    prepare_device,
)
from hetero_strategy.strategy.precision import check_trainable, kept, seed_scale, stand_in, storage_of
from hetero_strategy.strategy.refusals import (
    OPTIONS,
    check_dataloader,
    check_optimizers,
    check_trainer,
    note_parts,
    trains,
)
from hetero_strategy.strategy.row_caches import RowCaches
from hetero_strategy.strategy.zeroing import about_to_zero_gradients


class HeteroStrategy(OwnCheckpoints):
    """Trains a :class:`MultimodalModel` with every module in its own layout, on its own ranks.

    ``Trainer(strategy=HeteroStrategy(layouts={...}))``; the LightningModule stays an ordinary one that builds its model
    in ``configure_model`` and calls ``self.model(batch)``. Every rank sees the same outputs, so logging, callbacks and
    schedulers need nothing special.

    Args:
        layouts: module name -> :class:`ModuleLayout` or its fields; ``auto``: the planner chooses, also schedule, fill,
            pieces, prefetch, recompute and reshard_after_forward if not given, and the data module's microbatches if
            these are ``auto``. None (``strategy="hetero"``): every module sharded over all ranks.
        recompute: modules that compute activations again in backward; by module: all, every 2, all but matmuls, whole.
        offload: modules whose blocks keep activations in host memory until backward; by module: all, every 2.
        compile: modules whose blocks and loss torch compiles, for any number of rows; or by module: the backend.
        float8: modules whose blocks multiply in float8 (torchao); or by module: the recipe.
        attention: flash kernels of another package on GPUs that have them: ``FA3``, ``FA4``; None: as torch is set.
        async_tp: torch's compiler overlaps matmuls with tensor-parallel collectives, between GPUs that share memory.
        schedule: in which order a step's work runs: ``1f1b``, ``gpipe``, ``interleaved_1f1b`` (modules with vpp > 1),
            ``zb_h1``, ``zbv`` (vpp=2, pp_style="v"), ``sequential``; or ``auto``: what the layouts are made for.
        max_in_flight: module -> most microbatches whose activations one of its stages holds.
        reshard_after_forward: when FSDP frees gathered parameters: ``never`` within a step (they are gathered once and
            gradients reduced once), ``always`` (with every microbatch), or ``auto``: never where a module is
            pipelined, fills bubbles or runs ahead, or where the schedule splits backwards; or as planned.
        fill: how modules that feed a pipeline on their ranks use its bubbles: ``fine`` (wherever a rank idles),
            ``search`` (made shorter), ``coarse`` (around its work), ``decoupled`` (recomputed), ``none``;
            ``auto``: none, or as planned.
        pieces: module that fills -> parts of about equal cost in which its ranks cut forwards and backwards to fit.
        prefetch: frozen encoder -> 1: in a step's bubbles it works for the next step, whose rows are held meanwhile.
        tp_bubbles: module -> share of its time in which its ranks wait for tensor-parallel collectives and others can
            compute: what fills then runs there, too, on a CUDA stream of its own.
        cache: encoder with a frozen backbone -> folder: the backbone's rows are written once per item and then read.
        islands: parts of all modules' instances that exchange rows only within: bounds whom a rank meets.
        start_method: ``popen`` (re-runs the script per process), ``fork`` or ``spawn``. Ignored under torchrun, SLURM.
        process_group_backend: default: by device.
        timeout: of every collective; a number is minutes.
        step_timeout: the same once the first step of training, which connects and compiles, is over, where it is
            shorter; None: ``timeout``. More than two steps take. gloo's messages between two ranks keep ``timeout``.
        async_checkpoint: write checkpoints in the background, while training goes on.
        verify_checkpoints: compare the checksums of all tensors that are loaded with those they were saved with.
        keep_fp32: parameters, as ``llm.*.router.*``, whose layers compute in fp32 in mixed precision.

    Raises:
        LayoutError: when the Trainer is made, before any process starts: layouts that cannot be placed.
        ConfigError: an option that is refused.
    """

    strategy_name = "hetero"
    is_distributed = True

    def __init__(
        self,
        layouts: Mapping[str, ModuleLayout | Mapping[str, Any]] | Literal["auto"] | None = None,
        *,
        recompute: Sequence[str] | Mapping[str, str] | None = None,
        offload: Sequence[str] | Mapping[str, str] | None = None,
        compile: Sequence[str] | Mapping[str, str] | None = None,
        float8: Sequence[str] | Mapping[str, str] | None = None,
        attention: str | None = None,
        async_tp: bool = False,
        schedule: str = "auto",
        max_in_flight: Mapping[str, int] | None = None,
        reshard_after_forward: str = "auto",
        fill: str = "auto",
        pieces: Mapping[str, int] | None = None,
        prefetch: Mapping[str, int] | None = None,
        tp_bubbles: Mapping[str, float] | None = None,
        cache: Mapping[str, str | Path] | None = None,
        islands: int = 1,
        start_method: str = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        step_timeout: timedelta | float | None = timedelta(minutes=10),
        async_checkpoint: bool = False,
        verify_checkpoints: bool = True,
        keep_fp32: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_options(
            "HeteroStrategy", OPTIONS, start_method=start_method, process_group_backend=process_group_backend,
            async_tp=async_tp, async_checkpoint=async_checkpoint, verify_checkpoints=verify_checkpoints,
        )  # fmt: skip
        self._auto, self._layouts = layouts == "auto", given(layouts)
        self.recompute, self.offload = recomputes(recompute), offloads(offload)
        self.compile, self._float8 = compiles(compile), float8s(float8)
        self._attention, self._async_tp = known_flash(attention), async_tp
        self._scheduling = ScheduleConfig(
            schedule, max_in_flight or {}, reshard_after_forward, fill, pieces or {}, prefetch or {}, islands,
            tp_bubbles or {},
        )  # fmt: skip
        if self._auto:
            check_schedule(schedule)
        if tp_bubbles and (async_tp or self._auto):
            option = "async_tp" if async_tp else "layouts='auto'"
            why = "fused operators of two streams would share buffers" if async_tp else "plans do not choose it"
            raise ConfigError(f"HeteroStrategy: tp_bubbles={tp_bubbles} with {option}: {why}; leave one of them out")
        self._start_method, self._process_group_backend = start_method, process_group_backend
        self._timeout = minutes("timeout", timeout)
        short = self._timeout if step_timeout is None else minutes("step_timeout", step_timeout)
        self._step_timeout = min(short, self._timeout)
        self._async_checkpoint, self._verify, self._keep_fp32 = async_checkpoint, verify_checkpoints, kept(keep_fp32)
        self.num_nodes, self._prefix, self._stop, self._device_waits = 1, "", Stop(), False
        self.row_caches = RowCaches(cache)
        self._placement: Placement | None = None
        self._multimodal: MultimodalModel | None = None
        self._runner: StepRunner | None = None
        self._assembled: Assembled | None = None
        self._planned_microbatches: int | None = None

    # ---- what others may ask ---------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement | None:
        """Resolved layouts of all modules over the world; without ``layouts`` None until the model is configured."""
        return self._placement

    @property
    def executor(self) -> Executor:
        """What runs steps on this rank; after ``setup``."""
        assert self._runner is not None
        return self._runner.executor

    @property
    def background(self) -> dist.ProcessGroup:
        """All ranks, on the host: for what runs beside training; after ``setup``. A save that is under way in another
        thread, which talks there too, is waited for.
        """
        assert self._assembled is not None
        self._assembled.state.finalize()
        return self._assembled.registry.background

    @property
    def context(self) -> TrainingContext:
        """What the data module has to know; model and groups from ``setup`` on."""
        context = TrainingContext(self._placement, placed_later=self._placement is None)
        if self._assembled is None or self._multimodal is None or self._placement is None:
            return context
        made = self._assembled
        return replace(
            context,
            microbatches=self._planned_microbatches,
            row_multiple=aligned_rows(self._multimodal.language_models(), self._placement.layouts),
            model=made.context,
            rank=self.global_rank,
            compiler=made.executor.compiler,
            group=made.registry.loading,
            compute_dtype=storage_of(self.precision_plugin).narrow,
        )

    # ---- identity and processes ------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """One logical replica: every rank walks the same global batches."""
        return {"num_replicas": 1, "rank": 0}

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for only in (rank_zero_only, utilities_rank_zero_only):
            cast(Any, only).rank = self.global_rank

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        world_size = self.num_nodes * self.num_processes
        check_process_count(self.cluster_environment, self.num_nodes, world_size)
        if self._layouts is not None:
            self._placement = place(self._layouts, world_size)
            self._check_names()
            self._scheduling.check(self._placement.layouts)
        if self.cluster_environment.creates_processes_externally:
            die_with_script()
            return
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = MultiProcessingLauncher(self, start_method=self._start_method)  # type: ignore[arg-type]

    def _check_names(self) -> None:
        """Refuse options of modules that have no layout, before processes start."""
        scheduling, known = self._scheduling, [*(self._layouts or {})]
        by_option: dict[str, Mapping[str, object]] = {
            "recompute": self.recompute, "offload": self.offload, "compile": self.compile, "float8": self._float8,
            "pieces": scheduling.pieces, "prefetch": scheduling.prefetch, "tp_bubbles": scheduling.tp_bubbles,
            "cache": self.row_caches.folders,
        }  # fmt: skip
        for option, named in by_option.items():
            if unknown := [repr(name) for name in named if name not in known]:
                raise ConfigError(
                    f"HeteroStrategy: {option} names {', '.join(unknown)}; the modules are {', '.join(known)}"
                )

    def setup_environment(self) -> None:
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            check_trainer(trainer)
            check_trainable(self.precision_plugin, fit=trainer.state.fn == TrainerFn.FITTING)
            stop_together(trainer, self._stop)
            # A sampler put in by Lightning shuffles training data even where it is not to be shuffled.
            trainer._accelerator_connector.use_distributed_sampler = False
        prepare_device(self.root_device, streams=bool(self._scheduling.tp_bubbles))
        super().setup_environment()
        if self._scheduling.tp_bubbles and self.root_device.type == "cuda":
            prefer_others(self.root_device)
        assert self.cluster_environment is not None
        reset_seed()
        self.set_world_ranks()
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        device = bound_device(self.root_device, backend)
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device)

    # ---- precision -------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else stand_in(plugin)

    # ---- model -----------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """The model is built on the meta device: no rank ever holds a module that it does not own. What is made beside
        it, and modules given to it with values, are made from one random state on all ranks.
        """
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))
        with models_without_values(), nothing_lost(), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        if self._multimodal is None or all(m is not self._multimodal for m in self.lightning_module.modules()):
            self._build(self.lightning_module)
        assert self._multimodal is not None and self._runner is not None
        self._multimodal.attach(self._runner)
        move_rest(self.lightning_module, self.root_device)
        self.prepare_loops(trainer)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _build(self, module: LightningModule) -> None:
        self._prefix, self._multimodal = find_model(module, partial(self.reduce_boolean_decision, all=False))
        self.model = self.precision_plugin.convert_module(module)
        storage = storage_of(self.precision_plugin, self._keep_fp32)
        if self._placement is None:
            chosen = choose(self, self._multimodal, module.trainer, storage, self._scheduling, plan=self._auto)
            self.recompute = self.recompute or dict(chosen.recompute)
            self._scheduling = self._scheduling.instead_of_auto(chosen.scheduling)
            self._placement = place(chosen.layouts, self.world_size)
            self._planned_microbatches = chosen.microbatches if self._auto else None
        layouts = self._placement.layouts
        use_flash(self._attention, self.root_device)
        modules = self._multimodal.modules_by_name
        asynchronous = async_tp(self._async_tp, modules, layouts, self.compile, self.root_device)
        use_float8(self._float8, modules, layouts, storage.compute, self.root_device)
        self._assembled = assembled = assemble(
            self._prefix, self._multimodal, self._placement, self.global_rank, self.root_device,
            ranks_per_node=self.num_processes, storage=storage, scheduling=self._scheduling, recompute=self.recompute,
            offload=self.offload, compile=self.compile, timeout=self._timeout, async_checkpoint=self._async_checkpoint,
        )  # fmt: skip
        graph = assembled.executor.compiler.graph
        if self._scheduling.fills and not graph.filling and all(node.cohort < 0 for node in graph.stages):
            rank_zero_warn(
                f"HeteroStrategy: fill={self._scheduling.fill!r} does nothing: no module shares ranks with a pipeline"
                " that its rows reach"
            )
        meshes = [mesh for name in asynchronous if (mesh := assembled.registry.mesh(name)) is not None]
        use_async_tp([mesh.get_group("tp") for mesh in meshes])
        self._owned, self.recompute, model = assembled.owned, dict(assembled.recompute), self._multimodal
        self._runner = StepRunner(
            assembled.executor,
            [o.parameter for o in self._owned.values()],
            lambda: seed_scale(self.precision_plugin, self.root_device),
            lambda: trains(model, self.lightning_module),
            lambda: about_to_zero_gradients(self.lightning_module),
            self.precision_plugin.forward_context,
        )
        if self._step_timeout < self._timeout:
            self._runner.after_first = partial(assembled.registry.limit, self._step_timeout)
        assembled.executor.agreement.stop = self._stop
        plugin = cast(Any, self.precision_plugin)
        plugin.owned_by = self.owned_by
        plugin.norm_device = self.root_device

    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        trainer.fit_loop._combined_loader = None  # made, before a checkpoint is read, for who asks how long a run is
        stepping = check_optimizers(self.optimizers, self.world_size)
        choose_kernels(stepping, self._owned, partial(self.reduce_boolean_decision, all=False))

    def grad_norm(self) -> torch.Tensor:
        """Return the norm of all modules' gradients, the same on every rank; all of them call it."""
        return global_norm(list(self._owned.values()), self.root_device)

    def owned_by(self, optimizer: Optimizer) -> list[Owned]:
        return [self._owned[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in self._owned]

    def model_to_device(self) -> None: ...

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """A :class:`Batch` stays on the host: each microbatch's part goes to the device just before it is computed."""
        if isinstance(batch, Batch) and self.lightning_module is not None:
            return self.lightning_module._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    def process_dataloader(self, dataloader: object) -> object:
        check_dataloader(dataloader, placed=self._assembled is not None, alone=self.world_size == 1)
        self.row_caches.attach(dataloader, self.executor, self.broadcast)
        return dataloader

    # ---- the end ---------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """All ranks end; the one with the cause is heard."""
        if isinstance(exception, torch.OutOfMemoryError) and self._runner is not None:
            exception.add_note(out_of_memory(self.executor, self.optimizers))
        note_parts(exception)
        end_together(exception, self.global_rank, self._launcher, self._stop)
        if not self._stop.agreed:
            self._device_waits = not free(self.root_device, exception, getattr(self._assembled, "state", None))

    def teardown(self) -> None:
        if self._assembled is not None:
            self._assembled.state.finalize()
        if self._multimodal is not None and self._runner is not None:
            self._runner.garbage.stop()
            self._multimodal.detach()
        self.row_caches.close()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        tear_down(self.accelerator, self._launcher, device_waits=self._device_waits)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("hetero", cls, description="every module in its own layout", override=True)


HeteroStrategy.register_strategies(StrategyRegistry)
