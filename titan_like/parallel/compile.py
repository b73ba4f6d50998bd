"""torch.compile, block by block: one graph serves all layers."""

import os
from pathlib import Path

import torch

from titan_like.models.decoder import Decoder


def compile_blocks(model: Decoder) -> None:
    """Compile each block's forward. FSDP's hooks stay outside, parameter names stay as they are."""
    # The longest document may be the same for many steps, and would be compiled in as a constant: an argument of
    # Block.forward, of any arguments where recompute has wrapped the block.
    torch.compiler.config.dynamic_sources = "L['mask'][1], L['args'][3][1]"
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, fullgraph=True)


def compiler_checks(device: torch.device) -> list[str]:
    """Why nothing can be compiled for `device`: on a CPU there must be a C++ compiler that inductor can use, and torch
    must lie where its commands, which are split at spaces, find it."""
    if device.type != "cpu":
        return []
    if " " in torch.__file__:
        return [
            f"compile.enable cannot compile for the CPU while torch lies in {Path(torch.__file__).parent}, which has a "
            "space in its name; use an environment in another folder, or turn compile.enable off"
        ]
    from torch._inductor.cpp_builder import get_cpp_compiler  # private; checked on torch 2.13
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        named = f"CXX is {os.environ['CXX']!r}, which does not work" if os.environ.get("CXX") else "none was found"
        return [f"compile.enable needs a C++ compiler on a CPU, but {named}; install g++, set CXX, or turn it off"]
    return []


def compiled_so_far() -> tuple[int, float]:
    """Graphs that this process has compiled, and the seconds that took; little where inductor's cache had them."""
    from torch._dynamo import utils  # private; checked on torch 2.13

    spent = utils.calculate_time_spent()
    return utils.counters["stats"]["unique_graphs"], spent.get("total_wall_time", 0.0)
