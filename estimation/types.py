"""What both memory engines (trace.py and formula.py) answer with. All sizes are bytes of one rank."""

from collections.abc import Mapping
from dataclasses import dataclass

# Kinds of transient memory: neither resident nor an activation that waits for its backward.
ALL_GATHER = "all-gather"  # gathered weights, and the flat buffers that they come in
REDUCE_SCATTER = "reduce-scatter"  # whole gradients that wait for their reduction, and its flat buffers
LOSS = "logits/loss"  # logits, cross entropy, and the gradients of both
RECOMPUTE = "recompute"  # activations that were computed a second time
COMMUNICATION = "communication"  # buffers of tensor, context and pipeline parallelism
OPTIMIZER = "optimizer"  # temporaries of clipping and of the update
BACKWARD = "backward"  # gradients of activations
FORWARD = "forward"  # results in the forward that no backward needs
INPUTS = "inputs"  # the batch
TRANSIENT = (ALL_GATHER, REDUCE_SCATTER, LOSS, RECOMPUTE, COMMUNICATION, OPTIMIZER, BACKWARD, FORWARD, INPUTS)


@dataclass(frozen=True)
class Resident:
    """What stays from one step to the next; gradients, all of them, from the backward to the optimizer."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class Moment:
    """When the peak is reached.

    Attributes:
        step: 1 or 2; in the second the optimizer's state exists.
        phase: initialisation, forward, backward, recompute or optimizer.
        module: name of the module at work, "loss", or "" outside of all.
        operation: what allocated the last bytes, e.g. aten::mm.
    """

    step: int
    phase: str
    module: str
    operation: str

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        return f"step {self.step}, {self.phase}{where} ({self.operation})"


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank over two training steps.

    Attributes:
        activations: bytes saved for the backward by module, at the moment when their sum is largest.
        transient: by kind in TRANSIENT; of the trace the largest number of bytes of each, not all at the same time, of
            the formula those at the peak.
        peak_bytes: the largest sum of all at one time, as the allocator counts it ("allocated").
        at_peak: what the peak is made of; sums to peak_bytes. Keys are the fields of Resident, "activations", and kinds
            of TRANSIENT. Gradients are those that exist at that moment.
        moment: when the peak is reached.
        reserved_bytes: what the caching allocator takes from the device; peak_bytes where nothing caches.
        not_included: one sentence for each thing that these numbers leave out.
    """

    rank: int
    world_size: int
    resident: Resident
    activations: Mapping[str, int]
    transient: Mapping[str, int]
    peak_bytes: int
    at_peak: Mapping[str, int]
    moment: Moment
    reserved_bytes: int
    not_included: tuple[str, ...] = ()
