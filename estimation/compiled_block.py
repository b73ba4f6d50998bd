"""A compiled block: the programs that inductor writes for its forward and its backward. Letters as in program.py.

Read from what torch 2.13 writes for a CPU, in all compositions; the trace runs the same (estimation/compiled.py). What
is kept between forward and backward, and what is made again, is the choice of its partitioner. Blocks of other trainers
are taken to be written in the same way; what they keep differs.
"""

from collections.abc import Iterable

from estimation.inductor import Kernel, Size, bytes_of, collective, fused, product, steps
from estimation.program import Shape, attention_work
from estimation.tape import Event, Mode

PIECES = ("rotated", "q norm.rstd", "k norm.rstd")  # of heads


class CompiledBlock:
    """The forward and the backward of a block of this shape.

    Args:
        keep: what recompute per operation keeps; nothing, if it is of the whole block and inside of what is compiled.
    """

    def __init__(self, shape: Shape, keep: Iterable[str] = ()) -> None:
        m, T, e, t = shape.model, shape.tokens, shape.number, shape.tp
        heads, keys = m.n_heads // t, max(m.n_kv_heads // t, 1)
        Q, K, F, D = heads * m.head_dim, keys * m.head_dim, m.ffn_dim // t, m.dim
        self.shape, self.keep, self.is_fp32 = shape, {*keep}, e == 4
        self._programs: dict[Mode, Programs] = {}
        self.is_ring, self.is_gathered = (shape.cp > 1 and x for x in (not shape.documents, shape.documents))
        self.repeats = keys < heads and not self.is_ring
        self.wide, self.hidden, self.rows = (T * D, e), (T * D // t, e), (T // t, 4)
        self.q, self.k, self.units, self.lse = (T * Q, e), (T * K, e), (T * F, e), (T * heads, 4)
        self.once = (T * K * shape.cp, e)
        self.key_rows, self.norm, self.head = (T * keys, 4), (D, e), (m.head_dim, e)
        self.weights = {"w": (D * F, e), "q": (D * Q, e), "k": (D * K, e)}
        self.biases = {"q": (Q, e), "k": (K, e), "v": (K, e)} if m.qkv_bias else {}
        self.n1, self.n2 = ("n1 gathered", "n2 gathered") if t > 1 else ("n1", "n2")
        self.wo, self.w2 = ("wo scattered", "w2 scattered") if t > 1 else ("wo", "w2")
        # What attention reads of keys and values, and its size.
        if self.is_gathered:
            self.heads, self.v, self.all_heads = "k everywhere", "v everywhere", (T * heads * m.head_dim * shape.cp, e)
        else:
            self.heads, self.v = ("k heads", "v heads") if self.repeats else ("k", "wv")
            self.all_heads = self.q if self.repeats else self.k
        self.attended = "attention rows" if self.is_ring else "attention"

    # What forward, recomputation and backward have in common

    def _norm(self, name: str, *reads: str) -> list[Kernel]:
        made = [fused(f"{name}.rstd", self.rows, *reads), fused(name, self.hidden, *reads, f"{name}.rstd")]
        return [*made, *self._gather(name, f"{name} gathered")]

    def _gather(self, name: str, gathered: str) -> list[Kernel]:
        """Tensor parallelism: a message has the ranks' parts one after the other, from which sequences are copied."""
        if self.shape.tp == 1:
            return []
        if self.shape.rows == 1:
            return [collective(gathered, name, self.wide)]
        return [collective(f"{name} message", name, self.wide), fused(gathered, self.wide, f"{name} message")]

    def _scatter(self, reads: tuple[str, ...], name: str, scattered: str) -> list[Kernel]:
        """And a sum is copied to one."""
        if self.shape.tp == 1:
            return []
        return [fused(f"{name} message", self.wide, *reads), collective(scattered, f"{name} message", self.hidden)]

    def _product_to_hidden(self, name: str, source: str) -> list[Kernel]:
        made = product(name, source, self.wide)
        return [made, *self._scatter((name,), name, f"{name} scattered")]

    def _rotated(self) -> list[Kernel]:
        """Rotated queries and keys, and repeated keys: fp32 pieces are put together before they are rounded."""
        q, k, found = self.q, self.k, list[Kernel]()
        q_reads: tuple[str, ...] = ("wq",)
        k_reads: tuple[str, ...] = ("wk",)
        if self.shape.model.qk_norm:
            found = [fused("q norm.rstd", self.lse, "wq"), fused("k norm.rstd", self.key_rows, "wk")]
            q_reads, k_reads = ("wq", "q norm.rstd"), ("wk", "k norm.rstd")
        if self.is_fp32:
            key = "k rotated" if self.repeats and not self.is_gathered else "k"
            found += [fused("q", q, *q_reads), fused(key, k, *k_reads)]
        else:
            found += [
                fused("q rotated", (q[0], 4), *q_reads),
                fused("k rotated", (k[0], 4), *k_reads),
                fused("q", q, "q rotated"),
            ]
            if not self.repeats or self.is_gathered:
                found.append(fused("k", k, "k rotated"))
        return [*found, fused("k heads", q, "k rotated")] if self.repeats and not self.is_gathered else found

    def _values(self, mode: Mode) -> list[Kernel]:
        """Repeated values; with document masks, keys and values of all ranks, and what attention adds to its scores."""
        mask = self._mask(mode)
        if not self.is_gathered:
            return [fused("v heads", self.q, "wv"), *mask] if self.repeats else mask
        keys = ("k once", "v once") if self.repeats else (self.heads, self.v)
        found = [
            collective("k gathered", "k", self.once), fused(keys[0], self.once, "k gathered"),
            fused("v message", self.k, "wv"),
            collective("v gathered", "v message", self.once), fused(keys[1], self.once, "v gathered"),
        ]  # fmt: skip
        if self.repeats:
            found += [fused(self.heads, self.all_heads, "k once"), fused(self.v, self.all_heads, "v once")]
        return [*found, *mask]

    def _mask(self, mode: Mode) -> list[Kernel]:
        """A GPU's kernel reads it written out for every head: at once, if only that is read."""
        if not self.shape.mask:
            return []
        whole = fused("mask", (self.shape.mask, self.shape.number))
        if not self.shape.profile.gpu:
            return [whole]
        return [self._mask_of_heads()] if mode == "op" else [whole, self._mask_of_heads("mask")]

    def _mask_of_heads(self, *reads: str) -> Kernel:
        heads = self.lse[0] // self.shape.tokens
        return fused("mask of heads", (self.shape.mask * heads, self.shape.number), *reads)

    def _attention_inputs(self, mode: Mode) -> list[Kernel]:
        found = [*self._rotated(), *self._values(mode)]
        if mode == "op" and self.is_gathered and not self.is_fp32:  # queries wait, as pieces, for the keys of all ranks
            return sorted(found, key=lambda kernel: "q" in kernel.makes)
        return found

    @property
    def _masks(self) -> tuple[str, ...]:
        """As attention reads it."""
        name = "mask of heads" if self.shape.profile.gpu else "mask"
        return (name,) if self.shape.mask else ()

    def _attend(self) -> list[Kernel]:
        work, _ = attention_work(self.shape)
        made = Kernel(
            ("q", self.heads, self.v, *self._masks), {"attention": self.q, "logsumexp": self.lse},
            takes=False, gives=False, work=work,
        )  # fmt: skip
        return [made, *([fused("attention rows", self.q, "attention")] if self.is_ring else [])]

    def forward(self, mode: Mode) -> list[Kernel]:
        """From "x" to "out"."""
        q, k = self.q, self.k
        over_units = "w3" if "w1" in self.keep else "w1"  # the one that is not kept
        out = fused("out", self.hidden, "x", self.wo, self.w2, over="" if self.shape.tp > 1 else "w2")
        return [
            *self._norm("n1", "x"),
            product("wq", self.n1, q), product("wk", self.n1, k), product("wv", self.n1, k),
            *self._attention_inputs(mode),
            *self._attend(),
            *self._product_to_hidden("wo", self.attended),
            *self._norm("n2", "x", self.wo),
            product("w1", self.n2, self.units), product("w3", self.n2, self.units),
            fused("gate", self.units, "w1", "w3", over=over_units if mode == "op" else ""),
            *self._product_to_hidden("w2", "gate"),
            out,
        ]  # fmt: skip

    # The backward

    def _units_backward(self, mode: Mode) -> list[Kernel]:
        """From the gradient of "out" to that of "h", the sum of the attention's result and of "x"."""
        F, w, gathered, again = self.units, self.weights["w"], "dx out", list[Kernel]()
        if mode == "op":
            if "attention" not in self.keep:
                again = [*self._norm("n1", "x"), *self._attention_again(), *self._attend()]
            again += [] if self.wo in self.keep else self._product_to_hidden("wo", self.attended)
            again += self._norm("n2", "x", self.wo)
            again += [product(name, self.n2, F) for name in ("w1", "w3") if name not in self.keep]
        back = self._gather("dx out", "dx out gathered")
        gathered = "dx out gathered" if back else gathered
        unseen = F[0] * F[1] + (0 if self.is_fp32 else F[0] * 4)  # silu and a factor of its gradient
        if mode == "op":
            makes = {"gate": F, "d w3": F, "d w1": F}
            first = [
                product("d gate", gathered, F),
                Kernel(("w1", "d gate", "w3"), makes, fused=True, unseen=unseen),
                Kernel((gathered, "gate"), {"gradient of w2": w}),
            ]
        else:
            first = [
                Kernel((gathered, "gate"), {"gradient of w2": w}),
                product("d gate", gathered, F),
                Kernel(("d gate", "w1", "w3"), {"d w3": F, "d w1": F}, over="w3", fused=True, unseen=unseen),
            ]
        parts = ("d n2", "d n2 too")
        ends = self._scatter(parts, "d n2", "d n2 scattered")
        read = ("x", self.wo, "n2.rstd", *(("d n2 scattered",) if ends else parts))
        return [
            *again, *back, *first,
            Kernel(("d w3", self.n2), {"gradient of w3": w}), product("d n2", "d w3", self.wide),
            Kernel(("d w1", self.n2), {"gradient of w1": w}), product("d n2 too", "d w1", self.wide),
            *ends,
            fused("sums", self.rows, *read), fused("d h", self.hidden, *read, "sums", "dx out"),
        ]  # fmt: skip

    def _attention_again(self) -> list[Kernel]:
        """What attention has read."""
        made = [
            product(name, self.n1, size) for name, size in (("wq", self.q), ("wk", self.k)) if name not in self.keep
        ]
        value = [] if "wv" in self.keep else [product("wv", self.n1, self.k)]
        if self.is_ring:
            return [*value, *made, *self._rotated()]
        return [*made, *self._rotated(), *value, *self._values("op")]

    def _attention_backward(self, mode: Mode) -> list[Kernel]:
        """From "d attention" to the gradients of wq, wk and wv."""
        q, k = self.q, self.k
        lse, copy = "logsumexp", list[Kernel]()
        if not self.shape.profile.gpu and not self.is_ring:  # a CPU's kernel reads it in other strides
            lse, copy = "logsumexp copy", [fused("logsumexp copy", self.lse, "logsumexp")]
        if self._masks == ("mask of heads",) and mode != "op":  # else it has been made again
            copy.append(self._mask_of_heads("mask"))
        of_heads = self.all_heads
        _, work = attention_work(self.shape)
        made = Kernel(
            ("d attention", "q", self.heads, self.v, "attention", lse, *self._masks),
            {"d q": q, "d k heads": of_heads, "d v heads": of_heads}, takes=False, gives=False, work=work,
        )  # fmt: skip
        v_here, value = self._summed("v")
        value += [fused("d wv", k, v_here)] if self._d_wv == "d wv" else []
        k_here, key = self._summed("k")
        query = list[Kernel]()
        if self.is_fp32 and not self.shape.model.qk_norm:
            key.append(fused("d wk", k, k_here))
            query.append(fused("d wq", q, "d q"))
        else:
            key += [fused("d k", (k[0], 4), k_here), fused("d wk", k, "d k")]
            query += [fused("d q rotated", (q[0], 4), "d q"), fused("d wq", q, "d q rotated")]
        v, k_part, q_part = (
            product(f"d n1 of {x}", d, self.wide) for x, d in (("v", self._d_wv), ("k", "d wk"), ("q", "d wq"))
        )
        # One operator has returned them together: they go together.
        gone = Kernel(("d k heads", "d v heads") if self._d_wv == "d wv" else ("d k heads",), {})
        if self.shape.tp > 1:
            return [*copy, made, *value, *key, gone, *query, v, k_part, q_part]
        if self.k == self.q:  # pieces of both are made before either is rounded
            return [*copy, made, *value, v, *key[:-1], *query[:-1], gone, key[-1], k_part, query[-1], q_part]
        return [*copy, made, *value, v, *key, k_part, gone, *query, q_part]

    def _summed(self, x: str) -> tuple[str, list[Kernel]]:
        """Where the gradients of keys or values of this rank lie, and how they come there from those of all."""
        if not self.is_gathered:
            return f"d {x} heads", []
        return f"d {x} here", [
            fused(f"d {x} once", self.once, f"d {x} heads"), collective(f"d {x} here", f"d {x} once", self.k)
        ]  # fmt: skip

    @property
    def _d_wv(self) -> str:
        return "d wv" if self.repeats or self.is_ring or self.is_gathered else "d v heads"

    def backward(self, mode: Mode) -> list[Kernel]:
        """From "dx out" to "dx", the gradients of weights with it."""
        gathered = self._gather("d h", "d h gathered")
        d_h = "d h gathered" if gathered else "d h"
        is_again = mode == "op" and "attention" in self.keep  # else it is for what comes after it
        again = self._norm("n1", "x") if is_again else []
        parts = ("d n1 of v", "d n1 of k", "d n1 of q")
        ends = self._scatter(parts, "d n1", "d n1 scattered")
        d_n1 = ("d n1 scattered",) if ends else parts
        d_n2 = ("d n2 scattered",) if ends else ("d n2", "d n2 too")
        rows = [fused("attention rows", self.q, "attention")] if self.is_ring and is_again else []
        names = (
            ("q", "d wq", self.weights["q"]),
            ("k", "d wk", self.weights["k"]),
            ("v", self._d_wv, self.weights["k"]),
        )
        of_qkv = [Kernel((d, self.n1), {f"gradient of w{x}": size}) for x, d, size in reversed(names)]
        of_biases = [fused(f"gradient of w{x}.bias", self.biases[x], d) for x, d, _ in names if x in self.biases]
        of_heads = [
            fused("gradient of q norm", self.head, "wq", "q norm.rstd", "d q rotated"),
            fused("gradient of k norm", self.head, "wk", "k norm.rstd", "d k"),
        ] if self.shape.model.qk_norm else []  # fmt: skip
        return [
            *self._units_backward(mode), *again, *gathered,
            product("d attention", d_h, self.q),
            *(self._attention_again() if is_again else []),
            *self._attention_backward(mode), *ends,
            fused("gradient of n2", self.norm, "x", self.wo, "n2.rstd", *d_n2),
            fused("gradient of n1", self.norm, "x", "n1.rstd", *d_n1),
            *rows,
            Kernel((d_h, self.attended), {"gradient of wo": self.weights["q"]}),
            *of_heads, *of_biases, *of_qkv,
            fused("dx", self.hidden, "x", "n1.rstd", "sums", *d_n1, "d h", over="d h"),
        ]  # fmt: skip

    def count(self, kernel: Kernel) -> int:
        """How many operations of inductor's it is: of heads two pieces and what they are put together to, what an
        operator returns, the end of a collective."""
        name, qk_norm = next(iter(kernel.makes)), self.shape.model.qk_norm
        is_rotated = self.is_fp32 and not qk_norm  # what attention's backward returns: counted there
        if len(kernel.makes) > 1:
            return len(kernel.makes) + (7 if name == "d q" and is_rotated else 1)
        if not kernel.fused:
            return 1 if kernel.takes else 2
        if name == "d k" or name.endswith(PIECES) or (self.is_fp32 and name in ("q", "k")):
            return 5 if qk_norm and name.startswith("d ") else 3
        if name in ("d wq", "d wk") and is_rotated:
            return 0
        if name in ("gradient of n1", "gradient of n2"):
            return 1 if self.is_fp32 else 2
        if name == "mask of heads" and not kernel.reads:
            return 4
        return 3 if name.endswith((" message", " gathered")) else 1

    def programs(self, mode: Mode) -> "Programs":
        """Written once for each mode."""
        if mode not in self._programs:
            self._programs[mode] = Programs(self.hidden, self.forward(mode), self.backward(mode))
        return self._programs[mode]


class Programs:
    """The two programs of a block.

    Attributes:
        kept: what the backward reads of the forward.
        made: what the forward makes, its result too.
        steps: allocations and frees of the forward.
    """

    def __init__(self, hidden: Size, forward: list[Kernel], backward: list[Kernel]) -> None:
        self.backward = backward
        self.made = {name: size for kernel in forward for name, size in kernel.makes.items()}
        own = {name for kernel in backward for name in kernel.makes}
        read = {name for kernel in backward for name in kernel.reads} - own
        self.kept = {name: size for name, size in {"x": hidden, **self.made}.items() if name in read}
        self.steps = steps(forward, {"x": hidden}, [*self.kept, "out"])

    def forward_events(self, prefix: str, term: str) -> list[Event]:
        events = [
            Event(prefix + name, 0, size, term if name in self.kept else "recompute" if prefix else "forward")
            for name, size in self.steps
        ]
        return [
            event._replace(name="x", offset=1, term="activations") if event.name == "out" else event for event in events
        ]


def _programs(block: CompiledBlock, mode: Mode) -> Programs:
    return block.programs("op" if mode == "op" else "none")


def compiled_forward(block: CompiledBlock, mode: Mode) -> list[Event]:
    """Allocations and frees as of tape.forward; recompute of a whole block is outside of what is compiled."""
    programs = _programs(block, mode)
    events = programs.forward_events("", "activations")
    if mode == "full":
        events += [
            Event(name, 0, -bytes_of(size), "activations") for name, size in programs.kept.items() if name != "x"
        ]
    return events


def compiled_backward(block: CompiledBlock, mode: Mode, gradient_term: str) -> list[Event]:
    """And as of tape.backward."""
    programs, events = _programs(block, mode), list[Event]()
    program, kept = programs.backward, programs.kept
    prefix, term = ("again ", "recompute") if mode == "full" else ("", "activations")
    if mode == "full":
        events = programs.forward_events(prefix, term)
        events.append(Event(f"{prefix}out", 0, -bytes_of(block.hidden), "recompute"))
    gradients = [name for kernel in program for name in kernel.makes if name.startswith("gradient of ")]
    for name, size in steps(program, {**kept, "dx out": block.hidden}, [*gradients, "dx"]):
        if name.startswith("gradient of "):
            events.append(Event(name, 0, size, gradient_term))
        elif name in ("dx", "dx out"):
            events.append(Event("dx", int(name == "dx out"), size, "backward"))
        elif name in kept:
            events.append(
                Event(name if name == "x" else prefix + name, 0, size, "activations" if name == "x" else term)
            )
        elif name in programs.made:
            events.append(Event(f"again {name}", 0, size, "recompute"))
        else:
            events.append(Event(name, 0, size, "backward"))
    return events
