"""Find where every tensor of a module lies in a Hugging Face folder, by transformers' own conversion maps.

A folder belongs to a whole transformers model, of which a module may be a part. The model is made on the meta device
from config.json. Its class knows all names: those of other parts are no fault, and neither are tensors that the class
leaves out on purpose.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero_strategy.errors import ModelError
from hetero_strategy.model.hf_folder import EXTRA, HFWeights, TensorFolder, halves_to_pairs, read_config
from hetero_strategy.model.unread import Converted, Picked, Stored, Unread

UNLIKE = "config.json and weights do not belong together"
QUANTISED = "; its weights are quantised: save them in bfloat16 with transformers first"
OLD = r"rotary_emb\.inv_freq"
"""Tensors of old folders that models now compute."""
SAID = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass"}
"""Logger -> part of a message that it logs when transformers' models are imported, and that users cannot act on:
missing kernels for this Python or device, a deprecated call."""


def hush() -> None:
    """Filter the messages of :data:`SAID` out; calling it again changes nothing."""
    for name in SAID:
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return SAID[record.name] not in str(record.msg)


hush()  # before this module, or any of the zoo, imports a model of transformers


class Conversions:
    """transformers' map between a folder's tensors and those of a model; its private names stay in this class."""

    def __init__(self, model: Any) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.model, self.known = model, model.state_dict()
        self._loading = core_model_loading
        self._maps = conversion_mapping.get_model_conversion_mapping(model)
        self._renamings, self._converters = self._of_kinds(self._maps)
        self.unexpected = [*(model._keys_to_ignore_on_load_unexpected or ()), OLD]
        """Patterns of tensors that the class leaves out on purpose."""
        self._last = functools.lru_cache(maxsize=1)(lambda run: run(lambda tensor: tensor.read({})))
        self.ties: dict[str, str] = dict(model.all_tied_weights_keys)
        """Name -> name of the same parameter."""

    def _of_kinds(self, maps: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        kinds = (self._loading.WeightRenaming, self._loading.WeightConverter)
        renamings, converters = ([one for one in maps if isinstance(one, kind)] for kind in kinds)
        return renamings, converters

    def groups(self, names: Iterable[str]) -> tuple[dict[str, _Group], list[str]]:
        """Return the groups of names in a folder, by the first tensor made of each, and the names without a place."""
        by_pattern = {pattern: one for one in self._converters for pattern in one.source_patterns}
        groups: dict[str, _Group] = {}
        placeless = []
        rename, prefix = self._loading.rename_source_key, self.model.base_model_prefix
        for name in sorted(names, key=self._loading.dot_natural_key):  # experts are stacked in this order
            fqn, pattern = rename(name, self._renamings, self._converters, prefix, self.known)
            if fqn not in self.known and name in self.known:
                fqn, pattern = rename(name, [], [], prefix, self.known)
            if fqn not in self.known:
                placeless.append(name)
            elif pattern is None:
                groups[fqn] = _Group(None, {"": [name]})
            else:
                group = groups.setdefault(fqn, _Group(by_pattern[pattern], {}))
                group.names.setdefault(pattern, []).append(name)
        return groups, placeless

    def convert(self, fqn: str, group: _Group, get: Callable[[str], Any]) -> dict[str, Any]:
        """Return the tensors of the model that a group becomes; ``get`` gives tensors by their name in the folder."""
        if group.converter is None:
            return {fqn: get(group.names[""][0])}
        converter = deepcopy(group.converter)
        for pattern, names in group.names.items():
            for name in names:
                converter.add_tensor(fqn, name, pattern, get(name))
        tensors = converter.convert(fqn, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}

    def revert(self, tensors: Mapping[str, Unread], *, as_found: bool = False) -> dict[str, Unread]:
        """Return the tensors of a folder that these of the model become, by their names there.

        Args:
            as_found: use the conversions that :meth:`groups` used; default: those of a folder of transformers' own.
        """
        maps = [one for one in self._maps if one.was_used()] if as_found else None
        self.model._weight_conversions = maps
        if maps is None:  # as transformers has it: prefixes are not put back, and old names are not used
            maps = [one for one in self._maps if not isinstance(one, self._loading.PrefixChange)]
        converters = self._of_kinds(one.reverse_transform() for one in reversed(maps))[1]
        together: dict[str, dict[str, Unread]] = {}
        for fqn, tensor in tensors.items():
            first, pattern = self._loading.apply_converters(fqn, converters)
            together.setdefault("" if pattern is None else first, {})[fqn] = tensor
        converted: dict[str, Unread] = {}
        for group in together.values():
            run = functools.partial(self._revert, group)
            try:
                converted |= run(lambda tensor: tensor)
            except (TypeError, AttributeError):  # it does more than move slices
                converted |= self.whole(run)
        return converted

    def whole(self, run: Callable[[Callable[[Unread], Any]], dict[str, Any]]) -> dict[str, Unread]:
        """Return the results of a conversion that reads all of its tensors; it first runs on the meta device."""
        on_meta = run(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        convert = functools.partial(self._last, run)
        return {name: Converted(convert, name, result.shape, result.dtype) for name, result in on_meta.items()}

    def _revert(self, tensors: Mapping[str, Unread], get: Callable[[Unread], Any]) -> dict[str, Any]:
        return self._loading.revert_weight_conversion(self.model, {fqn: get(one) for fqn, one in tensors.items()})


@dataclass(frozen=True)
class _Group:
    """Tensors of a folder that become tensors of a model together."""

    converter: Any
    """transformers' converter; None for a plain tensor."""
    names: dict[str, list[str]]
    """Pattern of the converter -> names in the folder."""


