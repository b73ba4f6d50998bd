"""torch.compile, block by block: one graph serves all layers."""

import torch

from titan_like.models.decoder import Decoder


def compile_blocks(model: Decoder) -> None:
    """Compile each block's forward. FSDP's hooks stay outside, parameter names stay as they are."""
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, fullgraph=True)
