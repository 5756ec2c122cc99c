"""Dtypes in which parameters are kept, marks on parameters that survive their replacement, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from hetero_strategy.errors import ConfigError, HeteroError, ModelError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.layout.registry import fake_world
from hetero_strategy.layout.spec import Placement
from hetero_strategy.model import Adapter, Backbone, Encoder, MultimodalModel, Projector
from hetero_strategy.model.materialize import materialize
from hetero_strategy.parallelize import fsdp
from hetero_strategy.parallelize.apply import parallelize
from hetero_strategy.parallelize.fsdp import apply_fsdp
from hetero_strategy.parallelize.gradients import local
from hetero_strategy.parallelize.storage import Storage, Traits, check_traits
from hetero_strategy.runtime.backward import inputs_first
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.strategy import HeteroStrategy
from hetero_strategy.strategy.blueprint import Options, beside_kept, checked_blueprint
from hetero_strategy.strategy.precision import check_trainable, storage_of
from hetero_strategy.zoo import hf_llama, siglip2_encoder
from tests.model.helpers import LLAMA, VIT

BF16 = Storage(torch.bfloat16, torch.float32)


def model(tied: bool = False) -> MultimodalModel:
    with torch.device("meta"):
        vision = siglip2_encoder(out_width=LLAMA["hidden_size"], **VIT)
        modules = {"vision": vision, "llm": hf_llama(**LLAMA, tie_word_embeddings=tied)}
        return MultimodalModel(modules, freeze=["vision.backbone"])


class Bare(Adapter):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("storage", "tied", "says"),
    [
        (Storage(keep=("llm.*",)), False, "keep_fp32 needs precision='bf16-mixed'"),
        (Storage(torch.bfloat16, keep=("lm.*",)), False, "keep_fp32 names 'lm.*', but no parameter is called so"),
        (Storage(torch.bfloat16, keep=("llm.model.lm_head.weight",)), True, "set tie_word_embeddings=false"),
        (
            Storage(torch.bfloat16, keep=("bare.*",)),
            False,
            "keep_fp32='bare.*' names a parameter that lies in no",
        ),
    ],
)
def test_refused(storage: Storage, tied: bool, says: str) -> None:
    with pytest.raises(HeteroError, match=says.replace("*", r"\*").replace(".", r"\.")):
        storage.check({**model(tied).modules_by_name, "bare": Bare()})


def test_layers_that_run_once_for_each_chunk_are_not_gathered_by_themselves() -> None:
    """As often as a rank has chunks of labelled rows: others would wait for ever."""
    built, storage = model(False), Storage(torch.bfloat16, keep=("llm.*norm*",))
    layouts = {name: ModuleLayout(range(2), dp_shard=2).resolved() for name in built.modules_by_name}
    with pytest.raises(
        ConfigError, match=r"keep_fp32 names parameters of llm\.\S*norm, which runs once for each chunk"
    ):
        checked_blueprint(built, Placement(layouts, 2), Options(storage=storage))
    others = Storage(torch.bfloat16, keep=("llm.*layers*norm*",))
    checked_blueprint(built, Placement(layouts, 2), Options(storage=others))
    asked = beside_kept(ScheduleConfig(), built, storage)  # of plans
    assert asked == ScheduleConfig(reshard_after_forward="never")
    checked_blueprint(built, Placement(layouts, 2), Options(asked, storage=storage))
    assert beside_kept(ScheduleConfig(), built, others) == ScheduleConfig()
    always = ScheduleConfig(reshard_after_forward="always")
    assert beside_kept(always, built, storage) is always


class Attending(torch.nn.Module):
    """Has a weight itself, beside that of a layer inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2)


class Deep(Backbone):
    block_list = "layers"
    width = hidden_width = 8

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Attending()])


def test_a_kept_layer_may_hold_another_one() -> None:
    storage, module = Storage(torch.bfloat16, keep=("m.*attention*",)), Deep()
    kept = storage.kept("m", module)
    assert [type(layer).__name__ for layer in kept] == ["MultiheadAttention", "NonDynamicallyQuantizableLinear"]
    with fake_world(0, 2):
        apply_fsdp(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)), storage, kept)
    assert all(isinstance(part, FSDPModule) for part in (*kept, module.layers[0], module))


class Scales(Bare):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -(rows * self.scale)  # so that W does not run through the output, on which FSDP has hooks


def test_gradients_of_later_halves_add_up_in_the_dtype_of_masters() -> None:
    """Two W in a row, where no backward's hooks of FSDP come between: 1 + 2^-9 is 1 in bf16."""
    module, weights_later = Scales(), []
    with fake_world(0, 1):
        apply_fsdp(module, init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)), BF16)
        torch.nn.init.ones_(module.to_empty(device="cpu").scale)
        fsdp.gather(module)
        for value in (1.0, 2.0**-9):
            rows = torch.full((1,), value, dtype=torch.bfloat16, requires_grad=True)
            out = module(rows)
            roots = [(get_gradient_edge(out), torch.ones_like(out))]
            weights_later.append(inputs_first(roots, [rows], [*module.parameters()]))
        for later in weights_later:
            later()
            fsdp.accumulate(module)
        fsdp.reduce(module, {})
        fsdp.finish(module)
        (gradient,) = local(module.scale.grad).tolist()
    assert gradient == -1 - 2.0**-9


