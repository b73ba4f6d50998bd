"""A compiled block in float8: the casts around the products of compiled_block.py. Letters as there; N columns of a
product.

Kernels are listed as torch 2.13 writes them for a CPU, of torchao 0.18's layers, and with the loops that they have;
estimation/scheduler.py says which of them become one, and in which order they run. A float8 number is a byte; where
products are emulated inductor writes what they read as fp32 at once.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from estimation.compiled_block import PIECES, CompiledBlock, Programs
from estimation.float8 import CUT, READERS, Float8
from estimation.inductor import Kernel, Loops, Size, collective, fused, product
from estimation.program import Shape
from estimation.scheduler import as_needed, scheduled
from estimation.tape import Mode

LOOPS = {  # of kernels of compiled_block.py; "rows" and "columns" are reduced, in "flat" every number is by itself
    **dict.fromkeys(("n1", "n1.rstd", "n2", "n2.rstd", "sums", "d h", "dx", "out", "wo scattered"), "rows"),
    **dict.fromkeys(("gradient of n1", "gradient of n2"), "columns"),
}
CASTS = (" row", " column", " input")
ALONE = ("message", "copy", "mask", "heads", "once")


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

    @property
    def _has_columns(self) -> bool:
        """With tensor parallelism weights and gathered inputs are kept as they are cast, lying the other way. (It is
        not compiled with recompute per operation.)"""
        return self.shape.tp > 1

    @property
    def _keeps_weights(self) -> bool:
        """Emulated products read those that FSDP2 has gathered again."""
        return self._has_columns and not (self.float8.gathered and self.float8.emulated)

    def _is_column(self, source: str) -> bool:
        """Whether nobody but products in float8 reads it. Bytes that are read back at once, as emulated products do,
        count twice for the partitioner: as much as 16-bit numbers put together from several sequences, which stay."""
        is_as_small = self.float8.emulated and not self.is_fp32 and self.shape.rows > 1
        return not (self.is_hp or is_as_small) and self.names.issuperset(READERS[source.partition(" ")[0]])

    def _columns(self) -> list[Kernel]:
        numbers = self.wide[0]
        gathered = [n for n in (self.n1, self.n2) if self._is_column(n)]
        return [
            *(fused(f"{n} column", (numbers, 1), n) for n in gathered),
            *(fused(f"{n} weight column", (self.sides[n][0] * self.sides[n][1], 1)) for n in sorted(self.names)),
        ]  # fmt: skip

    # The programs

    def programs(self, mode: Mode) -> Programs:
        if mode not in self._programs:
            forward, backward = self.forward(mode), self.backward(mode)
            if mode == "op":
                again = {name for kernel in forward for name in kernel.makes}
                backward = list(as_needed(backward, again, self.reads))
            forward, backward = self.looped(forward), self.looped(backward)
            own = {name for kernel in backward for name in kernel.makes}
            read = {name for kernel in backward for name in kernel.reads} - own
            kept = {name: size for kernel in forward for name, size in kernel.makes.items() if name in read}
            ends = [name for name in own if name.startswith("gradient of ")]
            forward, backward = scheduled(forward, {}, [*kept, "out"]), scheduled(backward, kept, [*ends, "dx"])
            self._programs[mode] = Programs(self.hidden, forward, backward)
        return self._programs[mode]

    def forward(self, mode: Mode) -> list[Kernel]:
        program = list(self._cast(CompiledBlock.forward(self, mode), mode, set()))
        return [*program, *self._columns()] if self._has_columns else program

    def backward(self, mode: Mode) -> list[Kernel]:
        made = set[str]()  # operands that several products read
        return [*self._units_back(mode, made), *self._attention_back(mode, made)]

    def looped(self, program: list[Kernel]) -> list[Kernel]:
        """Fused kernels with their loops, and all with their count. They read what is to be rounded, as it comes."""
        made = {name for kernel in program for name in kernel.makes}
        whole = {name: u for name in made if name != "wo" and (u := f"unrounded {name}") in made}
        found = list[Kernel]()
        for kernel in program:
            if kernel.fused:
                reads = tuple(name if name in kernel.makes else whole.get(name, name) for name in kernel.reads)
                loops = kernel.loops or self._loops(kernel)
                kernel = replace(kernel, reads=reads, over="", loops=loops, count=self._count(kernel))
            elif (count := self._count(kernel)) > 1:
                kernel = replace(kernel, count=count)
            found.append(kernel)
        return found

    def _count(self, kernel: Kernel) -> int:
        """Beside a cast there are the size of its numbers and their scale, which ranks that cast together send."""
        name, is_scaled = next(iter(kernel.makes)), not self.float8.emulated
        layer, _, what = name.partition(" ")
        if not kernel.fused:
            is_result = self.is_tensorwise or name.startswith(("gradient of", "d attention"))
            return self.count(kernel) + (is_scaled and is_result and kernel.reads[0].endswith(CASTS))
        if layer not in self.sides or not what:
            return 5 if what == "cast" else self.count(kernel)
        if what == "input back max" and layer in ("wq", "wk"):
            return 0  # as of wv
        travels = 3 * (self.shape.tp > 1 and layer not in CUT)
        if self.is_tensorwise:
            return 1 + travels * (what == "row max")
        if what.startswith("weight back "):
            return 0 if self._has_columns else 2 - self.is_hp
        if what in ("input", "weight"):
            return 2 + is_scaled
        if what == "row" or kernel.loops[:1] == ("columns",):
            return 2 if what.endswith(" max") else 3 + travels * (what == "row")
        return 1

    def _loops(self, kernel: Kernel) -> Loops:
        [(name, (numbers, _))] = kernel.makes.items()
        if kind := LOOPS.get(name):
            return (kind, self.hidden[0])
        if name.endswith(ALONE):
            return ()
        if name == "d k" or name.endswith(PIECES):
            return ("pieces", numbers)
        return ("rows" if self.is_heavy and name in ("d w3", "d w1", "d silu") else "flat", numbers)

    def _cast(self, program: Iterable[Kernel], mode: Mode, made: set[str]) -> Iterator[Kernel]:
        """Products in float8 in place of others; without what is only cast."""
        for kernel in program:
            name = next(iter(kernel.makes))
            if name in self.names and not kernel.fused:
                yield from self._product(kernel, made, self._rounded(mode))
            elif name not in self.unmade:
                yield kernel

    def _units_back(self, mode: Mode, made: set[str]) -> Iterator[Kernel]:
        """From the gradient of "out" to that of "h"."""
        F = self.units
        gather = self._gather("dx out", "dx out gathered")
        out = "dx out gathered" if gather else "dx out"
        yield from gather
        is_gate_cast = self._is_only_cast("w2")
        is_gate_kept = self._is_gate_kept(mode)  # else silu is made again, and read twice
        units = [] if is_gate_kept else [*self._units_again(mode), fused("silu", F, "w1")]
        units += [] if is_gate_kept or is_gate_cast else [fused("gate", F, "silu", "w3")]
        gate = ("silu", "w3") if is_gate_cast else ("gate",)
        yield from self._layer("w2", (out,), out, "d gate", gate, made, between=units)
        first = ("w1", "d gate") if is_gate_kept else ("silu", "d gate")
        whole = [fused("d w3", F, *first)] if is_gate_kept or not self._is_only_cast("w3") else []
        yield from whole if is_gate_kept else []
        d_w3, late = (("d w3",), []) if is_gate_kept else (first, whole)
        yield from self._layer("w3", d_w3, "d w3", "d n2", self._from(self.n2), made, between=late)
        yield fused("d silu", (F[0], 4), "w1")
        d_w1: tuple[str, ...] = ("w1", "w3", "d gate", "d silu")
        if self.is_heavy or not self._is_only_cast("w1"):
            yield fused("d w1", F, *d_w1)
        d_w1 = ("d w1",) if self.is_heavy else d_w1
        yield from self._layer("w1", d_w1, "d w1", "d n2 too", self._from(self.n2), made)
        sums, parts = self._summed_parts("n2", ("d n2", "d n2 too"), self.names & {"w1", "w3"})
        yield from sums
        read = ("x", self.wo, "n2.rstd", *parts)
        yield fused("gradient of n2", self.norm, *read)
        yield fused("sums", self.rows, *read)
        yield fused("d h", self.hidden, *read, "sums", "dx out")

    def _is_gate_kept(self, mode: Mode) -> bool:
        return mode != "op" and not self._is_only_cast("w2")

    def _units_again(self, mode: Mode) -> Iterator[Kernel]:
        if mode != "op":
            return
        program = self._norm("n2", "x", self.wo)
        is_kept = "attention" in self.keep
        if self.wo not in self.keep:
            rows = [fused("attention rows", self.q, "attention")] if self.is_ring and is_kept else []
            program = [*rows, *self._product_to_hidden("wo", self.attended), *program]
        program += [product(name, self.n2, self.units) for name in ("w1", "w3") if name not in self.keep]
        again = [] if is_kept else [*self._norm("n1", "x"), *self._attention_again(), *self._attend()]
        yield from self._cast([*again, *program], mode, self._kept_inputs())

    def _attention_back(self, mode: Mode, made: set[str]) -> Iterator[Kernel]:
        """From the gradient of "h" to that of "x"."""
        gather = self._gather("d h", "d h gathered")
        d_h = "d h gathered" if gather else "d h"
        yield from gather
        is_new = self.is_ring and mode == "op" and "wo" in self.keep and self.attended not in self.unmade
        rows = [fused("attention rows", self.q, "attention")] if is_new else []
        yield from self._layer("wo", (d_h,), d_h, "d attention", self._from(self.attended), made, between=rows)
        if mode == "op" and "attention" in self.keep:
            again = [*self._norm("n1", "x"), *self._attention_again()]
            yield from self._cast(again, mode, self._kept_inputs())
        found = self._attention_backward(mode)
        at = next(index for index, kernel in enumerate(found) if "d q" in kernel.makes) + 1
        yield from found[:at]
        given = {name: kernel for kernel in found[at:] for name in kernel.makes}
        for name in ("d v once", "d v here", "d k once", "d k here", "d k", "d q rotated"):
            yield from [given[name]] if name in given else []
        for x, d in (("v", self._d_wv), ("k", "d wk"), ("q", "d wq")):
            kernel = given.get(d)
            is_made = kernel is None or not self._is_only_cast(f"w{x}")
            reads = kernel.reads if kernel else (d,)
            whole = [kernel] if kernel and is_made else []
            yield from self._layer(f"w{x}", reads, d, f"d n1 of {x}", self._from(self.n1), made, between=whole)
            if x in self.biases:
                loops = ("columns", (self.q if x == "q" else self.k)[0])
                yield fused(f"gradient of w{x}.bias", self.biases[x], *([d] if is_made else reads), loops=loops)
        sums_of_parts, parts = self._summed_parts(
            "n1", ("d n1 of v", "d n1 of k", "d n1 of q"), self.names & {"wq", "wk", "wv"}
        )
        yield from sums_of_parts
        if self.shape.model.qk_norm:
            yield fused("gradient of q norm", self.head, "wq", "q norm.rstd", "d q rotated")
            yield fused("gradient of k norm", self.head, "wk", "k norm.rstd", "d k")
        read = ("x", "n1.rstd", *parts)
        yield fused("gradient of n1", self.norm, *read)
        yield fused("dx sums", self.rows, *read)
        yield fused("dx", self.hidden, *read, "dx sums", "d h")

    def _summed_parts(
        self, norm: str, parts: tuple[str, ...], names: Collection[str]
    ) -> tuple[list[Kernel], tuple[str, ...]]:
        """The parts of the gradient of a norm's result, as what follows reads them."""
        if ends := self._scatter(parts, f"d {norm}", f"d {norm} scattered"):
            return ends, (f"d {norm} scattered",)
        if not self.is_scaled or not names:
            return [], parts
        total = f"d {norm} sum"
        return [fused(total, (self.wide[0], 4), *parts, loops=("rows", self.hidden[0]))], (total,)

    @property
    def is_heavy(self) -> bool:
        """Whatever reads the gate's gradient scales it."""
        return self.is_scaled and "w2" in self.names

    @property
    def is_scaled(self) -> bool:
        """Products of rows have their scales in what reads them."""
        return not self.is_tensorwise and not self.float8.emulated

    def _is_only_cast(self, name: str) -> bool:
        """Whether nobody but casts reads the gradient of a layer's result."""
        return name in self.names and not self.is_hp

    # A layer

    def _layer(
        self, name: str, d: tuple[str, ...], whole: str, result: str, source: tuple[str, ...], made: set[str],
        *, between: Iterable[Kernel] = (),
    ) -> Iterator[Kernel]:  # fmt: skip
        """Its backward: the gradient of its input, and that of its weight. In float8 they come in this order.

        Args:
            d: what casts read of the gradient of its result; `whole`: the gradient itself.
            source: its input, as it is read.
            between: what is made when it is needed for the second.
        """
        D, N = self.sides[name]
        size = {"w2": self.units, "wo": self.q}.get(name, self.wide)
        if name in self.names:
            yield from self._input_backward(name, d, result, size)
            yield from between
            yield from self._weight_backward(name, (whole,) if self.is_hp else d, source, made)
        else:
            yield from between
            yield Kernel((whole, *source), {f"gradient of {name}": (D * N, self.shape.number)})
            yield product(result, whole, size)

    def _cast_of(self, what: str, numbers: int, way: str, *sources: str, again: str = "") -> list[Kernel]:
        """A cast, and the largest numbers that it is scaled by.

        Args:
            way: the rows or the columns that have a scale each; tensorwise what the product reads.
            again: the cast whose scale it has, if it is tensorwise.
        """
        is_flat = self.is_tensorwise and not any(source.endswith(".rstd") for source in sources)
        is_column = way == "columns" and len(sources) == 1 and not self.float8.emulated
        loops: Loops = ("columns" if is_column else "flat" if is_flat else "rows", numbers)
        most, scale = list[Kernel](), f"{again or what} max"
        if self.is_tensorwise:
            of = fused(scale, (1, 4), *sources, loops=("flat", numbers), total=True)
            most = [] if again else [of]
            # Its shape is another, so that it stays alone.
            loops = (*loops, "w1") if what == "w1 row" and (self.shape.tp > 1 or not self.float8.emulated) else loops
        elif way == "columns" and not is_column:
            scale = f"{what} max"
            most = [fused(scale, (numbers // self.shape.tokens, 4), *sources, loops=("columns", numbers))]
        reads = (*sources, scale) if most or self.is_tensorwise else sources
        return [*most, fused(what, (numbers, self.cast), *reads, loops=loops)]

    def _input_backward(self, name: str, d: tuple[str, ...], result: str, size: Size) -> Iterator[Kernel]:
        numbers = self.shape.tokens * self.sides[name][1]
        kernels, weight = self._weight_back(name)
        yield from kernels[:-1]
        yield from self._cast_of(f"{name} row", numbers, "rows", *d)
        yield from kernels[-1:]
        yield from self._result(result, (f"{name} row", weight), size, ("d attention",))

    def _weight_backward(
        self, name: str, d: tuple[str, ...], source: tuple[str, ...], made: set[str]
    ) -> Iterator[Kernel]:
        D, N = self.sides[name]
        T, gradient, size = self.shape.tokens, f"gradient of {name}", (D * N, self.shape.number)
        if self.is_hp:
            yield Kernel((*d, *source), {gradient: size})
            return
        is_copy = name == "w1" and self.is_tensorwise and not self.float8.emulated
        columns = (f"{name} row",) if is_copy else d
        yield from self._cast_of(f"{name} column", T * N, "columns", *columns, again=f"{name} row")
        norm = next((norm for norm, readers in READERS.items() if name in readers), "")
        back = f"{self._given(name, norm)} input back"
        if self._has_columns and norm and self._is_column(norm):
            kept = f"{self.n1 if norm == 'n1' else self.n2} column"
            back, source = (back, (kept,)) if self.float8.emulated else (kept, source)
        if back not in made and back.endswith(" back"):
            made.add(back)
            yield from self._cast_of(back, T * D, "columns", *source)
        yield from self._result(gradient, (f"{name} column", back), size)

    def _given(self, name: str, norm: str) -> str:
        """By whose name a layer's operand goes."""
        is_one = norm == "n2" or self.float8.emulated  # for all readers of a norm
        return next(x for x in READERS[norm] if x in self.names) if norm and is_one else name

    # Operands

    def _weight_back(self, name: str) -> tuple[list[Kernel], str]:
        """What makes a weight for the backward, and what it is called."""
        D, N = self.sides[name]
        column, back = f"{name} weight column", f"{name} weight back"
        if self._has_columns and not self.float8.emulated:
            return [], column
        made = fused(back, (D * N, self.cast), *([column] if self._keeps_weights else [f"{name} parameter"]))
        last, found = f"{name} parameter", list[Kernel]()
        steps = {} if self.is_tensorwise else {"max": 1, "scale": 1} if self.is_hp else {"max": N}
        for step, numbers in steps.items():
            found.append(fused(f"{back} {step}", (numbers, 4), last, loops=(f"weight {step}", name)))
            last = f"{back} {step}"
        # Scaled by rows and not cast to bytes, a weight that is no square is gone through in another order than before.
        is_turned = self.float8.emulated and D != N and not self.is_tensorwise
        loops: Loops = ("weight", name, "back") if is_turned else ("weight", name)
        return [*found, replace(made, reads=(*made.reads, *([last] if found else [])), loops=loops)], back

    def _from(self, source: str) -> tuple[str, ...]:
        return self.reads[source] if source in self.unmade else (source,)

    def _weight(self, name: str) -> list[Kernel]:
        D, N = self.sides[name]
        return [fused(f"{name} weight", (D * N, self.cast), f"{name} parameter", loops=("weight", name))]

    def _result(self, name: str, reads: tuple[str, ...], size: Size, rounded: Collection[str] = ()) -> list[Kernel]:
        made = (size[0], self.result)
        if made == size or not (name in rounded or name.startswith("gradient of ")):
            return [Kernel(reads, {name: made})]
        return [Kernel(reads, {f"unrounded {name}": made}), fused(name, size, f"unrounded {name}")]

    def _rounded(self, mode: Mode) -> set[str]:
        """What attention reads, what recompute per operation keeps, and what is kept, if it is less then."""
        kept = self.keep if mode == "op" else {"wo", "w1", "w3"} if self.float8.emulated else set()
        if self.shape.model.qk_norm and mode != "op" and self.float8.emulated:
            kept = {*kept, "wq", "wk"}
        return {self.v, "d attention", *kept}

    def _kept_inputs(self) -> set[str]:
        """Recompute per operation keeps what an emulated product is made of with it: torchao's operator is several of
        torch's. Whoever else reads the same finds it there, if the first of them is kept."""
        if not self.float8.emulated:
            return set()
        return {next((x for x in readers if x in self.names), "") for readers in READERS.values()} & self.keep

    def _product(self, kernel: Kernel, made: set[str], rounded: Collection[str]) -> Iterator[Kernel]:
        [(name, size)], [source] = kernel.makes.items(), kernel.reads
        norm = source.partition(" ")[0]
        given = self._given(name, norm if norm in READERS else "")
        if given not in made:
            made.add(given)
            numbers = self.shape.tokens * self.sides[given][0]
            yield from self._cast_of(f"{given} input", numbers, "rows", *self._from(source))
        is_there = self.float8.gathered and not self.float8.emulated  # as FSDP2 has gathered it
        yield from [] if is_there else self._weight(name)
        operands = (f"{given} input", *([] if is_there else [f"{name} weight"]))
        yield from self._result(name, operands, size, rounded)


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

    def _is_gate_kept(self, mode: Mode) -> bool:
        return True  # as it was cast

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

    def _input_backward(self, name: str, d: tuple[str, ...], result: str, size: Size) -> Iterator[Kernel]:
        row, (kernels, weight) = f"{name} row", self._weight_back(name)
        if self._is_sent(d[0]) and not self.float8.emulated:
            row = d[0]
        else:
            numbers = self.shape.tokens * self.sides[name][1]
            yield from (
                self._cast_of(row, numbers, "rows", *d)
                if not self._is_sent(d[0])
                else [fused(row, (numbers, self.cast), *d, loops=("flat", numbers))]
            )
        yield from kernels
        yield from self._result(result, (row, weight), size, ("d attention",))

    def _weight_backward(
        self, name: str, d: tuple[str, ...], source: tuple[str, ...], made: set[str]
    ) -> Iterator[Kernel]:
        D, N = self.sides[name]
        numbers = self.shape.tokens * N
        loops: Loops = ("columns", numbers)
        if self.float8.emulated:  # with the other
            loops = ("flat", numbers, "w1") if name == "w1" else ("flat", numbers)
        elif len(d) > 1:
            d = (f"{name} row",)
        yield fused(f"{name} column", (numbers, self.cast), *d, loops=loops)
        read = {"wo": self.attended, "w2": "gate"}.get(name, self.n2 if name in READERS["n2"] else self.n1)
        operand = f"{read} input" if self.float8.emulated else f"{read} column"
        yield from self._result(f"gradient of {name}", (f"{name} column", operand), (D * N, self.shape.number))

    def _columns(self) -> list[Kernel]:
        """Of all operands, made together at the end; emulated products have read fp32 numbers, which are kept."""
        found = dict[str, Kernel]()
        for name in sorted(self.names):
            D, N = self.sides[name]
            source = {"wo": self.attended, "w2": "gate"}.get(name, self.n2 if name in READERS["n2"] else self.n1)
            cast = source if self._is_sent(source) else f"{source} early"
            if not self.float8.emulated:
                found[source] = fused(f"{source} column", (self.shape.tokens * D, 1), cast)
            if self._keeps_weights:
                found[name] = fused(f"{name} weight column", (D * N, 1))
        return list(found.values())
