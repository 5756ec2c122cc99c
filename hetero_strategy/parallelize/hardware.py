"""What only some GPUs can do, and takes to be switched on for the whole process: newer flash kernels, async tensor
parallelism. Neither has been run yet.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout

FLASH = {"FA3": ("flash_attn_interface", ((9, 0),)), "FA4": ("flash_attn.cute", ((9, 0), (10, 0)))}
"""Flash kernels that torch takes in the place of its own -> the package that has them, and compute capabilities."""


def use_flash(kernels: str | None, device: torch.device) -> None:
    """Let attention of packed rows run by other flash kernels than torch's own.

    Args:
        kernels: a key of :data:`FLASH`; None: torch's own.

    Raises:
        ConfigError: there are no such kernels, the device or torch cannot run them, or they are not installed.
    """
    if kernels is None:
        return
    refusal = f"HeteroStrategy: attention={kernels!r}"
    if kernels not in FLASH:
        raise ConfigError(f"{refusal}; use {' or '.join(FLASH)}, or leave it out for torch's own flash kernels")
    package, capabilities = FLASH[kernels]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) not in capabilities:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
        raise ConfigError(
            f"{refusal} needs GPUs of compute capability {wanted}, and here is {_name(device)}; leave it out"
        )
    if not _installed(package):
        raise ConfigError(f"{refusal} needs the package {package}; install it, or leave attention out")
    torch.nn.attention.activate_flash_attention_impl(kernels)


def use_async_tp(
    wanted: bool, layouts: Mapping[str, ModuleLayout], compiled: Mapping[str, str], device: torch.device
) -> None:
    """Let torch's compiler put matmuls and the collectives of tensor parallelism beside them into one operator, over
    memory that the GPUs of a node share.

    Raises:
        ConfigError: no module with tensor parallelism is compiled by inductor, or the device cannot do it.
    """
    if not wanted:
        return
    refusal = "HeteroStrategy: async_tp=True"
    if not any(layouts[name].tp > 1 and backend == "inductor" for name, backend in compiled.items()):
        parallel = [name for name, layout in layouts.items() if layout.tp > 1]
        change = f"add compile={parallel}" if parallel else "no module has tp above 1: leave it out"
        raise ConfigError(f"{refusal} is for compiled modules with tensor parallelism; {change}")
    if device.type != "cuda":
        raise ConfigError(
            f"{refusal} needs GPUs that reach each other's memory, and here is {_name(device)}; leave it out, or cut"
            " linear maps into chunks with tp_chunks in the module's layout"
        )
    torch._inductor.config._micro_pipeline_tp = True


def _name(device: torch.device) -> str:
    return device.type if device.type != "cuda" else torch.cuda.get_device_name(device)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what holds it is not there either
        return False
