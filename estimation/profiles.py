"""What a trainer's version does that its memory depends on: facts of its code, each with the place to read it.

A profile holds no number that was fitted to a measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


class NotCovered(Exception):
    """No profile describes what a row's run did; the message says what."""


@dataclass(frozen=True)
class Profile:
    """Behaviour of one trainer at one time; the defaults are those of titan_like on a GPU.

    Attributes:
        norm: fused keeps a norm's input and one fp32 number per row; composite, two fp32 copies of the input; python,
            one and another in the compute dtype.
        rope: halves computes in eight fp32 pieces, complex in two.
        kept_products: recompute per operation keeps the products with an even or an odd running number in their block.
        keeps_attention: and whether it keeps the result of attention: early lists had no entry for cuDNN's.
        compiles_recompute: a compiled block has its recomputation in it; else it is around it.
        early_stop: recomputation ends at the last tensor that the backward needs.
        loss: whole holds fp32 log-probabilities of all tokens; compiled holds the logits; chunked works on
            `loss_chunks` pieces of the sequence, logits included, chunked compiled in fused kernels; linear makes the
            logits of one piece of the tokens at a time, and gradients with them; linear compiled in fused kernels.
        compiles_loss: what compiling makes of a loss; empty: nothing.
        loss_copies: a softmax of 16-bit numbers works on a copy in fp32.
        keeps_logits: who calls the loss holds the logits during the backward: in the compute dtype, or in fp32.
        groups: apart: embedding, blocks, and norm with head are gathered one by one; together: the tables and the last
            norm are one group, gathered for the whole step.
        last_block_stays: the last block keeps its gathered weights between forward and backward.
        head_stays: so does the group of norm and head.
        adam: fp32 two numbers of four bytes a parameter, bf16 of two bytes, 8bit of one and a scale for each 256.
        weights: fp32 masters are cast for compute; bf16 weights are all there is.
        step_state: whether optimizer states exist when the first backward runs; else they are made at its end.
        foreach_update: the optimizer makes a temporary as large as the weights.
        flat_pool: the stream that allocates the flat buffer of what is reduced, and so the pool that it comes from: in
            torch before 2024-07 that of the reduction, where nothing else can use it.
        updates_in_backward: each gradient is used and freed as soon as it is made.
        flat: FSDP1 instead of FSDP2, see estimation/flat.py.
        own_streams: FSDP's collectives allocate from streams of their own; else all is one stream's.
        stash: inputs of blocks lie on the host until the backward, but for the newest so many; None: they do not.
        whole_table_gradient: tensor-parallel ranks make the embedding's gradient of the whole vocabulary first.
        expandable: the allocator's expandable segments are on.
        gpu: kernels are those of a GPU, and NCCL keeps a message until the wait; gloo keeps it as long as its handle.
    """

    name: str
    source: str
    norm: Literal["fused", "composite", "python"] = "fused"
    rope: Literal["halves", "complex"] = "halves"
    kept_products: Literal["even", "odd"] = "even"
    keeps_attention: bool = True
    compiles_recompute: bool = False
    early_stop: bool = True
    loss: Literal["whole", "compiled", "chunked", "chunked compiled", "linear", "linear compiled"] = "whole"
    loss_chunks: int = 1
    compiles_loss: Mapping[str, str] = field(default_factory=dict, hash=False)
    loss_copies: bool = False
    keeps_logits: Literal["no", "compute", "fp32"] = "no"
    groups: Literal["apart", "together"] = "apart"
    last_block_stays: bool = False
    head_stays: bool = True
    adam: Literal["fp32", "bf16", "8bit"] = "fp32"
    weights: Literal["fp32", "bf16"] = "fp32"
    step_state: bool = True
    foreach_update: bool = False
    loss_parallel: bool = True
    whole_table_gradient: bool = False
    flat_pool: Literal["main", "reduce"] = "main"
    updates_in_backward: bool = False
    stash: int | None = None
    flat: bool = False
    own_streams: bool = True
    expandable: bool = True
    gpu: bool = True

    @property
    def is_linear(self) -> bool:
        """Whether the loss has the head's product in it."""
        return self.loss in ("linear", "linear compiled")


