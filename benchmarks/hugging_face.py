"""Compare models of transformers in mixed layouts with one process, family by family.

Each family is a tiny model in fp32 with every kind of its layers. Columns of language models:

``packed``, ``alone``, ``others``
    The largest errors of the check at the first use of a class: packed logits against transformers' eager forward of
    one sequence at a time; rows of packed sequences against each alone; rows of a sequence if another one changes.
``stages``
    Gradients of three pipeline stages against the whole; 0 means equal bit for bit.
layouts
    The largest error of a gradient in two SGD steps of two microbatches on four processes, against one process. A
    second figure, in parentheses, is that of a run in fp64, which shows what of an error above 1e-5 is noise of fp32.
    "no": the layout is refused; the reason is below the table.

Columns of composites, which have samples with no, one and several pictures, and a microbatch of text alone:

``split``
    Logits of the encoder and the language model of the folder against transformers' whole forward, sample by sample.
layouts
    As above, of vision and language model: ``+`` on shared ranks, ``|`` on ranks of their own.
``export``
    Logits of the parts after the steps against those of transformers' model of the whole folder that they are exported
    to. A name that is missing, new or of another shape is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from typing_extensions import override

from benchmarks.common import Options, option, program, report
from hetero_strategy import checkpoint
from hetero_strategy.checkpoint.training import TrainingState
from hetero_strategy.errors import HeteroError
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.model import MultimodalModel
from hetero_strategy.model.packing_errors import made_up
from hetero_strategy.testing import Pool, Setting, WorkerError, composites, gradients_of, relative_errors
from hetero_strategy.testing.composite_samples import (
    COMPOSITES,
    NONE,
    ONE,
    THREE,
    TWO,
    difference,
    in_double,
    one_by_one,
    samples_of,
)
from hetero_strategy.testing.composite_setting import CompositeSetting
from hetero_strategy.testing.families import OPEN, tiny_family
from hetero_strategy.testing.setting import FP64, MERGE, PATCH, VOCABULARY, in_dtype, steps_alone, steps_on_rank
from hetero_strategy.zoo import HFCausalLM, hf_causal_lm, siglip2_encoder
from hetero_strategy.zoo.hf_check import Verdict, verdict_of
from hetero_strategy.zoo.hf_shrink import shrink

FEW = ("qwen3", "gemma3_text", "qwen3_moe", "qwen2_5_vl")
RANKS, STEPS, RATE = 4, 2, 1e-3
BOUND = 1e-5
"""Largest error of a gradient that is not noted."""
CHUNK = 6
"""Families whose runs share processes."""
Run = tuple[str, str]
"""Family and column."""
Gradients = dict[str, torch.Tensor]
Line = dict[str, float | None]
"""A family's figures by column; "no" is None or missing."""
Prepared = tuple[Line, list[str], dict[str, Setting]]
"""A line of the table, notes, and settings by column."""
RECOMPUTE = {"llm": {"recompute": "all"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"layouts": {"llm": ModuleLayout(range(4), tp=2, pp=2)}},
    "shard2 pp2 recompute": {
        "layouts": {"llm": ModuleLayout(range(4), dp_shard=2, pp=2)},
        "transforms": RECOMPUTE,
    },
    "zb_h1 pp4": {"layouts": {"llm": ModuleLayout(range(4), pp=4)}, "schedule": "zb_h1"},
    "cp2 pp2": {"layouts": {"llm": ModuleLayout(range(4), cp=2, pp=2)}},
    "fill pp4": {
        "layouts": {"vision": ModuleLayout(range(4)), "llm": ModuleLayout(range(4), pp=4)},
        "fill": "fine",
    },
}
"""Name of a column -> settings of a run of it."""
COMPOSED = {
    "shard2 + shard2 pp2": (
        ModuleLayout(range(4), dp_replicate=2, dp_shard=2),
        ModuleLayout(range(4), dp_shard=2, pp=2),
    ),
    "1 | pp3": (ModuleLayout((0,)), ModuleLayout((1, 2, 3), pp=3)),
    "shard2 | tp2": (ModuleLayout((0, 1), dp_shard=2), ModuleLayout((2, 3), tp=2)),
    "shard3 + tp2 pp2": (ModuleLayout(range(3), dp_shard=3), ModuleLayout(range(4), tp=2, pp=2)),
}
"""Name of a column of composites -> layouts of each encoder and of the language model."""
MEDIA = ([NONE, ONE, NONE, TWO, NONE, ONE, NONE, NONE], [NONE, TWO, THREE, NONE, NONE, ONE, NONE, TWO])
"""Media of the samples of each step, which are dealt to two microbatches in turn: the first one is text alone."""
SMALL: dict[str, Any] = {
    "samples": 8, "microbatches": 2, "items": (0, 2), "cells": (1, 3), "text": (3, 20), "vision": (64, 4),
}  # fmt: skip