@pytest.mark.parametrize("given", [["llm.*.q_proj.weight"], ("llm.norm",), None])
def test_names_of_parameters_are_a_list(given: Sequence[str] | None) -> None:
    assert HeteroStrategy(keep_fp32=given)._keep_fp32 == tuple(given or ())
    with pytest.raises(ConfigError, match=r"='llm.norm'; give a list of texts or None, such as \['llm.norm'\]"):
        HeteroStrategy(keep_fp32="llm.norm")


def test_kept_layers_are_those_of_the_named_parameters() -> None:
    llm = model().modules_by_name["llm"]
    storage = Storage(torch.bfloat16, keep=("llm.*.q_proj.weight", "llm.model.model.norm.weight"))
    names = {name for name, part in llm.named_modules() if any(part is layer for layer in storage.kept("llm", llm))}
    layers = {f"model.model.layers.{i}.self_attn.q_proj" for i in range(LLAMA["num_hidden_layers"])}
    assert names == layers | {"model.model.norm"}


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_weights_without_a_master_copy_are_not_trained(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"train with precision='{precision.replace('true', 'mixed')}'"):
        check_trainable(HalfPrecision(precision), fit=True)  # type: ignore[arg-type]
    check_trainable(HalfPrecision(precision), fit=False)  # type: ignore[arg-type]
    check_trainable(MixedPrecision("bf16-mixed", "cpu"), fit=True)
    assert storage_of(MixedPrecision("bf16-mixed", "cpu")) == BF16


@pytest.mark.parametrize("storage", [BF16, Storage(), Storage(torch.float64, torch.float64)], ids=str)
def test_what_was_loaded_in_bf16_trains_in_its_master_and_is_frozen_as_it_computes(storage: Storage) -> None:
    """transformers' from_pretrained() gives weights as they lie in the folder."""
    ready, frozen = (torch.nn.Linear(12, 16, dtype=torch.bfloat16) for _ in range(2))
    frozen.requires_grad_(False)
    for tower in (ready, frozen):
        tower.width = tower.hidden_width = 16  # type: ignore[assignment]
        encoder = Encoder(tower, Projector(16, 16))
        value = tower.weight.detach().clone()
        parallelize("vision", encoder, ModuleLayout([0]).resolved(), None, torch.device("cpu"), seed=1, storage=storage)
        weight = dict(encoder.named_parameters())["backbone.weight"]
        assert weight.dtype == (storage.compute if tower is frozen else storage.master)
        assert torch.equal(weight.detach(), value.to(weight.dtype))


def marked() -> torch.nn.Linear:
    linear = torch.nn.Linear(4, 4)
    linear.weight.lr_scale = 0.1  # type: ignore[assignment]
    linear.bias.requires_grad_(False)
    return linear


def encoder() -> Encoder:
    with torch.device("meta"):
        return Encoder(marked, Projector(4, 4))


def one_rank(module: Encoder) -> None:
    layout = ModuleLayout.from_config("vision", {"ranks": [0]}).resolved()
    parallelize("vision", module, layout, None, torch.device("cpu"), seed=1)


@pytest.mark.parametrize("under", ["strategy", "auto"])
def test_attributes_and_frozen_parameters_survive(under: str) -> None:
    module = encoder()
    one_rank(module) if under == "strategy" else materialize(module, 1, device=torch.device("cpu"))
    weight, bias = module.get_parameter("backbone.weight"), module.get_parameter("backbone.bias")
    assert not weight.is_meta and weight.lr_scale == 0.1 and weight.requires_grad and not bias.requires_grad


def test_a_hook_that_would_be_lost_is_an_error() -> None:
    module = encoder()
    module.get_parameter("backbone.weight").register_hook(lambda grad: grad * 2)
    with pytest.raises(ModelError, match=r"module 'vision': hooks of parameter 'backbone\.weight' was True and is Fal"):
        one_rank(module)


@pytest.mark.parametrize("trait", ["requires_grad", "dtype", "shape"])
def test_any_other_difference_is_an_error(trait: str) -> None:
    before = {"w": Traits.of(torch.nn.Parameter(torch.zeros(2, 3)))}
    other = {
        "requires_grad": torch.nn.Parameter(torch.zeros(2, 3), False),
        "dtype": torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)),
        "shape": torch.nn.Parameter(torch.zeros(3, 2)),
    }
    with pytest.raises(ModelError, match=f"{trait} of parameter 'w'"):
        check_traits("llm", before, {"w": other[trait]})
