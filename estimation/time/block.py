"""Seconds of the units of a stage (embedding, block, head with loss): from the list of operations that memory uses too.

A unit's seconds are kept by kind, forward and backward; the backward in two halves, for inputs and for weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from estimation.devices import Device
from estimation.job import Job
from estimation.program import Op, Shape, block_program, head_program
from estimation.tape import Mode, kept, recomputation
from estimation.time.network import Group, Network
from estimation.time.seconds import Seconds
from estimation.time.speed import EAGER_SHARE, FUSED_SHARE, Speed
from estimation.time.way import Way

PRODUCTS, ATTENTION, POINTWISE, LOSS = "matrix products", "attention", "memory-bound", "loss"
TENSOR, CONTEXT, RECOMPUTE = "tensor parallel (exposed)", "context parallel (exposed)", "recompute"
EXPOSED = (TENSOR, CONTEXT)
# The backward of flash attention makes five products where the forward makes two.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Unit:
    """Seconds of one micro-batch: the forward, and the backward for inputs (recomputation included) and for weights."""

    forward: Seconds
    inputs: Seconds
    weights: Seconds

    @cached_property
    def totals(self) -> tuple[float, float, float]:
        return self.forward.total, self.inputs.total, self.weights.total


_UNITS: dict[tuple[object, ...], Unit] = {}  # thousands of compositions share some hundred


@dataclass(frozen=True)
class Coster:
    """Puts seconds on the operations of a job."""

    job: Job
    way: Way
    speed: Speed
    network: Network

    @cached_property
    def shape(self) -> Shape:
        return self.job.shape

    def unit(self, name: str, mode: Mode) -> Unit:
        """The costs of a block, of the embedding, or of the head with the loss."""
        key = (self.shape, self.job.cp, self.way, self.speed.device, name, mode)
        if key not in _UNITS:
            _UNITS[key] = self._unit(name, mode)
        return _UNITS[key]

    def _unit(self, name: str, mode: Mode) -> Unit:
        if name == "embedding":
            return self._embedding()
        ops = block_program(self.shape) if name == "block" else head_program(self.shape)
        again = Seconds()
        if mode != "none":
            stored = kept(ops, mode)
            for op in recomputation(ops, self.shape.profile.early_stop):
                if op.output[0] not in stored:
                    again.add(_renamed(self._again(op, ops, mode)))
        forward = _sum(self._forward(op, ops) for op in ops)
        inputs = _sum(self._inputs(op, ops) for op in ops).add(again)
        weights = _sum(self._weights(op) for op in ops)
        if name == "head":
            made, undone = loss_traffic(self.shape)
            forward.add({LOSS: self.speed.moving(made)})
            inputs.add({LOSS: self.speed.moving(undone)})
            if self.shape.profile.is_linear:  # makes its gradients in the forward, chunk by chunk
                forward.add(weights).add(product := self._inputs(ops[-1], ops))
                inputs.add(product, -1)
                weights = Seconds()
        return Unit(forward, inputs, weights)

    # One operation

    def _forward(self, op: Op, ops: list[Op]) -> Seconds:
        if op.kind == "product":
            return Seconds({PRODUCTS: self._product(op), POINTWISE: self.speed.moving(self._casts(op)[0])})
        if op.kind == "attention":
            own = self._attend(op)
            return Seconds({ATTENTION: own, CONTEXT: self._ring(op, own, gradients=False)})
        if op.kind == "collective":
            return self._collective(op, ops, is_backward=False)
        return Seconds({POINTWISE: self._moving(op, traffic(op, self.shape)[0])})

    def _again(self, op: Op, ops: list[Op], mode: Mode) -> Seconds:
        """Recomputed. Compiled with the backward, the gate comes from the kernel that reads its inputs for that."""
        if op.name == "gate" and mode == "op" and self.shape.compiled:
            return Seconds({POINTWISE: self._moving(op, op.output[1])})
        return self._forward(op, ops)

    def _moving(self, op: Op, size: float) -> float:
        """Numbers of a compiled block are moved by kernels that inductor wrote, except complex ones."""
        is_complex = op.name in ("q", "k") and self.shape.profile.rope == "complex"
        return self.speed.moving(size, FUSED_SHARE if self.shape.compiled and not is_complex else EAGER_SHARE)

    def _inputs(self, op: Op, ops: list[Op]) -> Seconds:
        rows, inner, columns = self._sizes(op)
        if op.kind == "product":
            own = self.speed.product(rows, columns, inner, self.shape.number, is_float8=self._is_float8(op))
            casts, added = self.speed.moving(self._casts(op)[1]), self._moving(op, self._added(op, ops))
            return Seconds({PRODUCTS: own, POINTWISE: casts + added})
        if op.kind == "attention":
            own = self._attend(op, is_backward=True)
            return Seconds({ATTENTION: own, CONTEXT: self._ring(op, own, gradients=True)})
        if op.kind == "collective":
            return self._collective(op, ops, is_backward=True)
        return Seconds({POINTWISE: self._moving(op, traffic(op, self.shape)[1])})

    def _weights(self, op: Op) -> Seconds:
        if op.kind != "product":
            return Seconds()
        rows, inner, columns = self._sizes(op)
        number, is_float8 = self.shape.number, self._is_float8(op)
        return Seconds({PRODUCTS: self.speed.product(columns, rows, inner, number, is_float8=is_float8)})

    def _sizes(self, op: Op) -> tuple[int, int, int]:
        """Rows, inner size and columns of a product."""
        rows = self.shape.tokens
        columns = op.output[1] // (rows * self.shape.number)
        return rows, op.flops // (2 * rows * columns), columns

    def _product(self, op: Op) -> float:
        return self.speed.product(*self._sizes(op), self.shape.number, is_float8=self._is_float8(op))

    def _is_float8(self, op: Op) -> bool:
        return self.way.float8 and op.name != "out"  # the head stays in bf16

    def _casts(self, op: Op) -> tuple[float, float]:
        """Bytes moved to make float8 numbers of input and weight, and of the gradient (torchao, roofline_utils.py).

        A tensor is scaled by its largest number: compiled, the kernel before finds it, else one more kernel reads it.
        Two layouts are written. Weights that were cast before their gathering come in one of them.
        """
        if not self._is_float8(op):
            return 0.0, 0.0
        rows, inner, columns = self._sizes(op)
        one = 4 if self.shape.compiled else 6
        weight, again = (2, 2) if self.way.float8_gather else (8, 4)
        back = rows * columns * one + inner * columns * again * self.way.float8_again
        return rows * inner * one + inner * columns * weight, back

    def _added(self, op: Op, ops: list[Op]) -> float:
        """Bytes moved to add this product's gradient to those of others that read the same input.

        Compiled, both kernels of the norm before read all of them, for the gradients of its input and of its weight.
        """
        first = next(other for other in ops if other.kind == "product" and other.inputs == op.inputs)
        numbers = self._sizes(op)[0] * self._sizes(op)[1]
        fused = 2 if self.job.tp == 1 else 1
        return 0.0 if first is op else numbers * self.shape.number * (fused if self.shape.compiled else 3)

    def _attend(self, op: Op, *, is_backward: bool = False) -> float:
        job = self.job
        flops = op.flops * (ATTENTION_BACKWARD if is_backward else 1.0)
        length = job.seq_len // job.cp
        if self.shape.mask:
            flops *= 2  # a dense mask hides nothing from the kernel
        elif job.cp > 1 and not self.way.load_balance:
            flops *= (2 * job.cp - 1) / job.cp  # the last rank sees everything
        elif job.cp > 1:
            length //= 2
        return self.speed.attend(flops, length, self.shape.number, is_backward=is_backward)

    def _ring(self, op: Op, own: float, *, gradients: bool) -> float:
        """What attention on one part at a time does not hide of keys and values on their way (and their gradients)."""
        job = self.job
        if job.cp == 1 or job.documents:
            return 0.0
        keys = max(job.model.n_kv_heads // job.tp, 1) * job.model.head_dim
        size = 2 * self.shape.tokens * keys * self.shape.number * (2 if gradients else 1)
        if self.way.rotate == "allgather" and not gradients:
            return max(0.0, self.network.gather(size * job.cp, self.context) - own / job.cp)
        return (job.cp - 1) * max(0.0, self.network.send(size, job.tp) - own / job.cp)

    @cached_property
    def context(self) -> Group:
        return Group(self.job.cp, self.job.tp)

    def _collective(self, op: Op, ops: list[Op], *, is_backward: bool) -> Seconds:
        """Tensor parallel: exposed, unless asynchronous; the backward of a gathering is a scattering."""
        if op.name.endswith("everywhere"):
            return self._everywhere(op)
        tp = self.job.tp
        is_gather = op.name.endswith("gathered") != is_backward
        size = op.moved * tp / (tp - 1)
        if is_gather and self.way.float8 and "norm" not in op.name:
            size /= 2  # cast before it is sent
        seconds = self.network.gather(size, Group(tp, 1))
        # Sequences are copied to and from messages; operators that work chunk by chunk need no copies.
        copies = self.speed.moving(2 * op.temporary[is_backward] * (size / (op.moved * tp / (tp - 1))))
        if self.way.async_tensor and not (is_backward and not is_gather):
            # A chunk is on its way while products work on another; sums of several products are not cut into chunks.
            near = [o for o in ops if o.kind == "product" and (op.output[0] in o.inputs or o.output[0] in op.inputs)]
            seconds = max(0.0, seconds - sum(map(self._product, near)) * (tp - 1) / tp)
            # The parts of all ranks are written first, then added by a kernel of its own.
            copies = 0.0 if is_gather else self.speed.moving(2 * self.shape.wide + self.shape.hidden)
        return Seconds({TENSOR: seconds, POINTWISE: copies})

    def _everywhere(self, op: Op) -> Seconds:
        """Keys or values of all ranks: gathered, put in the order of the sequence, heads repeated; the backward undoes
        it all. Compiled, one kernel does the last two."""
        whole, made = op.moved * self.job.cp / (self.job.cp - 1), op.output[1]
        in_order = 2 * whole if made > whole and not self.shape.compiled else 0
        moved = self.speed.moving(in_order + whole + made)
        return Seconds({CONTEXT: self.network.gather(whole, self.context), POINTWISE: moved})

    def _embedding(self) -> Unit:
        shape, job = self.shape, self.job
        table = -(-shape.model.vocab_size // job.tp) * shape.model.dim * shape.number
        exposed = self.network.gather(shape.wide, Group(job.tp, 1))
        forward = Seconds({POINTWISE: self.speed.moving(2 * shape.wide), TENSOR: exposed})
        weights = Seconds({POINTWISE: self.speed.moving(table + 3 * shape.wide), TENSOR: exposed})
        return Unit(forward, Seconds(), weights)


def coster_of(job: Job, way: Way, device: Device) -> Coster:
    return Coster(job, way, Speed(device, way.attention), Network(device))


def traffic(op: Op, shape: Shape) -> tuple[float, float]:
    """Bytes that a memory-bound operation reads and writes, forward and backward.

    Per number of the output, by the kernels that PyTorch runs: compiled, silu is part of the gate, and the sum that the
    second norm reads is never written: whoever needs it reads its two parts. A norm's backward is two kernels, along
    rows and along columns. Inductor has no complex numbers: those of rotary positions stay torch's own kernels.
    Attention makes numbers of a mask, in every block; without context parallelism the block makes the mask too, and
    cuts it to what is causal.
    """
    e, numbers = shape.number, op.output[1] // shape.number
    if op.name == "attention rows":  # copied into the order that the next product reads
        return numbers * 2 * e, 0.0
    if op.name.endswith("heads"):  # reads each key head once
        share = 1 + shape.model.n_kv_heads / shape.model.n_heads
        return numbers * e * share, numbers * e * share
    kind = "norm" if op.extra else "rotate" if op.name in ("q", "k") else op.name.split()[0]
    is_first = op.name == "residual 1"
    rotate = {"halves": 40 + 2 * e, "complex": 16 + 2 * e}[shape.profile.rope]
    in_kernel = 2 * e if shape.profile.rope == "halves" else rotate
    fused = {
        "norm": (2 * e, 6 * e), "rotate": (in_kernel, in_kernel), "silu": (0, 0), "gate": (3 * e, 5 * e),
        "residual": (e, 2 * e) if is_first else (4 * e, 0), "mask": (1 + e, 0),
    }  # fmt: skip
    norm = {
        "fused": (2 * e, 5 * e), "python": (28 + 4 * e, 84 + 8 * e), "composite": (36 + 2 * e, 100 + 2 * e),
    }[shape.profile.norm]  # fmt: skip
    eager = {
        "norm": norm, "rotate": (rotate, rotate), "silu": (2 * e, 3 * e), "gate": (3 * e, 6 * e),
        "residual": (3 * e, 3 * e), "mask": (1 + e if shape.cp > 1 else 4 + e, 0),
    }  # fmt: skip
    forward, backward = (fused if shape.compiled else eager)[kind]
    return numbers * forward, numbers * backward


def loss_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes of the cross entropy, forward and backward: compiled, two passes over the logits and one that replaces
    them; else a cast, the logarithm of the softmax, a gradient of zeros with ones, its backward, a cast. torch's kernel
    reads a row three times forward, and its gradient twice backward (aten/src/ATen/native/cuda/SoftMax.cu). A linear
    loss has all of it in the forward, adds up the table's gradient in fp32, and scales gradients in the backward."""
    numbers, e, profile = shape.logits // shape.number, shape.number, shape.profile
    if profile.is_linear:
        tokens, rows = shape.in_loss
        table = rows * shape.model.dim
        softmax = 4 * e if profile.loss == "linear compiled" else 2 * (4 + e)
        return numbers * softmax + profile.loss_chunks * table * (8 + e), 2 * e * (table + tokens * shape.model.dim)
    if shape.profile.loss == "compiled":
        return numbers * 2 * e, numbers * 2 * e
    cast = 4 + e if e < 4 else 0
    return numbers * (cast + 16), numbers * (4 + 16 + cast)


def _sum(parts: Iterable[Seconds]) -> Seconds:
    total = Seconds()
    for part in parts:
        total.add(part)
    return total


def _renamed(again: Seconds) -> Seconds:
    """What is computed again is recompute, whatever it is; communication stays what it is."""
    total = Seconds()
    for kind, seconds in again.items():
        total.add({kind if kind in EXPOSED else RECOMPUTE: seconds})
    return total
