"""The operations of a decoder as data: what each makes, keeps for its backward, and costs.

Sizes are bytes, of one rank and one micro-batch. Letters: T tokens of this rank, D model, Q = query heads x head size,
K = key heads x head size, F hidden units, V vocabulary, t = tensor-parallel degree, e bytes of a number in compute.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from estimation.profiles import Profile
from estimation.ring import Ring
from titan_like.models.flavors import ModelConfig

PRODUCTS = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")  # of a block, in their order
KEYS, LONGEST = 128, 2048  # of a CPU's attention: models/documents.py has the same, but loads torch
Kind = Literal["product", "attention", "pointwise", "collective"]


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        inputs: differentiable inputs; `reads`: others.
        output: its result; (name, bytes).
        saves: tensors that the backward needs.
        extra: tensors made only for the backward; (name, bytes).
        temporary: largest sum of bytes that live only while it runs: forward, backward; in blocks of `piece` bytes.
        weight, bias: bytes of the gradients of its weight and its bias.
        keep: recompute per operation keeps the output (and the extras).
        passes: the gradient of the output is that of every input, without a copy.
        gradient: bytes of the gradient of the output, where they are not those of the output.
        held: bytes that a backward for inputs leaves for its weight, where they are not the gradient of the output.
        custom: an autograd function in Python: the gradients of input and weight are made together, whichever is asked
            for, and what it saves is noted when it has run.
        flops: floating-point operations of the forward; moved: bytes read and written, or sent by a collective.
    """

    name: str
    inputs: tuple[str, ...]
    output: tuple[str, int]
    saves: tuple[str, ...] = ()
    extra: tuple[tuple[str, int], ...] = ()
    temporary: tuple[int, int] = (0, 0)
    piece: int = 0
    weight: int = 0
    bias: int = 0
    keep: bool = False
    passes: bool = False
    gradient: int = 0
    held: int = 0
    custom: bool = False
    kind: Kind = "pointwise"
    flops: int = 0
    moved: int = 0
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """What one rank computes on: a micro-batch's part of a model's part."""

    model: ModelConfig
    rows: int  # sequences of a micro-batch
    seq_len: int
    tp: int = 1
    cp: int = 1
    number: int = 2  # bytes of a number in compute
    documents: bool = False
    compiled: bool = False
    rotate: str = "allgather"  # how ring attention moves keys and values
    balanced: bool = True  # and whether each rank holds an early and a late part of a sequence
    profile: Profile = field(default_factory=lambda: Profile("titan_like", ""))

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len // self.cp

    @property
    def wide(self) -> int:
        """Bytes of a (T, D) tensor that every rank of the tensor-parallel group holds whole."""
        return self.tokens * self.model.dim * self.number

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states between blocks, cut along the sequence by tensor parallelism."""
        return self.wide // self.tp

    @property
    def mask(self) -> int:
        """Numbers of the document mask that attention reads as a tensor, (B, 1, S / cp, S); 0: there is none."""
        is_dense = self.cp > 1 or (self.number == 4 and self.profile.gpu)
        return self.tokens * self.seq_len if self.documents and is_dense else 0

    @property
    def in_loss(self) -> tuple[int, int]:
        """(tokens, rows of the head's table) of this rank's logits."""
        if self.profile.loss_parallel:
            return self.tokens, -(-self.model.vocab_size // self.tp)
        return self.tokens // self.tp if self.profile.is_linear else self.tokens, self.model.vocab_size

    @property
    def logits(self) -> int:
        """Bytes of this rank's logits, were they whole, in the compute dtype."""
        tokens, rows = self.in_loss
        return tokens * rows * self.number


def block_program(shape: Shape, float8: Collection[str] = (), cast: Callable[[list[Op]], list[Op]] = list) -> list[Op]:
    """The operations of one transformer block in their order; input "x", output "out".

    Args:
        float8: the products in float8; `cast`: puts them in it.
    """
    keep = kept_products(shape, float8)
    ops = [*_norm(shape, "n1", "x", shape.tokens // shape.tp, shape.model.dim, shape.model.dim)]
    source = _gather(shape, ops, "n1")
    ops += _attention(shape, source, keep)
    last = _scatter(shape, ops, "wo")
    _hold(shape, ops, "n1", "q", "k", "wv")
    ops.append(Op("residual 1", ("x", last), ("h", shape.hidden), passes=True, moved=3 * shape.hidden))
    ops += _norm(shape, "n2", "h", shape.tokens // shape.tp, shape.model.dim, shape.model.dim)
    source = _gather(shape, ops, "n2")
    ops += _feed_forward(shape, source, keep)
    last = _scatter(shape, ops, "w2")
    _hold(shape, ops, "n2", "h")
    ops.append(Op("residual 2", ("h", last), ("out", shape.hidden), passes=True, moved=3 * shape.hidden))
    return _fused(cast(ops)) if shape.compiled else cast(ops)


def _hold(shape: Shape, ops: list[Op], *names: str) -> None:
    """What the arguments and variables of Python's functions hold to the last operation inside."""
    if not shape.compiled:
        ops[-1] = _with(ops[-1], reads=names)


def kept_products(shape: Shape, float8: Collection[str] = ()) -> set[str]:
    """What recompute per operation keeps: every second product.

    A product with a bias is another operation (addmm), neither counted nor kept; in float8 the bias is added after it.
    """
    biased = ("wq", "wk", "wv") if shape.model.qkv_bias else ()
    counted = [name for name in PRODUCTS if name in float8 or name not in biased]
    return set(counted[{"even": 1, "odd": 0}[shape.profile.kept_products] :: 2])


def kept_results(shape: Shape, float8: Collection[str] = ()) -> set[str]:
    """And of what else a block makes: sums over tensor-parallel ranks, and of attention, where a profile names it."""
    sums = {"wo scattered", "w2 scattered"} if shape.tp > 1 else set()
    return kept_products(shape, float8) | sums | ({"attention"} if shape.profile.keeps_attention else set())


def _product(
    shape: Shape, name: str, source: str, rows: int, columns: int, keep: Collection[str] = (), *, bias: bool = False
) -> Op:
    """T x rows times rows x columns."""
    out, weight = shape.tokens * columns * shape.number, rows * columns * shape.number
    moved = shape.tokens * rows * shape.number + weight + out
    return Op(
        name, (source,), (name, out), (source,), weight=weight, bias=bias * columns * shape.number, keep=name in keep,
        kind="product", flops=2 * shape.tokens * rows * columns, moved=moved,
    )  # fmt: skip


def _norm(shape: Shape, name: str, source: str, rows: int, width: int, weight: int) -> list[Op]:
    size = rows * width * shape.number
    scale = (f"{name}.rstd", rows * 4)
    if shape.profile.norm == "fused" or shape.compiled:
        return [
            Op(
                name,
                (source,),
                (name, size),
                (source, scale[0]),
                (scale,),
                weight=weight * shape.number,
                moved=3 * size,
            )
        ]
    wide = rows * width * 4
    if shape.number == 4:  # the input is its own fp32 copy
        extra = [scale, (f"{name}.normed", wide)]
        saves, copies = [source], (1, 2)
    else:  # "python": the trainer's own class rounds the normed input before the weight
        extra = [scale, (f"{name}.wide", wide), (f"{name}.normed", size if shape.profile.norm == "python" else wide)]
        saves, copies = [], (1, 3)
    saves += [key for key, _ in extra]
    temporary = (copies[0] * wide, copies[1] * wide)
    gradient, held = weight * shape.number, 0 if shape.number == 4 else wide
    return [
        Op(name, (source,), (name, size), tuple(saves), tuple(extra), temporary, wide, gradient, held=held,
           moved=5 * size)
    ]  # fmt: skip


def _gather(shape: Shape, ops: list[Op], source: str) -> str:
    """Tensor parallelism: all positions before the products that are cut by columns. A message has the ranks' parts one
    after the other: sequences are copied to it, and from it where there are several."""
    if shape.tp == 1:
        return source
    name = f"{source} gathered"
    sent = shape.wide * (shape.tp - 1) // shape.tp
    ops.append(
        Op(name, (source,), (name, shape.wide), temporary=(shape.wide * (shape.rows > 1), shape.wide),
           kind="collective", moved=sent)
    )  # fmt: skip
    return name


def _scatter(shape: Shape, ops: list[Op], source: str) -> str:
    """Tensor parallelism: the sum over ranks of a product cut by rows, each rank keeping its part of the sequence."""
    if shape.tp == 1:
        return source
    name = f"{source} scattered"
    sent = shape.wide * (shape.tp - 1) // shape.tp
    ops.append(
        Op(name, (source,), (name, shape.hidden), temporary=(shape.wide, shape.wide * (shape.rows > 1)), keep=True,
           kind="collective", moved=sent)
    )  # fmt: skip
    return name


def _rotate(shape: Shape, name: str, source: str, numbers: int) -> Op:
    """Rotary positions: fp32 pieces, of which the largest set lives while they are put together."""
    size, wide = numbers * shape.number, numbers * 4
    copies = 0 if shape.number == 4 else 1
    pieces = {"halves": 2 + copies, "complex": 1 + copies}[shape.profile.rope]
    # In the backward as many; the gradients on both sides are there before and after them, not beside them all.
    back = pieces - 1 if shape.profile.rope == "halves" else pieces
    return Op(name, (source,), (name, size), temporary=(pieces * wide, back * wide), piece=wide, moved=2 * size)


def _attention(shape: Shape, source: str, keep: Collection[str]) -> list[Op]:
    m, T, e = shape.model, shape.tokens, shape.number
    heads, keys = m.n_heads // shape.tp, max(m.n_kv_heads // shape.tp, 1)
    Q, K = heads * m.head_dim, keys * m.head_dim
    sizes = {"wq": Q, "wk": K, "wv": K}
    ops = [_product(shape, name, source, m.dim, n, keep, bias=m.qkv_bias) for name, n in sizes.items()]
    q, k = "wq", "wk"
    if m.qk_norm:
        ops += _norm(shape, "q norm", q, T * heads, m.head_dim, m.head_dim)
        ops += _norm(shape, "k norm", k, T * keys, m.head_dim, m.head_dim)
        _hold(shape, ops, q)
        q, k = "q norm", "k norm"
    ops += [_rotate(shape, "q", q, T * Q), _rotate(shape, "k", k, T * K)]
    _hold(shape, ops, q)
    k, v = "k", "wv"
    if keys < heads and shape.cp == 1:
        for name, of in (("k heads", k), ("v heads", v)):
            ops.append(Op(name, (of,), (name, T * Q * e), moved=2 * T * Q * e))
        k, v = "k heads", "v heads"
    ops += _gathered_keys(shape, k, v, T * K * e) if shape.cp > 1 and shape.documents else []
    if shape.cp > 1 and shape.documents:
        k, v = "k everywhere", "v everywhere"
    if shape.mask:
        ops.append(_mask(shape))
    is_ring = shape.cp > 1 and not shape.documents
    flops = 4 * T * shape.seq_len * Q // 2
    ops.append(Op(
        "attention", ("q", k, v), ("attention", T * Q * e),
        ("q", k, v, "attention", "logsumexp", *(["mask"] if shape.mask else [])),
        (("logsumexp", T * heads * 4),), attention_work(shape),
        keep=shape.profile.keeps_attention, kind="attention", flops=flops, moved=4 * T * Q * e,
        reads=("mask",) if shape.mask else (),
    ))  # fmt: skip
    if is_ring:  # its result lies head by head
        ops.append(
            Op("attention rows", ("attention",), ("attention rows", T * Q * e), passes=True, moved=2 * T * Q * e)
        )
    ops.append(_product(shape, "wo", "attention rows" if is_ring else "attention", Q, m.dim, keep))
    return ops


def attention_work(shape: Shape) -> tuple[int, int]:
    """Bytes that attention holds beside its results: forward, backward."""
    heads, keys = shape.model.n_heads // shape.tp, max(shape.model.n_kv_heads // shape.tp, 1)
    numbers = shape.tokens * shape.model.head_dim
    q, k = numbers * heads * shape.number, numbers * keys * shape.number
    if shape.cp > 1:
        return (0, 0) if shape.documents else Ring(
            q, k, shape.number, shape.cp, shape.rotate == "allgather", shape.balanced,
            repeats=keys < heads, copies=keys > 1, copies_queries=heads > 1,
        ).work  # fmt: skip
    if shape.profile.gpu:
        return 0, 0
    # A CPU has one call per document, at most a row, whose results go to their place; in the backward one per piece.
    row, scale = q // shape.rows, shape.tokens * heads * 4 // shape.rows
    if shape.number != 4 or not KEYS < shape.seq_len <= LONGEST:
        return row + scale, 3 * row + scale
    return row + scale, row + 2 * row * KEYS // shape.seq_len + scale + shape.seq_len * KEYS * 4


def _mask(shape: Shape) -> Op:
    """Attention adds its mask: a block makes numbers of the bool mask, and without context parallelism that one too."""
    size = shape.mask * shape.number
    bools = shape.mask if shape.cp > 1 else 2 * shape.mask
    return Op("mask", (), ("mask", size), temporary=(bools, 0), piece=shape.mask, moved=2 * size)


def _gathered_keys(shape: Shape, k: str, v: str, size: int) -> list[Op]:
    """Document masks with context parallelism: keys and values of all ranks, each head repeated."""
    groups = shape.model.n_heads // shape.model.n_kv_heads
    whole, sent = size * shape.cp * groups, size * (shape.cp - 1)
    return [
        Op(f"{name} everywhere", (of,), (f"{name} everywhere", whole), kind="collective", moved=sent,
           temporary=(size * shape.cp if groups > 1 else 0, size * shape.cp))
        for name, of in (("k", k), ("v", v))
    ]  # fmt: skip


def _feed_forward(shape: Shape, source: str, keep: Collection[str]) -> list[Op]:
    units = shape.model.ffn_dim // shape.tp
    size = shape.tokens * units * shape.number
    return [
        _product(shape, "w1", source, shape.model.dim, units, keep),
        Op("silu", ("w1",), ("silu", size), ("w1",), moved=2 * size),
        _product(shape, "w3", source, shape.model.dim, units, keep),
        Op("gate", ("silu", "w3"), ("gate", size), ("silu", "w3"), moved=3 * size),
        _product(shape, "w2", "gate", units, shape.model.dim, keep),
    ]


def _fused(ops: list[Op]) -> list[Op]:
    """Compiled, silu is a part of the gate; for the memory of a compiled block see compiled_block.py."""
    return [
        _with(op, inputs=("w1", "w3"), saves=("w1", "w3")) if op.name == "gate" else op
        for op in ops
        if op.name != "silu"
    ]


def _with(op: Op, **changes: Any) -> Op:
    return replace(op, **changes)


def last_norm_program(shape: Shape) -> list[Op]:
    """What comes before a loss that has the head's product in it; input "x", output "out"."""
    ops, _ = _last_norm(shape)
    return [*ops[:-1], _with(ops[-1], output=("out", ops[-1].output[1]))]


def _last_norm(shape: Shape) -> tuple[list[Op], str]:
    """Its operations, and the name of its result; gathered, but where each rank has the logits of its own tokens.

    This trainer compiles blocks alone."""
    m, rows = shape.model, shape.tokens // shape.tp
    alone = replace(shape, compiled=shape.compiled and not shape.profile.is_linear)
    ops = _norm(alone, "norm", "x", rows, m.dim, m.dim)
    stays = shape.profile.is_linear and not shape.profile.loss_parallel
    return ops, "norm" if stays else _gather(shape, ops, "norm")


def head_program(shape: Shape) -> list[Op]:
    """The last norm and the head; input "x", output "out": the logits."""
    m = shape.model
    ops, source = _last_norm(shape)
    columns = -(-m.vocab_size // shape.tp)
    product = _product(shape, "out", source, m.dim, columns)
    if shape.profile.is_linear:  # as many logits on each rank, whichever dim is cut
        return [*ops, product]
    if shape.tp > 1 and not shape.profile.loss_parallel:
        ops.append(_with(product, output=("own logits", product.output[1])))
        sent = shape.logits * (shape.tp - 1) // shape.tp
        return [*ops, Op("logits gathered", ("own logits",), ("out", shape.logits), kind="collective", moved=sent)]
    return [*ops, product]
