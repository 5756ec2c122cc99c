"""Build models on the meta device, and refuse weights that would silently be lost there."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from hetero_strategy.errors import ModelError

_WITHOUT_VALUES: ContextVar[bool] = ContextVar("without_values", default=False)


@contextmanager
def models_without_values(without: bool = True) -> Iterator[None]:
    """Keep models that are built inside on the meta device; everything else built there gets its values as usual.

    ``without=False`` gives models their values even inside such a context.
    """
    token = _WITHOUT_VALUES.set(without)
    try:
        yield
    finally:
        _WITHOUT_VALUES.reset(token)


def made_without_values() -> bool:
    """Return whether a model that is built now stays on the meta device."""
    return _WITHOUT_VALUES.get() or torch.get_default_device().type == "meta"


def on_meta(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that builds on the meta device."""

    @functools.wraps(init)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        with torch.device("meta"), nothing_lost():
            init(*args, **kwargs)

    return wrapped


@contextmanager
def nothing_lost() -> Iterator[None]:
    """Refuse to load values into the meta device: torch only warns, and initial values would replace them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*copying from a non-meta parameter.*")
            yield
    except UserWarning as lost:
        if "copying from a non-meta parameter" not in str(lost):
            raise
        raise ModelError(
            f"{str(lost).partition(': ')[0].removeprefix('for ')}: weights are loaded into a module that is built on"
            " the meta device, where they would be lost; load them into a module made outside the constructor and give"
            " it the ready module, or call load_state_dict(..., assign=True)"
        ) from None
    except RuntimeError as refused:  # transformers' error for the same fault
        if "from_pretrained" not in str(refused) or "meta device" not in str(refused):
            raise
        raise ModelError(
            "from_pretrained() is called in a constructor, which builds on the meta device, where its weights would be"
            " lost; call it outside and give the constructor the ready module"
        ) from None