@dataclass(frozen=True)
class Sources:
    """The tensors of a folder as a transformers model has them."""

    tensors: Mapping[str, Unread]
    """Name in the model -> tensor. A tied parameter has both names."""
    groups: Mapping[tuple[str, ...], tuple[str, ...]]
    """Names in the folder -> names in the model of the tensors that they become together."""
    placeless: tuple[str, ...]
    """Names in the folder that the class neither has nor leaves out on purpose."""
    conversions: Conversions | None = None
    """Conversions of the folder's class; None without a transformers class, where every name stays as it is."""


def made_on_meta(model_class: Any, config: Any) -> Any:
    """Make a transformers model on the meta device."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return model_class(config)


def whole_model(folder: Path, model_class: type | None) -> Any:
    """Make the transformers model of a folder on the meta device; None if there is no class for it.

    Args:
        model_class: class to take if config.json names none, or one that transformers does not export.
    """
    content = read_config(folder)
    architecture = next(iter(content.get("architectures") or ()), None)
    if architecture is not None and (model_class is None or model_class.__name__ != architecture):
        model_class = getattr(importlib.import_module("transformers"), architecture, model_class)
    return None if model_class is None else _on_meta(model_class, folder, str(content))


@functools.lru_cache(maxsize=4)
def _on_meta(model_class: Any, folder: Path, content: str) -> Any:
    """Make a model once for each content of a folder's config.json."""
    return made_on_meta(model_class, model_class.config_class.from_pretrained(folder, attn_implementation="eager"))


def sources_of(folder: TensorFolder, model_class: type | None) -> Sources:
    """Return the tensors of a folder; nothing but shapes is read."""
    model = whole_model(folder.folder, model_class)
    if model is None:
        return Sources({name: Stored(folder, name) for name in folder.names()}, {}, ())
    conversions = Conversions(model)
    groups, placeless = conversions.groups(folder.names())
    tensors: dict[str, Unread] = {}
    together: dict[tuple[str, ...], tuple[str, ...]] = {}
    for fqn, group in groups.items():
        try:
            converted = conversions.convert(fqn, group, functools.partial(Stored, folder))
        except (TypeError, AttributeError):  # it does more than move slices
            converted = _converted(conversions, fqn, group, folder)
        tensors |= converted
        together[tuple(name for names in group.names.values() for name in names)] = tuple(converted)
    for one, other in conversions.ties.items():
        if one in tensors and other in tensors:
            _check_tie(folder, groups[one], groups[other], tensors[one], tensors[other])
        for name, source in ((one, other), (other, one)):
            if name not in tensors and source in tensors:
                tensors[name] = tensors[source]
    unexpected = [re.compile(pattern) for pattern in conversions.unexpected]
    placeless = [name for name in placeless if not any(pattern.search(name) for pattern in unexpected)]
    return Sources(tensors, together, tuple(placeless), conversions)


def _converted(conversions: Conversions, fqn: str, group: _Group, folder: TensorFolder) -> dict[str, Unread]:
    """Return the tensors of a conversion that reads all of its inputs."""

    def run(get: Callable[[Unread], Any]) -> dict[str, Any]:
        return conversions.convert(fqn, group, lambda name: get(Stored(folder, name)))

    try:
        return conversions.whole(run)
    except (RuntimeError, ValueError) as fault:
        count, some = sum(map(len, group.names.values())), next(iter(group.names.values()))[0]
        raise ModelError(
            f"{fqn} cannot be made of {count} tensors in {folder.folder}, such as {some}: {fault}: {UNLIKE}"
        ) from None


