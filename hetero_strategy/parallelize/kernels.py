"""What only some GPUs can do, and takes to be switched on for the whole process: newer flash kernels, async tensor
parallelism. Neither has been run yet.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from hetero_strategy.errors import ConfigError
from hetero_strategy.layout.spec import ModuleLayout
from hetero_strategy.model.adapter import Adapter

FA4_TRAINS = "2.13"
"""First torch whose FA4 has a backward without a window: before, it hands -1 on for none."""
FLASH = {"FA3": ("flash_attn_interface", ((9, 0),)), "FA4": ("flash_attn.cute", ((9, 0), (10, 0)))}
"""Flash kernels that torch takes in the place of its own -> the package that has them, and compute capabilities."""


def known_flash(kernels: str | None) -> str | None:
    """A key of :data:`FLASH`, or None.

    Raises:
        ConfigError: something else.
    """
    if kernels not in (None, *FLASH):
        raise ConfigError(
            f"HeteroStrategy: attention={kernels!r}; use {' or '.join(FLASH)}, or leave it out for torch's own flash"
            " kernels"
        )
    return kernels


def use_flash(kernels: str | None, device: torch.device) -> None:
    """Let attention of packed rows run by other flash kernels than torch's own.

    Args:
        kernels: a key of :data:`FLASH`; None: what torch is set to.

    Raises:
        ConfigError: the device or torch cannot run them, or they are not installed.
    """
    if kernels is None:
        return
    refusal = f"HeteroStrategy: attention={kernels!r}"
    package, capabilities = FLASH[kernels]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) not in capabilities:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in capabilities)
        raise ConfigError(
            f"{refusal} needs GPUs of compute capability {wanted}, and here is {device_name(device)}; leave it out"
        )
    if not _installed(package):
        raise ConfigError(f"{refusal} needs the package {package}; install it, or leave attention out")
    if kernels == "FA4" and torch.__version__ < FA4_TRAINS:
        raise ConfigError(f"{refusal} trains with torch {FA4_TRAINS} or newer, and here is {torch.__version__}")
    torch.nn.attention.activate_flash_attention_impl(kernels)


def async_tp(
    wanted: bool,
    modules: Mapping[str, Adapter],
    layouts: Mapping[str, ModuleLayout],
    compiled: Mapping[str, str],
    device: torch.device,
) -> list[str]:
    """Modules in which torch's compiler puts matmuls and the collectives of tensor parallelism beside them into one
    operator, over memory that the GPUs of a node share: those that gather and scatter rows.

    Raises:
        ConfigError: there are none that inductor compiles, or the device cannot do it.
    """
    if not wanted:
        return []
    refusal = "HeteroStrategy: async_tp=True"
    apart = [name for name, layout in layouts.items() if modules[name].row_sharding(layout).parts > layout.cp]
    found = [name for name in apart if compiled.get(name) == "inductor"]
    if not found:
        change = f"add compile={apart}" if apart else "here are none, such as titan_llama with tp above 1: leave it out"
        raise ConfigError(
            f"{refusal} is for compiled modules whose tensor-parallel ranks have parts of the rows; {change}"
        )
    if device.type != "cuda":
        raise ConfigError(
            f"{refusal} needs GPUs that reach each other's memory, and here is {device_name(device)}; leave it out, or"
            " cut linear maps into chunks with tp_chunks in the module's layout"
        )
    return found


def use_async_tp(groups: Sequence[dist.ProcessGroup]) -> None:
    """Share memory in these groups, and let the compiler know."""
    if not groups:
        return
    torch._inductor.config._micro_pipeline_tp = True
    with (
        warnings.catch_warnings()
    ):  # torch calls it needless, yet its compiler fuses only in groups that it knows by it
        warnings.simplefilter("ignore", FutureWarning)
        for group in groups:
            enable_symm_mem_for_group(group.group_name)


def device_name(device: torch.device) -> str:
    """What to call a device in a message."""
    return device.type if device.type != "cuda" else torch.cuda.get_device_name(device)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what holds it is not there either
        return False