@dataclass(frozen=True)
class Family(Setting):
    """A setting whose language model is a tiny one of a family."""

    model_type: str = ""

    @override
    def model(self, device: str = "meta") -> MultimodalModel:
        with torch.device(device):
            modules: dict[str, Any] = {"llm": tiny(self.model_type)}
            if "vision" in self.layouts:
                width, layers = self.vision
                modules["vision"] = siglip2_encoder(
                    out_width=modules["llm"].width, merge=MERGE, hidden_size=width, intermediate_size=2 * width,
                    num_hidden_layers=layers, num_attention_heads=2, num_channels=3, patch_size=PATCH, num_patches=64,
                )  # fmt: skip
            return MultimodalModel(modules, seed=7).train().to(self.storage.master)


def tiny(model_type: str) -> Any:
    """Build a tiny model of a family; its values are large enough that attention is not uniform.

    No token has a zero row, as a padding token has: norms would make gradients out of rounding.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = inspect.get_annotations(CONFIG_MAPPING[model_type])
    wanted = {"vocab_size": VOCABULARY, "initializer_range": 0.1, "pad_token_id": None}
    fields = tiny_family(model_type) | {name: value for name, value in wanted.items() if name in known}
    return hf_causal_lm(model_type=model_type, check=False, **fields)


def settings_of(model_type: str) -> dict[str, Setting]:
    """Return the runs of a family by column."""
    return {name: Family(name, **SMALL, **of, model_type=model_type) for name, of in LAYOUTS.items()}


def worst(expected: Gradients, ranks: Sequence[Gradients]) -> tuple[float, str]:
    """Return the largest relative error of a gradient on any rank and its parameter; infinite if one is missing."""
    missing = set(expected).difference(*ranks)
    errors = [
        (inf if isnan(error) else error, name)
        for rank in ranks
        for name, error in relative_errors(rank, expected, 1e-3).items()
    ]
    return max([*errors, *((inf, name) for name in missing)], default=(0.0, ""))


def stages_error(model_type: str) -> float:
    """Return the largest difference of a gradient of three stages to the whole's."""
    with in_dtype(torch.float32):
        whole = tiny(model_type)
        MultimodalModel({"llm": whole}, seed=7)
        inputs = made_up(whole)
        whole(inputs).loss_sum.backward()
        expected = gradients_of({"llm": whole})
        whole.zero_grad()
        blocks = list(whole.blocks())
        cuts = (blocks[:1], blocks[1:2], blocks[2:])
        stages = [whole.stage(cut, first=number == 0, last=number == 2) for number, cut in enumerate(cuts)]
        first = stages[0](inputs)
        second_in = first.detach().requires_grad_()
        second = stages[1](inputs, hidden=second_in)
        third_in = second.detach().requires_grad_()
        stages[2](inputs, hidden=third_in).loss_sum.backward()
        second.backward(third_in.grad)
        first.backward(second_in.grad)
    found = gradients_of({"llm": whole})
    return max((float((found[n] - e).abs().max()) if n in found else inf) for n, e in expected.items())


def prepared(model_type: str) -> Prepared:
    """Check one language model in this process; return its line of the table, notes and the runs not refused."""
    line: Line = {}
    try:
        verdict = check_of(model_type)
        line |= {"packed": verdict.errors.get("eager"), **{n: verdict.errors.get(n) for n in ("alone", "others")}}
        verdict.require_packing("check", type(tiny(model_type).model))
        line["stages"] = stages_error(model_type)
    except Exception as error:  # some of transformers' classes do not even build
        return line, [f"{model_type}: {_said(error)}"], {}
    return line, *_accepted(model_type, settings_of(model_type))