def _check_tie(folder: TensorFolder, of_one: _Group, of_other: _Group, one: Unread, other: Unread) -> None:
    """Refuse an embedding and its head that differ in the folder. Some rows suffice: a step changes all of a head."""
    some = {0: torch.linspace(0, one.shape[0] - 1, min(one.shape[0], 64)).long()}
    if one.shape != other.shape or not torch.equal(one.read(some), other.read(some)):
        names = " and ".join(next(iter(group.names.values()))[0] for group in (of_other, of_one))
        raise ModelError(
            f"config.json in {folder.folder} has tie_word_embeddings=true, but {names} are not the same; set it to"
            " false there"
        )


def match(
    name: str, weights: HFWeights | None, folder: TensorFolder, shapes: Mapping[str, torch.Size]
) -> dict[str, Unread]:
    """Return the sources of a module's tensors by FQN, after checking that names and shapes fit.

    Args:
        name: name of the module, for errors.
        weights: names of the module's tensors; None if it has no Hugging Face form.
        folder: its folder.
        shapes: shapes of all parameters and buffers of the module.

    Raises:
        ModelError: the folder lacks tensors, has some without a place, or has others than config.json says.
    """
    if weights is None:
        raise ModelError(f"{name}: this module cannot be loaded from a Hugging Face folder: it has no hf_weights()")
    try:
        sources = sources_of(folder, weights.model_class)
    except ModelError as fault:
        raise ModelError(f"{name}: {fault}") from None
    prefix = prefix_of(weights.names, sources)
    names = {fqn: prefix + theirs for fqn, theirs in weights.names.items()}
    advice = QUANTISED if read_config(folder.folder).get("quantization_config") else ""
    if missing := sorted(set(names.values()) - sources.tensors.keys()):
        raise ModelError(f"{name}: {folder.folder} lacks {len(missing)} tensors, such as {missing[:3]}{advice}")
    placeless = sources.placeless
    if sources.conversions is None:
        placeless = tuple(sorted(folder.names() - set(names.values())))
    if placeless:
        raise ModelError(
            f"{name}: {folder.folder} holds {len(placeless)} tensors this model has no place for, such as"
            f" {list(placeless[:3])}{advice}"
        )
    if odd := sorted(folder.own - (shapes.keys() - names.keys())):
        raise ModelError(
            f"{name}: {folder.folder / EXTRA} holds {len(odd)} tensors that this module lacks beside its Hugging"
            f" Face weights, such as {odd[:3]}: make the module that was exported, or take the file away"
        )
    source_of = {fqn: sources.tensors[theirs] for fqn, theirs in names.items()}
    for fqn, heads in weights.paired_heads.items():
        source_of[fqn] = Picked(source_of[fqn], 0, halves_to_pairs(torch.arange(source_of[fqn].shape[0]), heads))
    source_of |= {fqn: Stored(folder, fqn) for fqn in folder.own}
    for fqn, source in source_of.items():
        if source.shape != shapes[fqn]:
            stacked = (of for of, members in sources.groups.items() if names.get(fqn) in members)
            lacking = _lacking(next(stacked, ()), shapes[fqn][0] if shapes[fqn] else 0)
            raise ModelError(
                f"{name}: {names.get(fqn, fqn)} in {folder.folder} has shape {tuple(source.shape)}, the model has"
                f" {tuple(shapes[fqn])}{lacking and f', as there is no {lacking}'}: "
                + (f"take {EXTRA} away to train it anew" if fqn in folder.own else UNLIKE + advice)
            )
    if whole := sorted(names[fqn] for fqn, source in source_of.items() if isinstance(source, Converted)):
        warnings.warn(
            f"{name}: read whole on every rank: {len(whole)} tensors, such as {whole[0]}, whose conversion by"
            " transformers does more than move slices",
            stacklevel=2,
        )
    return source_of


def _lacking(names: Iterable[str], count: int) -> str:
    """Return the first name that numbered tensors, ``count`` of each kind, lack; "" if there is none."""
    present = set(names)
    for name in sorted(present):
        for number in re.finditer(r"(?<=\.)\d+(?=\.)", name):
            series = [f"{name[: number.start()]}{n}{name[number.end() :]}" for n in range(count)]
            missing = [other for other in series if other not in present]
            if 0 < len(missing) < count - 1:  # a number that counts something else has one name alone
                return missing[0]
    return ""


def prefix_of(names: Mapping[str, str], sources: Sources) -> str:
    """Return the prefix of a part's names in a folder's model: the one with which most are known, "" before others."""
    known = sources.tensors if sources.conversions is None else sources.conversions.known
    last = max(names.values(), key=len, default="")
    prefixes = ["", *(theirs.removesuffix(last) for theirs in known if theirs.endswith(f".{last}"))]
    return max(prefixes, key=lambda prefix: sum(prefix + theirs in known for theirs in names.values()))