TITAN_LIKE = Profile("titan_like", "titan_like/parallel/apply.py, titan_like/loss.py", loss="linear")
# Real tensors on a CPU: torch decomposes RMSNorm there, and casts before a softmax.
TITAN_LIKE_CPU = Profile(
    "titan_like on CPU", "torch: aten/src/ATen/native/{layer_norm,SoftMax}.cpp", norm="composite", loss="linear",
    loss_copies=True, gpu=False,
)  # fmt: skip

_TITAN = "github.com/pytorch/torchtitan"
# Early 2024: the model returned fp32 logits, the training loop held them; inputs of the first schedule of recompute.
TITAN_2024_03 = Profile(
    "torchtitan 2024-03", f"{_TITAN}/tree/83c879f18: train.py, parallelisms/parallelize_llama.py", norm="python",
    rope="complex", kept_products="odd", keeps_logits="fp32", groups="together", step_state=False,
    last_block_stays=True, foreach_update=True, expandable=False,
    whole_table_gradient=True, flat_pool="reduce", compiles_recompute=True,
)  # fmt: skip
TITAN_2024_06 = replace(
    TITAN_2024_03, name="torchtitan 2024-06", source=f"{_TITAN}/tree/40f8fd007", norm="fused", foreach_update=False,
)  # fmt: skip
TITAN_2024_08 = replace(
    TITAN_2024_06,
    name="torchtitan 2024-08",
    source=f"{_TITAN}/commit/e29b6b4d4",
    keeps_logits="no",
    flat_pool="main",
)
# From here on run_llama_train.sh sets expandable segments.
TITAN_2024_12 = replace(
    TITAN_2024_08, name="torchtitan 2024-12", source=f"{_TITAN}/tree/b5bcd76c6: benchmarks, train.py", norm="composite",
    expandable=True,
)  # fmt: skip
# The loss is compiled with the blocks, and embedding, blocks and [norm, output] are gathered one by one.
TITAN_2025_06 = replace(
    TITAN_2024_12, name="torchtitan 2025-06",
    source=f"{_TITAN}/tree/e7c0cae: components/loss.py, llama3/infra/parallelize.py",
    norm="fused", groups="apart", last_block_stays=False,
    compiles_loss={"whole": "compiled", "chunked": "compiled"},
)  # fmt: skip
# Attention is cuDNN's, which the list of what recompute per operation keeps did not name before pull request 2095
# (December 2025), and recomputation does not end early.
TITAN_2025_11 = replace(
    TITAN_2025_06, name="torchtitan 2025-11", early_stop=False, keeps_attention=False,
    source=f"{_TITAN}/tree/d9bdfbb20: models/attention.py, distributed/activation_checkpoint.py",
)  # fmt: skip
TITAN_2025_12 = replace(TITAN_2025_11, name="torchtitan 2025-12", source=f"{_TITAN}/pull/2095", keeps_attention=True)
# One device, everything in bf16, no FSDP. Compiling a loss in place does so for a chunked one alone (compile_loss).
TORCHTUNE = Profile(
    "torchtune", "github.com/pytorch/torchtune: recipes/full_finetune_single_device.py, modules/attention.py",
    norm="python", rope="complex", weights="bf16", adam="bf16", step_state=False,
    compiles_loss={"whole": "whole", "chunked": "chunked compiled"},
)  # fmt: skip
# Each block, and the rest together, wrapped by FSDP2 in bf16 without a policy of mixed precision.
TORCHTUNE_FSDP2 = replace(
    TORCHTUNE, name="torchtune FSDP2", groups="together",
    source="github.com/pytorch/torchtune: recipes/full_finetune_distributed.py, training/_distributed.py: shard_model",
)  # fmt: skip
