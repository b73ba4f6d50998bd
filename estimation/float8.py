"""Float8 linear layers in the list of operations: what torchao casts, keeps, and needs while it casts and multiplies.

Source: torchao 0.18, float8_linear.py (matmul_with_hp_or_float8_args), float8_ops.py (float8_mm) and
float8_tensor_parallel.py. A float8 number is a byte. Letters as in program.py; N columns of a product.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from estimation.program import Op, Shape
from titan_like.config.schema import Config
from titan_like.models.flavors import ModelConfig
from titan_like.quantize.layers import CUT_BY_COLUMNS, float8_plan

CUT = {name.rpartition(".")[2] for name in CUT_BY_COLUMNS}
READERS = {"n1": ("wq", "wk", "wv"), "n2": ("w1", "w3")}  # products by the norm that they read


@dataclass(frozen=True)
class Float8:
    """How a run casts.

    Attributes:
        layers: of each layer the names of its products in float8, as in program.py.
        gathered: FSDP2 casts weights before it gathers them; found: their scales are known before.
        emulated: products of fp32 copies.
    """

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
    layers: tuple[frozenset[str], ...]
    gathered: bool = False
    emulated: bool = False


def float8_of(model: ModelConfig, config: Config) -> Float8 | None:
    """What a checked config asks for; None: nothing."""
    if not config.float8.enable:
        return None
    layers: list[set[str]] = [set() for _ in range(model.n_layers)]
    for name in float8_plan(model, config).converted:
        _, layer, _, product = name.split(".")
        layers[int(layer)].add(product)
    settings = config.float8
    return Float8(
        settings.recipe, tuple(map(frozenset, layers)), settings.enable_fsdp_float8_all_gather, settings.emulate
    )


def cast_products(ops: Iterable[Op], shape: Shape, float8: Float8, names: frozenset[str]) -> list[Op]:
    """`ops` of a block with the products `names` in float8."""
    return list(_Block(shape, float8, names).cast(list(ops)))


@dataclass(frozen=True)
class _Block:
    shape: Shape
    float8: Float8
    names: frozenset[str]

    @property
    def _travels(self) -> bool:
        """Tensor-parallel ranks scale together, and send float8 numbers."""
        return self.shape.tp > 1 and self.float8.recipe == "tensorwise"

    def _cast(self, numbers: int) -> int:
        """Bytes at most while `numbers` are cast: a scaled fp32 copy, another within bounds, and the result."""
        return 9 * numbers

    def cast(self, ops: list[Op]) -> Iterator[Op]:
        sent = {norm for norm, readers in READERS.items() if self._travels and self.names.issuperset(readers)}
        for op in ops:
            norm, _, gathered = op.name.partition(" ")
            if norm in sent and gathered == "gathered":
                yield self._gather(op)
            elif self._travels and gathered == "scattered" and norm in self.names:
                yield self._scatter(op)
            elif op.kind == "product" and op.name in self.names:
                yield from self._product(op, is_sent=op.inputs[0].partition(" ")[0] in sent)
            else:
                yield op

    def _gather(self, op: Op) -> Op:
        """A rank's part is cast, then sent; the gradients of all readers are numbers of the compute dtype."""
        size = op.output[1]
        numbers = size // self.shape.number
        part = numbers // self.shape.tp
        temporary = (self._send(part) - numbers, op.temporary[1])
        return replace(op, output=(op.output[0], numbers), gradient=size, temporary=temporary)

    def _scatter(self, op: Op) -> Op:
        """The gradient of its result is cast, then sent."""
        part = op.output[1] // self.shape.number
        return replace(op, temporary=(op.temporary[0], self._send(part) - part * self.shape.tp))

    def _send(self, part: int) -> int:
        """Bytes at most while a rank's part is cast and sent to all; several sequences are copied from the message."""
        return max(self._cast(part), part + part * self.shape.tp * (1 + (self.shape.rows > 1)))

    def _product(self, op: Op, *, is_sent: bool) -> Iterator[Op]:
        """Operands are cast, and multiplied; whoever sends the input has cast it, and FSDP2 the gathered weight."""
        T, e = self.shape.tokens, self.shape.number
        N = op.output[1] // (T * e)
        D = op.weight // (N * e)
        source = op.inputs[0]
        is_early = self._travels and not is_sent  # the input is cast once, and kept in float8
        if is_early:
            size = T * D
            yield Op(f"{op.name} input", (source,), (f"{op.name} input", size), passes=True, gradient=T * D * e,
                     temporary=(self._cast(size) - size, 0))  # fmt: skip
            source = f"{op.name} input"
        has_input, has_weight = is_sent or is_early, self.float8.gathered
        held = T * D * (not has_input) + D * N * (not has_weight)
        most = max(self._cast(T * D) * (not has_input), T * D * (not has_input) + self._cast(D * N) * (not has_weight))
        operands = f"{op.name} operands"
        if scales := T * (not has_input) + N * (not has_weight) if self.float8.recipe != "tensorwise" else 0:
            yield Op(f"{op.name} scales", (), (f"{op.name} scales", scales * e), keep=True, reads=(source,))
        yield Op(operands, (source,), (operands, held), passes=True, gradient=T * D * e, temporary=(most - held, 0))
        made = op.name if not op.bias else f"{op.name} product"
        is_narrow = self._travels and op.name in CUT  # its gradient comes in float8
        work = self._multiply(T, D, N, is_fast=True) - op.output[1]
        back = self._backward(T, D, N, has_input, has_weight, is_narrow)
        gradient = T * N if is_narrow else op.output[1]
        yield replace(
            op, inputs=(operands,), output=(made, op.output[1]), saves=(source,),
            gradient=gradient, custom=True, temporary=(work, back - T * D * e - op.weight),
        )  # fmt: skip
        if op.bias:
            yield Op(f"{op.name} sum", (made,), op.output, passes=True)

    def _multiply(self, rows: int, inner: int, columns: int, *, is_fast: bool) -> int:
        """Bytes at most beside the operands, the result included."""
        e, result = self.shape.number, rows * columns
        left, right = rows * inner, inner * columns
        if self.float8.emulated:
            return max(8 * left, 4 * left + 8 * right, 4 * (left + right + result), (4 + (e < 4) * e) * result)
        if self.float8.recipe == "tensorwise":
            return e * result
        scales = 0 if is_fast else 4 * result  # applied after a product without them
        return scales + (2 + (e == 4) * e) * result

    def _backward(self, T: int, D: int, N: int, has_input: bool, has_weight: bool, is_narrow: bool) -> int:
        """Bytes at most beside the gradient of the result, those of input and weight included."""
        e, wide = self.shape.number, 0 if is_narrow else T * N * self.shape.number
        is_cast = self._travels  # the gradient, before the function that multiplies
        gradient = 0 if is_narrow else T * N
        freed = wide if is_cast else 0
        phases = [0 if is_narrow else self._cast(T * N) + freed]
        weight = 0 if has_weight else D * N
        phases.append(0 if has_weight else gradient + self._cast(D * N))
        phases.append(gradient + weight + D * N + self._multiply(T, N, D, is_fast=False))
        held = gradient + weight + T * D * e
        if self.float8.recipe == "rowwise_with_gw_hp":
            return max(*phases, held + D * N * e)
        if not is_cast:  # along the other dim
            phases.append(held + self._cast(T * N))
            held += T * N
        if not has_input:
            phases.append(held + self._cast(T * D))
            held += T * D
        phases.append(held + T * N + T * D + self._multiply(N, T, D, is_fast=False))
        return max(phases) - freed