def prepared_composite(model_type: str, folder: Path) -> Prepared:
    """Compare a composite's parts and its export with the whole in this process; as :func:`prepared`."""
    line: Line = {}
    try:
        whole = composites.built(composites.tiny(model_type))
        setting = composite_setting(whole, folder)
        line |= split_errors("split", whole, setting, setting.model("cpu"))
        parts = steps_alone(setting, STEPS, RATE)[1]
        line |= split_errors("export", exported(whole, folder, parts), setting, parts)
    except Exception as error:  # as above
        return line, [f"{model_type}: {_said(error)}"], {}
    encoders = [name for name in setting.layouts if name != "llm"]
    layouts = {name: {**dict.fromkeys(encoders, each), "llm": llm} for name, (each, llm) in COMPOSED.items()}
    return line, *_accepted(model_type, {name: replace(setting, layouts=of) for name, of in layouts.items()})


def composite_setting(whole: Any, folder: Path) -> CompositeSetting:
    """Save a composite of transformers, and return a setting of it on one rank."""
    whole.save_pretrained(folder)
    content = tuple(samples_of(whole, torch.Generator().manual_seed(3), [*chain(*MEDIA)]))
    return CompositeSetting(
        whole.config.model_type, dict.fromkeys((*content[0].items, "llm"), ModuleLayout((0,))), samples=len(MEDIA[0]),
        microbatches=2, folder=str(folder), content=content,
    )  # fmt: skip


def _accepted(family: str, settings: Mapping[str, Setting]) -> tuple[list[str], dict[str, Setting]]:
    """Return why layouts are refused, and the settings of all others."""
    notes, accepted = [], {}
    for name, setting in settings.items():
        try:
            _ = setting.blueprint
            accepted[name] = setting
        except HeteroError as error:
            notes.append(f"{family}, {name}: {_said(error)}")
    return notes, accepted


def split_errors(column: str, whole: Any, setting: CompositeSetting, parts: MultimodalModel) -> Line:
    """Return the relative error of the logits of a composite's parts, and its noise: that in fp64."""
    batch = replace(setting, microbatches=1).batch(0, 0)
    parts.eval()

    def error() -> float:
        with torch.no_grad():
            rows = {(n, 0): parts.modules_by_name[n](given[0]) for n, given in batch.inputs.items() if n != "llm"}
            found = parts.modules_by_name["llm"](batch.inputs["llm"][0], rows, keep_logits=True).logits
        return difference(found, one_by_one(whole, setting.samples_of(0)))

    line: Line = {column: error()}
    if line[column] > BOUND:
        with in_double(whole, parts):
            line[f"{column}, fp64"] = error()
    return line


def exported(whole: Any, folder: Path, parts: MultimodalModel) -> Any:
    """Return transformers' model of the folder to which parts are exported; its names are those of the first folder."""
    state = TrainingState("net", parts.modules_by_name, group=None)
    state.save({"state_dict": state.model_tensors()}, folder / "saved")
    checkpoint.export(folder / "saved", out := folder / "exported", whole=True)
    model, info = type(whole).from_pretrained(out, output_loading_info=True, attn_implementation="eager")
    shapes = [_shapes(each / "model.safetensors") for each in (folder, out)]
    if faults := {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}:
        raise RuntimeError(f"transformers finds in the exported folder {faults}")
    if shapes[0] != shapes[1]:
        raise RuntimeError(f"the exported folder differs in {sorted(dict(shapes[0].items() ^ shapes[1].items()))}")
    return model.eval()


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, "pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def measured(lines: Mapping[str, Prepared], pool: Pool) -> Iterator[tuple[str, Line, list[str]]]:
    """Yield families' lines of the table and notes on what is refused or wrong."""
    runs = {(m, name): setting for m, (_, _, settings) in lines.items() for name, setting in settings.items()}
    errors = errors_of(runs, pool)
    exact = {run: replace(runs[run], storage=FP64) for run, (error, _) in errors.items() if BOUND < error < inf}
    exact_errors = errors_of(exact, pool)
    for model_type, (line, notes, settings) in lines.items():
        for name in settings:
            line[name], where = errors[model_type, name]
            if (run := (model_type, name)) in exact_errors:
                line[f"{name}, fp64"], again = exact_errors[run]
                where += f"; in fp64 {line[f'{name}, fp64']:.1e} {again}"
            if not line[name] <= BOUND:
                notes.append(f"{model_type}, {name}: {line[name]:.1e} {where}")
        yield model_type, line, notes


