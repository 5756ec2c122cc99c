"""Settings with less of something than another setting has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hetero_strategy.schedule.policies import schedule_policy
from tests.distributed.stepping import Setting
from tests.fuzz.drawn_settings import DEGREES

PLAIN = ("balance", "tokens", "freeze", "transforms", "max_in_flight",
         "reshard_after_forward", "edges", "loss_weights", "kv_heads", "ranks_per_node", "tied", "dropout",
         "precision", "attention", "late", "lm", "per_item", "unused", "pieces", "fill",
         "schedule")  # fmt: skip
"""Options that a smaller setting has as they are by default, in the order in which that is tried."""


def smaller(setting: Setting) -> Iterator[Setting]:
    """Settings with less of something, those with much less first."""
    for name in setting.modules:
        if name != "llm":
            yield _without(setting, name)
    if len(setting.batches) > 1:
        yield from (_of_batches(setting, (batch,)) for batch in setting.batches)
    for number, batch in enumerate(setting.batches):
        halves = (batch[: len(batch) // 2], batch[len(batch) // 2 :])
        for half in halves if len(batch) > 1 else ():
            yield _of_batches(setting, (*setting.batches[:number], half, *setting.batches[number + 1 :]))
    plain = Setting("", {})
    for option in PLAIN:
        if getattr(setting, option) != getattr(plain, option):
            yield _plain(setting, option)
    if setting.schedule != "auto" and schedule_policy(setting.schedule).instead == "zb_h1":
        yield replace(_plain(setting, "schedule"), schedule="zb_h1")
    for part in setting.freeze if len(setting.freeze) > 1 else ():
        yield replace(setting, freeze=tuple(p for p in setting.freeze if p != part))
    for name, of in setting.transforms.items():
        for transform in of:
            less = {n: way for n, way in of.items() if n != transform}
            yield replace(setting, transforms={**setting.transforms, name: less})
    for option in ("balance", "tokens", "pieces"):
        given = getattr(setting, option) or {}
        for key in given if len(given) > 1 else ():
            yield replace(setting, **{option: {k: v for k, v in given.items() if k != key}})
    for name, layout in setting.layouts.items():
        yield from (_with_layout(setting, name, one) for one in _smaller_layouts(layout))
    yield _renumbered(setting)
    for option in ("vision_layers", "audio_layers", "llm_layers", "draw_layers"):
        if getattr(setting, option) > 1:
            yield replace(setting, **{option: 1})
            yield replace(setting, **{option: getattr(setting, option) - 1})
    if setting.microbatches is None:
        yield replace(setting, microbatches=2)
    elif setting.microbatches > 1:
        yield replace(setting, microbatches=1)
        yield replace(setting, microbatches=setting.microbatches - 1)


def _without(setting: Setting, module: str) -> Setting:
    """The same without a module and what is said of it."""
    edges = setting.edges and tuple(e for e in setting.edges if module not in e)
    balance = setting.balance and {
        key: {n: v for n, v in given.items() if n != module} if isinstance(given, Mapping) else given
        for key, given in setting.balance.items()
    }
    return replace(
        setting,
        layouts={n: v for n, v in setting.layouts.items() if n != module},
        edges=edges,
        freeze=tuple(part for part in setting.freeze if part.split(".")[0] != module),
        per_item=tuple(name for name in setting.per_item if name != module),
        transforms={n: v for n, v in setting.transforms.items() if n != module},
        pieces={n: v for n, v in setting.pieces.items() if n != module},
        loss_weights={n: v for n, v in setting.loss_weights.items() if n != module},
        attention={n: v for n, v in setting.attention.items() if n != module},
        max_in_flight={n: v for n, v in setting.max_in_flight.items() if n != module},
        tokens={n: v for n, v in setting.tokens.items() if n != module},
        balance=balance,
    )


def _of_batches(setting: Setting, batches: tuple[tuple[int, ...], ...]) -> Setting:
    count = setting.microbatches and min(setting.microbatches, max(map(len, batches)))
    return replace(setting, batches=batches, microbatches=count)


def _plain(setting: Setting, option: str) -> Setting:
    """The same with the default of an option."""
    changed: dict[str, Any] = {option: getattr(Setting("", {}), option)}
    if option == "lm":
        names = {"model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.layers.0": "layers.0"}
        renamed = setting.freeze
        for old, new in names.items():
            renamed = tuple(part.replace(f".model.{old}", f".model.{new}") for part in renamed)
        changed |= {"freeze": renamed, "tied": False}
    if option == "schedule":
        keys = ("vpp", "pp_style", "split")
        changed["layouts"] = {n: {k: v for k, v in one.items() if k not in keys} for n, one in setting.layouts.items()}
    if option == "balance" and setting.microbatches is None:
        changed["microbatches"] = 2
    return replace(setting, **changed)


def _smaller_layouts(layout: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One rank, one degree less, or fewer virtual stages."""
    ranks = list(layout["ranks"])
    if len(ranks) > 1:
        yield {"ranks": ranks[:1]}
        yield {"ranks": ranks[-1:]}
    pp = layout.get("pp", 1)
    if pp > 2 and pp % 2 == 0:
        yield {key: value for key, value in layout.items() if key != "split"} | {"ranks": ranks[::2], "pp": pp // 2}
    if pp == len(ranks) > 2:
        yield {key: value for key, value in layout.items() if key != "split"} | {"ranks": ranks[:2], "pp": 2}
    for degree in DEGREES:
        if (size := layout.get(degree, 1)) > 1:
            without = {"pp": ("split", "vpp", "pp_style")}.get(degree, ())
            rest = {key: value for key, value in layout.items() if key not in (degree, *without)}
            yield rest | {"ranks": ranks[: len(ranks) // size]}
            yield rest | {"ranks": ranks[-len(ranks) // size :]}
    for key in ("split", "vpp", "ep", "cp_form", "cp_order"):
        if key in layout:
            dropped = ("split", "pp_style", "vpp") if key == "vpp" else (key,)
            yield {name: value for name, value in layout.items() if name not in dropped}


def _with_layout(setting: Setting, name: str, layout: Mapping[str, Any]) -> Setting:
    return replace(setting, layouts={**setting.layouts, name: layout})


def _renumbered(setting: Setting) -> Setting:
    """Without ranks that have nothing."""
    used = sorted({rank for layout in setting.layouts.values() for rank in layout["ranks"]})
    layouts = {n: {**one, "ranks": [used.index(r) for r in one["ranks"]]} for n, one in setting.layouts.items()}
    return replace(setting, layouts=layouts)
