"""Linear layers in float8 through torchao: weights stay what they are, products cast to float8 as they run.

A weight keeps its name, its dtype and its placement. Checked with torchao 0.18.
"""

import dataclasses
import logging
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from titan_like.config.errors import ConfigError
from titan_like.config.schema import Float8

logger = logging.getLogger(__name__)
CAPABILITY = (8, 9)  # of the first NVIDIA GPUs with float8 units: Ada; Hopper is (9, 0)


def _torchao() -> Any:
    """torchao.float8, imported when it is used: it takes a second, and tells of kernels that training does not need.

    Raises:
        ConfigError: it is not installed.
    """
    talkers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [talker.level for talker in talkers]
    for talker in talkers:
        talker.setLevel(logging.ERROR)
    try:
        import torchao.float8
    except ImportError as error:
        raise ConfigError(f"float8.enable needs torchao ({error}); install it: pip install torchao") from error
    finally:
        for talker, level in zip(talkers, levels, strict=True):
            talker.setLevel(level)
    return torchao.float8


def hardware_checks(device: torch.device, settings: Float8) -> list[str]:
    """Why the GPU `device` cannot multiply float8 numbers, unless they are to be emulated."""
    if not settings.enable or settings.emulate:
        return []
    if torch.version.hip:
        if "gfx94" in (arch := torch.cuda.get_device_properties(device).gcnArchName) or "gfx95" in arch:
            return []
        have = f"{torch.cuda.get_device_name(device)} is {arch}"
    elif torch.cuda.get_device_capability(device) >= CAPABILITY:
        return []
    else:
        major, minor = torch.cuda.get_device_capability(device)
        have = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
    return [
        "float8.enable needs a GPU with float8 units (NVIDIA of compute capability 8.9 or more, AMD MI300 or newer), "
        f"but {have}; set float8.emulate to compute the same numbers slowly, or turn float8.enable off"
    ]


def convert(model: nn.Module, names: Iterable[str], settings: Float8) -> None:
    """Replace the linear layers `names` of `model`, those that it has."""
    ao, wanted = _torchao(), set(names)
    ao.convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name in wanted, config=torchao_config(settings)
    )


def torchao_config(settings: Float8) -> Any:
    """A recipe of torchao with the settings that are ours to choose."""
    recipe = _torchao().Float8LinearConfig.from_recipe_name(settings.recipe)
    return dataclasses.replace(
        recipe, emulate=settings.emulate, enable_fsdp_float8_all_gather=settings.enable_fsdp_float8_all_gather
    )


def precompute_scales(parts: Iterable[nn.Module]) -> None:
    """The scales of all weights for the next gather, in one collective instead of one per weight; after each update."""
    for part in parts:
        _torchao().precompute_float8_dynamic_scale_for_fsdp(part)


def gather_in_float8(block: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    """The tensor-parallel plan of a block in which float8 layers (tensorwise) send and receive float8 numbers.

    A module's input is gathered in float8 only if all its layers that read it, those cut by rows, are float8.
    """
    from torchao.float8 import float8_linear, float8_tensor_parallel

    if dist.get_backend() != "nccl":
        _gather_as_bytes()

    def is_float8(name: str) -> bool:
        return isinstance(block.get_submodule(name), float8_linear.Float8Linear)

    changed = {}
    for name, style in plan.items():
        readers = [n for n, s in plan.items() if n.startswith(f"{name}.") and isinstance(s, ColwiseParallel)]
        if isinstance(style, ColwiseParallel) and is_float8(name):
            changed[name] = float8_tensor_parallel.Float8ColwiseParallel()
        elif isinstance(style, RowwiseParallel) and is_float8(name):
            changed[name] = float8_tensor_parallel.Float8RowwiseParallel(output_layouts=style.output_layouts[0])
        elif isinstance(style, PrepareModuleInput) and all(map(is_float8, readers)):
            changed[name] = float8_tensor_parallel.PrepareFloat8ModuleInput(
                input_layouts=style.input_layouts, desired_input_layouts=style.desired_input_layouts
            )
    return {**plan, **changed}


@cache
def _gather_as_bytes() -> None:
    """Gloo gathers no float8 numbers: give it their bytes, through the table in which torchao's tensors look up what
    they do in an operation."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    def gather(operation: Any, args: Any, kwargs: Any) -> Tensor:
        def gather_bytes(numbers: Tensor, *rest: Any, **options: Any) -> Tensor:
            return operation(numbers.view(torch.uint8), *rest, **options).view(numbers.dtype)

        return gather_float8(gather_bytes, args, kwargs)

    operation = torch.ops._c10d_functional.all_gather_into_tensor.default
    gather_float8 = FLOAT8_OPS_TABLE[operation]
    FLOAT8_OPS_TABLE[operation] = gather


def plain(tensor: Tensor) -> Tensor:
    """The tensor that torchao wraps where weights are gathered in float8, sharing its memory; others as they are.

    Checkpoints hold this one, so that they load with and without float8.
    """
    if isinstance(tensor, DTensor):
        local = plain(tensor._local_tensor)
        if local is tensor._local_tensor:
            return tensor
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    wrapped: Any = tensor
    return wrapped._tensor if type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor" else tensor