def errors_of(runs: Mapping[Run, Setting], pool: Pool) -> dict[Run, tuple[float, str]]:
    """Return the largest error of a gradient of each run, and its parameter or why the run failed."""
    results = _on_processes(runs, pool)
    expected: dict[tuple[str, ...], Gradients | str] = {}
    found: dict[Run, tuple[float, str]] = {}
    for run, setting in runs.items():
        if (one := (run[0], *setting.layouts)) not in expected:
            try:
                expected[one] = steps_alone(setting, STEPS, RATE)[0]
            except Exception as error:  # some of transformers' classes compute in fp32 alone
                expected[one] = _said(error)
        wanted, ranks = expected[one], results[run]
        faults = [each for each in (wanted, ranks) if isinstance(each, str)]
        found[run] = (inf, faults[0]) if faults else worst(wanted, ranks)  # type: ignore[arg-type]
    return found


def check_of(model_type: str) -> Verdict:
    """Run the check of a family's tiny model afresh."""
    model = tiny(model_type)
    return verdict_of(HFCausalLM, type(model.model), shrink(model.config))


def _on_processes(runs: Mapping[Run, Setting], pool: Pool) -> dict[Run, list[Gradients] | str]:
    """Return the gradients of each run by rank, or why it failed; runs share processes, without those that fail."""
    if not runs:
        return {}
    try:
        ranks = pool.run(RANKS, steps_on_rank, runs, STEPS, RATE, timeout=120 + 30 * len(runs))
        return {run: [rank[run] for rank in ranks] for run in runs}
    except WorkerError as error:
        if len(runs) == 1:
            return {run: _said(error) for run in runs}
    keys = list(runs)
    halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
    return {run: each for half in halves for run, each in _on_processes({k: runs[k] for k in half}, pool).items()}


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line.split(":")[0]]
    return (causes or lines or [type(error).__name__])[-1][:300]


def all_families() -> list[str]:
    """Return every causal language model of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OPEN} - {*COMPOSITES})


def _figure(line: Mapping[str, float | None], column: str) -> str:
    if (error := line.get(column)) is None:
        return "no"
    exact = line.get(f"{column}, fp64")
    return f"{error:.0e}" if exact is None else f"{error:.0e} ({exact:.0e})"


@program(
    option("--families", nargs="*", default=["few"], help="few, all, or transformers' names (default few)"),
)
def main(given: Options) -> dict[str, Any]:
    """Measure families and print a table of language models and one of composites."""
    named = {"few": FEW, "all": [*all_families(), *COMPOSITES]}
    families = [name for word in given.families for name in named.get(word, (word,))]
    tables: dict[str, Any] = {"language models": {}, "composites": {}}
    notes: list[str] = []
    for start in range(0, len(families), CHUNK):
        with TemporaryDirectory() as folder:
            lines = {
                name: prepared_composite(name, Path(folder, name)) if name in COMPOSITES else prepared(name)
                for name in families[start : start + CHUNK]
            }
            for name, line, said in measured(lines, given.pool):
                tables["composites" if name in COMPOSITES else "language models"][name] = line
                notes += said
                print(name, *(f"{n} {e:.1e};" for n, e in line.items() if e is not None), *said, flush=True)
    heads = ["packed", "alone", "others", "stages", *LAYOUTS], ["split", *COMPOSED, "export"]
    for (title, found), columns in zip(tables.items(), heads, strict=True):
        rows = [[name, *(_figure(line, column) for column in columns)] for name, line in found.items()]
        report(f"{title} of transformers: relative errors", ["family", *columns], rows)
    print("\n".join(notes))
    return {**tables, "notes": notes}


if __name__ == "__main__":
    main()
