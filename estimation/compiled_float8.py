"""A compiled block in float8: the casts around the products of compiled_block.py. Letters as there; N columns of a
product.

Read from what torch 2.13 writes for a CPU of torchao 0.18's layers. A float8 number is a byte; where products are
emulated inductor writes what they read as fp32 at once.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from estimation.compiled_block import CompiledBlock
from estimation.float8 import READERS, Float8
from estimation.inductor import Kernel, Size, collective, fused
from estimation.program import Shape
from estimation.tape import Mode

LAYER = {  # by the product of the backward that reads its weight
    "d gate": "w2", "d n2": "w3", "d n2 too": "w1", "d attention": "wo",
    "d n1 of v": "wv", "d n1 of k": "wk", "d n1 of q": "wq",
}  # fmt: skip
CASTS = (" row", " column", " input", " weight", " early", " back")


class Float8Block(CompiledBlock):
    """As CompiledBlock, the products `names` in float8.

    A layer's operands are called "... input" and "... weight", the gradient of its result "... row" for the gradient of
    the input and "... column" (it lies the other way) for that of the weight.
    """

    def __init__(self, shape: Shape, keep: Iterable[str], float8: Float8, names: frozenset[str]) -> None:
        super().__init__(shape, keep)
        self.float8, self.names = float8, names
        self.is_hp = float8.recipe == "rowwise_with_gw_hp"
        self.cast = 4 if float8.emulated else 1
        # Scaled by rows, products have results of 16 bits, and these are what is read and kept.
        self.result = 4 if float8.emulated else 2 if float8.recipe != "tensorwise" else shape.number
        self.is_tensorwise = float8.recipe == "tensorwise"
        m, t = shape.model, shape.tp
        Q, K, F = m.n_heads * m.head_dim // t, max(m.n_kv_heads // t, 1) * m.head_dim, m.ffn_dim // t
        self.sides = {
            "wq": (m.dim, Q), "wk": (m.dim, K), "wv": (m.dim, K), "wo": (Q, m.dim),
            "w1": (m.dim, F), "w3": (m.dim, F), "w2": (F, m.dim),
        }  # fmt: skip
        # Norms that are only cast are computed where they are; so is the gate in the backward.
        of = {**(READERS if t == 1 else {}), "attention rows": ("wo",)}
        self.unmade = {name for name in of if names.issuperset(of[name]) and not self.is_hp}
        self.reads = {"n1": ("x", "n1.rstd"), "n2": ("x", self.wo, "n2.rstd"), "attention rows": ("attention",)}

    def forward(self, mode: Mode) -> list[Kernel]:
        program = list(self._cast(super().forward(mode), self._rounded(mode)))
        return [*program, *self._columns()] if self._has_columns else program

    @property
    def _has_columns(self) -> bool:
        """With tensor parallelism weights and gathered inputs are kept as they are cast, lying the other way. (It is
        not compiled with recompute per operation.)"""
        return self.shape.tp > 1

    def _is_column(self, source: str) -> bool:
        """Whether nobody but products in float8 reads it."""
        return not self.is_hp and self.names.issuperset(READERS[source.partition(" ")[0]])

    def _columns(self) -> list[Kernel]:
        numbers = self.wide[0]
        gathered = [n for n in (self.n1, self.n2) if self._is_column(n)]
        return [
            *(fused(f"{n} column", (numbers, 1), n) for n in gathered),
            *(fused(f"{n} weight column", (self.sides[n][0] * self.sides[n][1], 1)) for n in sorted(self.names)),
        ]  # fmt: skip

    def backward(self, mode: Mode) -> list[Kernel]:
        program = list(self._cast(super().backward(mode), self._rounded(mode)))
        if mode == "op" or self.shape.tp > 1 or self.float8.emulated != self.is_hp or self.float8.recipe == "rowwise":
            return program
        # What the backward is given is cast at once.
        early = [kernel for kernel in program if self._is_early(kernel)]
        return [*early, *(kernel for kernel in program if kernel not in early)]

    def _is_early(self, kernel: Kernel) -> bool:
        name = next(iter(kernel.makes), "")
        return name.endswith(" weight back") or name == "wo input back"

    def _units_backward(self, mode: Mode) -> list[Kernel]:
        program = super()._units_backward(mode)
        if not self.names.issuperset(("w1", "w3")):
            gate = [fused("gate", self.units, "w1", "w3")] if mode != "op" and self._is_gate_cast else []
            return [*gate, *program]
        names = [next(iter(kernel.makes)) for kernel in program]
        start = min(names.index("d gate"), names.index("gradient of w2") if mode != "op" else len(names))
        given, after = dict(zip(names, program, strict=True)), program[names.index("d n2 too") + 1 :]
        if self.is_hp:
            units = self._units_emulated if self.float8.emulated else self._units_twice
            return [*program[:start], *units(mode, given), *after]
        first = given["d gate"], given["gradient of w2"]
        last = given["gradient of w3"], given["gradient of w1"]
        again = [self._input_back("w1", self.n2)] if mode == "op" and self.float8.emulated else []
        return [*program[:start], *again, *self._units_cast(mode, *first), *after, *last]

    @property
    def _is_gate_cast(self) -> bool:
        return "w2" in self.names and not self.is_hp

    def _units_twice(self, mode: Mode, given: dict[str, Kernel]) -> list[Kernel]:
        """Gradients of both units are kept and cast."""
        F, d_gate, w2 = self.units, given["d gate"], given["gradient of w2"]
        rows = [self._gradient("w3", "row", "d w3"), self._gradient("w1", "row", "d w1")]
        if mode == "op":
            gate = [fused("silu", F, "w1"), fused("gate", F, "silu", "w3")]
            over = fused("d w1", F, "w1", "d gate", "w3", over="w3")
            first = [d_gate, *gate, w2, fused("d w3", F, "silu", "d gate"), over, *rows]
        else:
            first = [w2, d_gate, given["d w3"], *rows]
        (w3, of_w3), (w1, of_w1) = self._weight_back("w3"), self._weight_back("w1")
        return [
            *first,
            *w3, *self._result("d n2", ("w3 row", of_w3), self.wide), given["gradient of w3"],
            *w1, *self._result("d n2 too", ("w1 row", of_w1), self.wide), given["gradient of w1"],
        ]  # fmt: skip

    def _units_emulated(self, mode: Mode, given: dict[str, Kernel]) -> list[Kernel]:
        """Gradients of weights are products of whole numbers, which come first."""
        F, read = self.units, ("w1", "d gate", "w3")
        gate = [fused("gate", F, *read)] if mode == "op" else []
        w2, (weights, weight) = given["gradient of w2"], self._weight_back("w1")
        return [
            *([] if gate else [w2]), given["d gate"], *gate,
            fused("d w3", F, *read), fused("d silu", (F[0], 4), *read), fused("d w1", F, *read),
            *([w2] if gate else []), given["gradient of w1"], given["gradient of w3"],
            self._gradient("w1", "row", "w1", "w3", "d silu"), *weights,
            *self._result("d n2 too", ("w1 row", weight), self.wide), given["d n2"],
        ]  # fmt: skip

    def _units_cast(self, mode: Mode, d_gate: Kernel, w2: Kernel) -> list[Kernel]:
        """Gradients of both units are cast where they are made, with the gate."""
        F, at_once, late = self.units, ("w1", "w3", "d gate"), mode == "op"
        is_silu = self.is_tensorwise or self.float8.emulated or not self._is_gate_cast
        fp32 = [fused("d silu", (F[0], 4), *at_once)] if is_silu else [fused("d w1", F, *at_once)]
        w1_row = self._gradient("w1", "row", *((*at_once, "d silu") if is_silu else ("d w1",)))
        w1_column = self._gradient("w1", "column", "w1 row" if is_silu else "d w1")
        is_alone = self.shape.tp > 1 and not self._is_gate_cast  # one gradient after the other
        is_emulated = self.float8.emulated and not is_alone
        is_together = is_emulated or not (late or is_alone)
        w3_column = self._gradient(
            "w3", "column", "w3 row" if is_alone else "d gate", *([] if is_alone else ["w1", "w3"])
        )
        at_end = is_alone
        gate, column = [fused("gate", F, *at_once)], list[Kernel]()
        if self._is_gate_cast:
            gate.append(self._input("w2", "gate"))
            column = [self._gradient("w2", "column", *d_gate.reads)]
            (weight, w), is_late = self._weight_back("w2"), late and not self.float8.emulated
            first = [
                self._gradient("w2", "row", *d_gate.reads), *([] if is_late else column), *weight,
                *self._result("d gate", ("w2 row", w), F), *(column if is_late else []),
            ]  # fmt: skip
            last = self._result("gradient of w2", ("w2 column", "w2 input"), self.weights["w"])
        else:
            gate = [*(gate if late else []), fused("d w3", F, *at_once)]
            first, last = ([d_gate], [w2]) if late else ([w2, d_gate], [])
        (w3, of_w3), (w1, of_w1) = self._weight_back("w3"), self._weight_back("w1")
        return [
            *first, *gate, *fp32,
            self._gradient("w3", "row", *at_once), *([] if at_end else [w3_column]),
            *([w1_row] if is_together else []), *([w1_column] if is_emulated else []), *last,
            *w3, *self._result("d n2", ("w3 row", of_w3), self.wide), *([w3_column] if at_end else []),
            *([] if is_together else [w1_row]),
            *w1, *self._result("d n2 too", ("w1 row", of_w1), self.wide),
            *([] if is_emulated else [w1_column]),
        ]  # fmt: skip

    # Operands

    def _weight_back(self, name: str) -> tuple[list[Kernel], str]:
        """What makes a weight for the backward, and what it is called."""
        D, N = self.sides[name]
        column, back = f"{name} weight column", f"{name} weight back"
        if self._has_columns and not self.float8.emulated:
            return [], column
        return [fused(back, (D * N, self.cast), *([column] if self._has_columns else []))], back

    def _from(self, source: str) -> tuple[str, ...]:
        return self.reads[source] if source in self.unmade else (source,)

    def _input(self, name: str, source: str) -> Kernel:
        return fused(f"{name} input", (self.shape.tokens * self.sides[name][0], self.cast), *self._from(source))

    def _input_back(self, name: str, source: str) -> Kernel:
        [size] = (made := self._input(name, source)).makes.values()
        return replace(made, makes={f"{name} input back": size})

    def _weight(self, name: str) -> list[Kernel]:
        D, N = self.sides[name]
        return [fused(f"{name} weight", (D * N, self.cast))]

    def _gradient(self, name: str, way: str, *sources: str) -> Kernel:
        return fused(f"{name} {way}", (self.shape.tokens * self.sides[name][1], self.cast), *sources)

    def _result(self, name: str, reads: tuple[str, ...], size: Size, rounded: Collection[str] = ()) -> list[Kernel]:
        made = (size[0], self.result)
        if made == size or not (name in rounded or name.startswith("gradient of ")):
            return [Kernel(reads, {name: made})]
        return [Kernel(reads, {f"unrounded {name}": made}), fused(name, size, f"unrounded {name}")]

    def _rounded(self, mode: Mode) -> set[str]:
        """What attention reads, what recompute per operation keeps, and what is kept, if it is less then."""
        kept = self.keep if mode == "op" else {"wo", "w1", "w3"} if self.float8.emulated else ()
        return {self.v, "d attention", *kept}

    # Programs

    def _cast(self, program: list[Kernel], rounded: Collection[str]) -> Iterator[Kernel]:
        made = {name for kernel in program for name in kernel.makes if name.endswith(" back")}
        for kernel in program:
            name = next(iter(kernel.makes), "")
            weight = name.removeprefix("gradient of ")
            is_cast = any(read.endswith(CASTS) for read in kernel.reads)
            is_cast |= any(read.startswith("unrounded ") for read in kernel.reads)
            if name in self.unmade:
                continue
            is_wide = kernel.over in self.names - set(rounded) and self.result != self.shape.number
            kernel = replace(kernel, over="") if is_wide else kernel
            if name in self.names and not is_cast:
                yield from self._product(kernel, made, rounded)
            elif LAYER.get(name) in self.names and not is_cast:
                yield from self._input_backward(kernel, rounded)
            elif weight != name and weight in self.names and not self.is_hp and not is_cast:
                yield from self._weight_backward(kernel, made)
            else:
                yield kernel

    def _product(self, kernel: Kernel, made: set[str], rounded: Collection[str]) -> Iterator[Kernel]:
        [(name, size)], [source] = kernel.makes.items(), kernel.reads
        norm = source.partition(" ")[0]
        readers = [x for x in READERS.get(norm, (name,)) if x in self.names]
        is_one = norm == "n2" or self.float8.emulated  # for all of its readers
        given = readers[0] if is_one else name
        for reader in readers[:1] if is_one else readers:
            if reader not in made:
                made.add(reader)
                yield self._input(reader, source)
        is_there = self.float8.gathered and not self.float8.emulated  # as FSDP2 has gathered it
        yield from [] if is_there else self._weight(name)
        operands = (f"{given} input", *([] if is_there else [f"{name} weight"]))
        yield from self._result(name, operands, size, rounded)

    def _input_backward(self, kernel: Kernel, rounded: Collection[str]) -> Iterator[Kernel]:
        [(name, size)], [source] = kernel.makes.items(), kernel.reads
        layer = LAYER[name]
        yield self._gradient(layer, "row", source)
        if not self.is_hp:
            yield self._gradient(layer, "column", source)
        kernels, weight = self._weight_back(layer)
        yield from kernels
        yield from self._result(name, (f"{layer} row", weight), size, rounded)

    def _weight_backward(self, kernel: Kernel, made: set[str]) -> Iterator[Kernel]:
        [(name, size)], source = kernel.makes.items(), kernel.reads[1]
        layer = name.removeprefix("gradient of ")
        norm = source.partition(" ")[0]
        readers = [x for x in READERS.get(norm, (layer,)) if x in self.names]
        is_one = norm == "n2" or self.float8.emulated
        given = readers[0] if is_one else layer
        column = f"{source} column"
        if self._has_columns and norm in READERS and self._is_column(source):
            if not self.float8.emulated:
                yield from self._result(name, (f"{layer} column", column), size)
                return
            source = column
        back = f"{given} input back"
        if back not in made:
            made.add(back)
            yield self._input_back(given, source)
        yield from self._result(name, (f"{layer} column", back), size)


class SentBlock(Float8Block):
    """With tensor parallelism and one scale per tensor: ranks scale together and send float8 numbers.

    What is cast in the forward is kept, as a copy that lies the other way ("... column"): its scale has travelled.
    """

    def __init__(self, shape: Shape, keep: Iterable[str], float8: Float8, names: frozenset[str]) -> None:
        super().__init__(shape, keep, float8, names)
        sent = {n for n, of in READERS.items() if names.issuperset(of)}
        self.unmade |= sent
        self.sent = {*sent, *(d for d, layer in (("dx out", "w2"), ("d h", "wo")) if layer in names)}

    def _gather(self, name: str, gathered: str) -> list[Kernel]:
        if name not in self.sent:
            return super()._gather(name, gathered)
        part, whole = (self.hidden[0], 1), (self.wide[0], 1)
        cast = fused(f"{name} cast", part, *self._from(name))
        if self.shape.rows == 1:
            return [cast, collective(gathered, f"{name} cast", whole)]
        return [
            cast, collective(f"{name} message", f"{name} cast", whole), fused(gathered, whole, f"{name} message")
        ]  # fmt: skip

    def backward(self, mode: Mode) -> list[Kernel]:
        return list(self._cast(CompiledBlock.backward(self, mode), self._rounded(mode)))

    def _units_backward(self, mode: Mode) -> list[Kernel]:
        program = CompiledBlock._units_backward(self, mode)
        if not self.names.issuperset(("w1", "w3")):
            return program
        names = [next(iter(kernel.makes)) for kernel in program]
        given, after = dict(zip(names, program, strict=True)), program[names.index("d n2 too") + 1 :]
        F, read, (kernels, weight) = self.units, ("w1", "d gate", "w3"), self._weight_back("w1")
        whole = [fused("d w1", F, *read)] if self.float8.emulated else []
        return [
            *program[: names.index("gradient of w2")], given["gradient of w2"], given["d gate"],
            fused("d w3", F, *read), fused("d silu", (F[0], 4), *read), *whole,
            self._gradient("w1", "row", *read, "d silu"), *kernels,
            *self._result("d n2 too", ("w1 row", weight), self.wide), given["gradient of w1"],
            given["d n2"], given["gradient of w3"], *after,
        ]  # fmt: skip

    # Operands

    def _product(self, kernel: Kernel, made: set[str], rounded: Collection[str]) -> Iterator[Kernel]:
        [(name, size)], [source] = kernel.makes.items(), kernel.reads
        yield from self._operand(name, source, made)
        is_there = self.float8.gathered and not self.float8.emulated
        yield from [] if is_there else self._weight(name)
        operands = (self._operand_of(source), *([] if is_there else [f"{name} weight"]))
        yield from self._result(name, operands, size, rounded)

    def _is_sent(self, source: str) -> bool:
        return source.partition(" gathered")[0] in self.sent

    def _operand_of(self, source: str) -> str:
        return f"{source} input" if self.float8.emulated else source if self._is_sent(source) else f"{source} early"

    def _operand(self, name: str, source: str, made: set[str]) -> Iterator[Kernel]:
        """Once for all of its readers."""
        numbers = self.shape.tokens * self.sides[name][0]
        if source in made:
            return
        made.add(source)
        if not self._is_sent(source):
            yield fused(f"{source} early", (numbers, 1), *self._from(source))
        if self.float8.emulated:
            yield fused(f"{source} input", (numbers, 4), source if self._is_sent(source) else f"{source} early")

    def _input_backward(self, kernel: Kernel, rounded: Collection[str]) -> Iterator[Kernel]:
        [(name, size)], [source] = kernel.makes.items(), kernel.reads
        layer = LAYER[name]
        row, (kernels, weight) = f"{layer} row", self._weight_back(layer)
        if self._is_sent(source) and not self.float8.emulated:
            row = source
        else:
            yield self._gradient(layer, "row", source)
        yield from kernels
        yield from self._result(name, (row, weight), size, rounded)

    def _weight_backward(self, kernel: Kernel, made: set[str]) -> Iterator[Kernel]:
        [(name, size)], [d, source] = kernel.makes.items(), kernel.reads
        layer = name.removeprefix("gradient of ")
        yield self._gradient(layer, "column", d if self._is_sent(d) else f"{layer} row")
        operand = f"{source} input" if self.float8.emulated else f"{source} column"
        yield from self._result(name, (f"{layer} column", operand), size)

    def _columns(self) -> list[Kernel]:
        """Of all operands, made together at the end; emulated products have read fp32 numbers, which are kept."""
        found = dict[str, Kernel]()
        for name in sorted(self.names):
            D, N = self.sides[name]
            source = {"wo": self.attended, "w2": "gate"}.get(name, self.n2 if name in READERS["n2"] else self.n1)
            cast = source if self._is_sent(source) else f"{source} early"
            if not self.float8.emulated:
                found[source] = fused(f"{source} column", (self.shape.tokens * D, 1), cast)
            found[name] = fused(f"{name} weight column", (D * N, 1))
        return list(found.values())
