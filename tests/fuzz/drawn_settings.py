"""Settings drawn at random."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import hetero_strategy.papers.stepccl  # noqa: F401 (registers tp_chunks)
from hetero_strategy.layout import ModuleLayout
from hetero_strategy.schedule.config import ScheduleConfig
from hetero_strategy.schedule.policies import SCHEDULES, schedule_policy
from recipes.digits import write_digits, write_digits_draw
from tests.distributed.stepping import ATTENTION, ITEM_MODULES, Setting, by_module

SAMPLES = 40
HEADS = 4
"""Attention heads of every module."""
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
PARTS = {
    "vision": ("backbone", "projector", "backbone.model.embeddings", "backbone.model.encoder.layers.0"),
    "audio": ("backbone", "projector", "backbone.model.layers.0", "backbone.model.conv2"),
    "draw": ("layers.0", "condition_in", "patch_out"),
    "titan": ("model.tok_embeddings", "model.output", "model.layers.0", "model.norm"),
    "mixture": ("router", "model.model.embed_tokens", "model.model.layers.0.mlp.experts"),
    "hf": ("model.model.embed_tokens", "model.lm_head", "model.model.layers.0", "model.model.norm"),
}
"""What may be frozen of a module, or of a kind of language model."""
MIXTURES = ("mixture", "shared experts", "experts with biases", "balanced")
FLOAT8 = "rowwise_with_gw_hp, emulated"
"""Whose rounding does not depend on the microbatch, nor, without tensor parallelism, on the layout."""
RECOMPUTES = {"all": 3, "every 2": 1, "all but matmuls": 2, "whole": 1}
FOCUS = {"vision": 1, "audio": 1, "llm": 1, "draw": 1}
"""Modules whose every way of recompute meets every precision, and shards that are gathered with every microbatch."""


@dataclass(frozen=True)
class Data:
    """A data set to draw batches from."""

    folder: str
    kinds: Mapping[tuple[str, ...], tuple[int, ...]]
    """Modules that have items in a sample -> samples."""


def write(folder: Path) -> dict[bool, Data]:
    """Both data sets, without and with drawings; in each some samples with several items."""
    writers = {False: write_digits, True: write_digits_draw}
    return {draws: _data(folder / f"draw-{draws}", write) for draws, write in writers.items()}


def _data(folder: Path, write: Any) -> Data:
    manifest = folder / "train.json"
    if not manifest.exists():
        write(folder, train=SAMPLES, val=1, seed=3, progress=False)
        samples = json.loads(manifest.read_text())
        parts = [[s for s in samples if s.get(key)] for key in ("image", "audio")]
        images, audios = ([s[key] for s in part] for key, part in zip(("image", "audio"), parts, strict=True))
        for number in range(4):
            image, audio = images[: 2 * number + 2], audios[:number]
            question = "<image>".join(["Read "] + [" "] * len(image)) + "<audio>" * len(audio)
            talk = [{"from": "human", "value": question}, {"from": "gpt", "value": f"{len(image)}{len(audio)}"}]
            samples.append({"id": f"many-{number}", "image": image, "audio": audio, "conversations": talk})
        manifest.write_text(json.dumps(samples))
    kinds: dict[tuple[str, ...], tuple[int, ...]] = {}
    for number, sample in enumerate(json.loads(manifest.read_text())):
        fields = {"vision": "image", "audio": "audio", "draw": "draw"}
        kind = tuple(module for module, name in fields.items() if sample.get(name))
        kinds[kind] = (*kinds.get(kind, ()), number)
    return Data(str(folder), kinds)


def draw(seed: int, number: int, data: Mapping[bool, Data]) -> Setting:
    """One setting, a function of the first two arguments.

    Args:
        seed: of all settings.
        number: of this one.
        data: without and with drawings.
    """
    return _Drawing(random.Random(f"{seed} {number}"), data).setting()


class _Drawing:
    """What the parts of one setting share."""

    def __init__(self, rng: random.Random, data: Mapping[bool, Data]) -> None:
        self.rng = rng
        self.focus = self.one_of(FOCUS) if self.often(0.25) else None
        self.data = data[self.focus == "draw" or (self.focus in (None, "vision") and self.often(0.25))]
        self.draws = self.data is data[True]
        self.single = self.often(0.12)
        """One instance of every module: with as many microbatches, random numbers are those of one process."""

    def often(self, probability: float) -> bool:
        return self.rng.random() < probability

    def one_of(self, weights: Mapping[Any, float]) -> Any:
        return self.rng.choices(list(weights), list(weights.values()))[0]

    def setting(self) -> Setting:
        modules = self.modules()
        world = self.one_of({1: 2, 2: 26, 3: 26, 4: 32, 5: 4, 6: 6, 8: 4})
        layouts = {name: self.layout(world, name) for name in modules}
        pipelined = [name for name in modules if layouts[name]["pp"] > 1]
        schedule = self.schedule(pipelined)
        for name in pipelined:
            layouts[name] |= self.virtual(schedule)
        lm = self.one_of({"titan": 5, "hf_llama": 3, "hf_qwen3": 2, **dict.fromkeys(MIXTURES, 1)})
        for name in modules if lm in MIXTURES else ():
            if name not in ITEM_MODULES:
                shared = layouts[name]["dp_shard"] * layouts[name]["cp"] * layouts[name]["tp"]
                layouts[name]["ep"] = self.rng.choice([ep for ep in (1, 2, 4) if shared % ep == 0])
        setting = Setting(self.data.folder, layouts, schedule, lm, **self.layers(modules, layouts))
        setting = self.trained(self.spread(replace(setting, batches=self.batches())))
        if setting.precision == "64-true" and self.often(0.1):  # elsewhere what is rounded otherwise rounds otherwise
            setting = setting.plus(float8={n: FLOAT8 for n in modules if layouts[n]["tp"] == 1})
        setting = self.filling(setting) if pipelined and self.often(0.5) else setting
        setting = setting.plus(tp_chunks=self.chunks(setting))
        setting = setting.plus(offload=self.offload(setting))
        encoders = [name for name in modules if ITEM_MODULES.get(name) == "encoder"]
        setting = replace(setting, per_item=tuple(name for name in encoders if self.often(0.25)))
        unused = [name for name in modules if self.often(0.08)]
        # The balance loss of a block whose rows nobody uses has no gradient here, and one in one process.
        return replace(setting, unused=tuple(n for n in unused if lm != "balanced" or n in ITEM_MODULES))

    def spread(self, setting: Setting) -> Setting:
        """The same with dropout or a balance, and rows of encoders' microbatches."""
        dropout = self.dropout(setting) if self.single else {}
        in_order = dropout or setting.lm == "balanced"  # in microbatches of one process
        balance = self.balance(setting.modules) if not in_order and self.often(0.6) else None
        by_budget = bool(balance and "llm" in balance.get("budget", {}) and self.often(0.6))
        tokens = {
            name: self.one_of({"equal": 3, 4: 1, 8: 1, 20: 1, 100: 1, 1000: 2})
            for name in setting.modules
            if name in ITEM_MODULES and self.often(0.25)
        }
        count = None if by_budget else 1
        return replace(setting, dropout=dropout, balance=balance, tokens=tokens, microbatches=count)

    def trained(self, setting: Setting) -> Setting:
        """The same with everything else that may be the same in any layout."""
        rng, modules, layouts, mixture = self.rng, setting.modules, setting.layouts, setting.lm in MIXTURES
        splits = setting.schedule != "auto" and schedule_policy(setting.schedule).splits_backward
        # Compiled blocks draw other random numbers.
        compiles = self.often(0.1) and "attention_dropout" not in setting.dropout
        recompute = {n: self.one_of(RECOMPUTES) for n in modules if self.often(0.2)}
        precisions = {"64-true": 12, "32-true": 1, "32-mixed": 2, "bf16-mixed": 1}
        gathered = {"auto": 6, "never": 2, "always": 0.2 if splits else 2}
        if self.focus in modules:
            recompute[self.focus] = rng.choice(list(RECOMPUTES))
            precisions = {"64-true": 2, "32-true": 1, "32-mixed": 3, "bf16-mixed": 2}
            gathered["always"] = 8
        if mixture:
            del precisions["bf16-mixed"]  # rows would visit other experts
        backends = {n: "aot_eager" if n in recompute else "eager" for n in modules if self.often(0.3)}
        losses = [name for name in modules if ITEM_MODULES.get(name) != "encoder"]
        written = {name: self.written(layout) for name, layout in layouts.items()}
        return replace(
            setting,
            layouts=written,
            edges=self.edges(modules),
            loss_weights={n: rng.choice((0.0, 0.5, 3.0)) for n in losses if self.often(0.15)},
            kv_heads=self.one_of({4: 8, 2: 1}),
            freeze=self.freeze(modules, setting.lm),
            transforms=by_module(recompute=recompute, compile=backends if compiles else {}),
            reshard_after_forward=self.one_of(gathered),
            max_in_flight={rng.choice(modules): rng.randint(1, 4)} if self.often(0.12) else {},
            ranks_per_node=self.one_of({1 << 30: 4, 2: 1}),
            tied=setting.lm != "titan" and self.often(0.4),
            precision=self.one_of(precisions),
            attention={n: rng.choice(list(ATTENTION)) for n in modules if n not in ITEM_MODULES and self.often(0.4)},
            late=round(rng.uniform(0.001, 0.02), 4) if self.often(0.35) else 0.0,
            microbatches=setting.microbatches and rng.randint(1, min(6, max(map(len, setting.batches)))),
        )

    def filling(self, setting: Setting) -> Setting:
        """The same with encoders in bubbles, where there are such, perhaps in pieces."""
        if setting.schedule == "sequential" or setting.reshard_after_forward == "always":
            return setting
        fill = self.one_of({"fine": 5, "decoupled": 2})
        layouts = {n: ModuleLayout.from_config(n, dict(v)).resolved(n) for n, v in setting.layouts.items()}
        others = [name for name in setting.modules if name in ITEM_MODULES]
        fills = ScheduleConfig(fill=fill).filling(others, layouts, setting.flows())
        cut = [n for n in sorted(fills) if (layouts[n].pp == 1 or not layouts[n].split) and self.often(0.4)]
        blocks = {f"{name}_layers": getattr(setting, f"{name}_layers") for name in cut}
        pieces = {}
        for name, most in zip(cut, blocks.values(), strict=True):
            pieces[name] = self.rng.randint(1, most if layouts[name].pp == 1 else 2)
            blocks[f"{name}_layers"] = max(most, pieces[name] * layouts[name].pp)
        bounds = {name: bound for name, bound in setting.max_in_flight.items() if fill == "fine" or name not in fills}
        left_out = ("recompute",) if fill == "decoupled" else ()
        transforms = {
            name: {n: way for n, way in of.items() if n not in left_out or name not in fills}
            for name, of in setting.transforms.items()
        }
        setting = replace(setting, **blocks)
        return replace(setting, fill=fill, pieces=pieces, max_in_flight=bounds, transforms=transforms)

    def offload(self, setting: Setting) -> dict[str, str]:
        """Modules whose activations are in host memory, where they may be."""
        offloaded = {}
        for name in setting.modules:
            of = setting.transforms.get(name, {})
            again, whole = of.get("recompute"), setting.fill == "decoupled" and name in ITEM_MODULES
            compiled = again and "compile" in of and setting.layouts[name].get("tp", 1) != 1
            if again not in ("whole", "all but matmuls") and not whole and not compiled and self.often(0.2):
                offloaded[name] = self.one_of({"all": 2, "every 2": 1})
        return offloaded

    def modules(self) -> list[str]:
        if self.draws:
            names = ["vision"] * self.often(0.75) + ["llm", "draw"]
        else:
            names = self.one_of({("vision",): 3, ("audio",): 3, ("vision", "audio"): 5, (): 1})
            names = [*names, "llm"]
        if self.focus not in (None, *names):
            names.insert(0, self.focus)
        if self.often(0.15):
            names.append("caption")
        if self.often(0.25):
            self.rng.shuffle(names)
        return names

    def edges(self, modules: Sequence[str]) -> tuple[tuple[str, str], ...] | None:
        """Usually all."""
        readers = [name for name in modules if name not in ITEM_MODULES]
        if len(readers) == 1 or self.often(0.5):
            return None
        edges = []
        for name in modules:
            if ITEM_MODULES.get(name) == "encoder":
                edges += [(name, r) for r in self.rng.sample(readers, self.rng.randint(1, len(readers)))]
            elif name == "draw":
                edges.append((self.rng.choice(readers), name))
        return tuple(edges)

    def layout(self, world: int, module: str) -> dict[str, Any]:
        count = self.rng.randint(1, world)
        layout: dict[str, Any] = {"ranks": sorted(self.rng.sample(range(world), count)), **dict.fromkeys(DEGREES, 1)}
        for factor in (2, 2, 2, 3, 5, 7):
            if count % factor == 0:
                count //= factor
                divides = ITEM_MODULES.get(module) != "encoder" or HEADS % (layout["tp"] * layout["cp"] * factor) == 0
                heads = factor == 2 and layout["tp"] < 4 and divides
                many = not self.single
                cuts = ITEM_MODULES.get(module) != "generator" and layout["cp"] * factor <= 4 and divides
                degree = self.one_of(
                    {"dp_replicate": 2 * many, "dp_shard": 3 * many, "cp": 3 * cuts, "tp": 3 * heads, "pp": 4}
                )
                layout[degree] *= factor
        if layout["cp"] > 1 and module not in ITEM_MODULES:
            layout["cp_order"] = self.rng.choice(("auto", "auto", "zigzag", "blocks"))
            if HEADS % (layout["tp"] * layout["cp"]) == 0 and self.often(0.4):
                layout["cp_form"] = "heads"
        return layout

    def schedule(self, pipelined: Sequence[str]) -> str:
        """One of ours, or one in six of torch's, all of which are for virtual stages."""
        plain = {"1f1b": 3, "gpipe": 1, "zb_h1": 3, "sequential": 1, "auto": 2}
        often = 1.0 if pipelined else 0.04
        ours, of_torch = dict.fromkeys(("interleaved_1f1b", "zbv"), 2.5 * often), dict.fromkeys(SCHEDULES, 0.5 * often)
        return str(self.one_of({**plain, **ours, **of_torch}))

    def virtual(self, schedule: str) -> dict[str, Any]:
        """Stages that a schedule is made for, mostly."""
        loop, style = {"vpp": self.rng.choice((2, 2, 3))}, {"vpp": 2, "pp_style": "v"}
        made_for = "any" if schedule == "auto" else schedule_policy(schedule).virtual
        if made_for in ("loop", "v"):
            return {"loop": loop, "v": style}[made_for] if self.often(0.9) else {}
        if schedule in ("auto", "gpipe", "sequential") and self.often(0.3):
            return self.rng.choice((loop, style))
        return {}

    def layers(self, modules: Sequence[str], layouts: dict[str, dict[str, Any]]) -> dict[str, int]:
        """Layers by module, and at times how they are split."""
        layers: dict[str, int] = {}
        for name in modules:
            kind = name if name in ITEM_MODULES else "llm"
            stages = layouts[name]["pp"] * layouts[name].get("vpp", 1)
            layers[f"{kind}_layers"] = max(layers.get(f"{kind}_layers", 0), stages + self.rng.randint(0, 2))
        for name, one in layouts.items():
            stages = one["pp"] * one.get("vpp", 1)
            if stages > 1 and self.often(0.3):
                blocks = layers[f"{name if name in ITEM_MODULES else 'llm'}_layers"]
                cuts = [0, *sorted(self.rng.sample(range(1, blocks), stages - 1)), blocks]
                one["split"] = [b - a for a, b in pairwise(cuts)]
        return layers

    def written(self, layout: Mapping[str, Any]) -> dict[str, Any]:
        """As a person would: without ones, at times with a degree left to be derived."""
        written = {name: value for name, value in layout.items() if value != 1 or name in ("ranks", "dp_shard")}
        if self.often(0.3):
            unknown = self.rng.choice([name for name in DEGREES if name in written])
            return written | {unknown: -1}
        return written

    def chunks(self, setting: Setting) -> dict[str, int]:
        """Chunks of modules' tensor parallelism, at times, where they may be."""
        chunks = {}
        for name in setting.modules:
            of = setting.transforms.get(name, {})
            refused = {"compile", "float8"} & {*of} or of.get("recompute") == "all but matmuls"
            if setting.layouts[name].get("tp", 1) != 1 and not refused and self.often(0.4):
                chunks[name] = self.rng.choice((2, 3, 8))
        return chunks

    def dropout(self, setting: Setting) -> dict[str, float]:
        """Where one process draws the same numbers: inside tensor-parallel layers they are other ones, and so they are
        of a part of the rows.
        """
        layouts = setting.layouts
        apart = [name for name, layout in layouts.items() if layout["tp"] * layout["cp"] > 1]
        allowed = {} if "audio" in layouts and layouts["audio"]["cp"] > 1 else {"dropout": 0.2}
        if "audio" not in apart:
            allowed["activation_dropout"] = 0.1
        if not apart or (setting.lm == "titan" and set(apart) <= {"llm", "caption", "draw"}):
            allowed["attention_dropout"] = 0.1
        return {name: p for name, p in allowed.items() if self.often(0.7)}

    def freeze(self, modules: Sequence[str], lm: str) -> tuple[str, ...]:
        """Whole modules, but not all of them, and parts."""
        if self.often(0.6):
            return ()
        whole = self.rng.sample(list(modules), self.rng.choice((0, 1, 1, 2)) if len(modules) > 2 else len(modules) - 1)
        frozen = [name for name in whole if self.often(0.7)]
        for name in modules:
            if name not in frozen and self.often(0.35):
                kind = name if name in ITEM_MODULES else "mixture" if lm in MIXTURES else lm.split("_")[0]
                frozen += [f"{name}.{part}" for part in self.rng.sample(PARTS[kind], self.rng.choice((1, 1, 2)))]
        return tuple(frozen)

    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Some of them without a certain kind of item."""
        batches = []
        for _ in range(self.one_of({1: 6, 2: 3, 3: 1})):
            size = self.one_of({1: 1, 2: 2, 3: 2, 5: 3, 8: 3, 12: 2})
            kinds = list(self.data.kinds)
            if self.often(0.4):
                kinds = self.rng.sample(kinds, self.rng.randint(1, len(kinds) - 1))
            samples = [sample for kind in kinds for sample in self.data.kinds[kind]]
            batches.append(tuple(self.rng.sample(samples, min(size, len(samples)))))
        return tuple(batches)

    def balance(self, modules: Sequence[str]) -> dict[str, Any]:
        balance: dict[str, Any] = {}
        policies = ("auto", "lpt", "round_robin", "none")  # names of our own, whatever tests register
        if self.often(0.5):
            balance["policy"] = self.rng.choice(policies)
        elif self.often(0.5):
            balance["policy"] = {name: self.rng.choice(policies) for name in modules}
        if self.often(0.4):
            balance["rearrange"] = self.rng.choice(("home", "none"))
        if self.often(0.4):
            balance["reorder"] = self.rng.choice(("search", "none"))
        if self.often(0.3):
            balance["costs"] = {self.rng.choice(modules): {"quadratic": self.rng.choice((0.0, 0.1))}}
        if self.often(0.3):
            rows = {"vision": (120, 300), "audio": (400, 800), "draw": (32, 64)}
            chosen = {name: self.rng.choice(rows.get(name, (150, 300, 600))) for name in modules if self.often(0.5)}
            balance["budget"] = chosen
        return balance
