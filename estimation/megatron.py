"""Memory of Megatron-LM's ranks by what its code does (2025 to 2026-08, on Transformer Engine or on its own layers).

Facts, each with the file of github.com/NVIDIA/Megatron-LM, or of Transformer Engine (TE) or torch, that says so:
- Weights in 16 bits; gradients in one flat buffer, fp32 for bf16; main weights and two Adam moments, fp32 unless asked
  otherwise. The distributed optimizer shares out these three (core/distributed/param_and_grad_buffer.py,
  core/optimizer/distrib_optimizer.py), experts among their own data-parallel ranks (core/parallel_state.py). fp16
  updates from an fp32 copy of the gradients, which stays until the next step (core/optimizer/optimizer.py).
- Cross entropy works in place on an fp32 copy of the logits; the fused one makes a second, TE's works on the logits
  themselves (core/tensor_parallel/cross_entropy.py, core/fusions/fused_cross_entropy.py, TE: pytorch/cross_entropy.py).
- Order of the pipeline, groups of micro-batches, messages that are held: core/pipeline_parallel/schedules.py. Every
  chunk keeps its newest input and that one's gradient (core/transformer/transformer_block.py: set_input_tensor).
- A linear layer keeps its input; fused with a norm, the norm's too (TE: pytorch/module/layernorm_linear.py). Attention
  keeps q, k and v as one tensor or as copies, flash attention its result in two layouts if there are several rows;
  where kernels have to be deterministic cuDNN's runs on Hopper alone (TE:
  pytorch/attention/dot_product_attention/{utils,backends}.py).
- Dropout keeps one byte a number (core/fusions/fused_bias_dropout.py, compiled), an activation its input. Experts
  scale what the activation made (core/transformer/moe/experts.py); deterministic kernels put their results back by
  index_add, which keeps them (core/transformer/moe/moe_utils.py: unpermute; torch: derivatives.yaml).
- Workspaces: torch's of the forward and the backward thread (ATen: CublasHandlePool.cpp); TE's own, four for grouped
  products, three for overlapped ones (TE: pytorch/cpp_extensions/gemm.py). One buffer holds the head's gathered input
  under sequence parallelism, and the scores of Megatron's own attention (core/utils.py: GlobalMemoryBuffer).
- The data loader brings a mask of rows x S x S bytes (training/utils.py: get_batch_on_this_tp_rank).

Not counted: rounding inside the allocator, imbalance of experts, buffers of NCCL, what Python's garbage still holds.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from estimation.profiles import NotCovered
from estimation.schedules import Action

NAME = "Megatron-LM"
MIB = 1 << 20
DEFAULTS = {"kv-lora-rank": 32, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128, "moe-router-topk": 2}
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class Kept(NamedTuple):
    """A tensor that a layer keeps for its backward; recompute of any of `modules` drops it."""

    name: str
    size: int
    modules: tuple[str, ...] = ()


class Memory(NamedTuple):
    """Bytes of one rank: between steps, and at the highest point of one, of which `terms` are the parts."""

    resident: int
    peak: int
    terms: Mapping[str, int]


@dataclass(frozen=True)
class MegatronRun:
    """A run's shape; all that has a name on Megatron's command line besides is in `flags`.

    Attributes:
        groups: heads of keys and values.
        vocab: rows of the whole table, with padding.
        chunks: stages of a pipeline rank.
        half: fp16, not bf16.
        generation: CUDA compute capability times ten.
        recompute: uniform or block, and layers; None: not of whole layers.
        modules: what selective recompute drops.
    """

    layers: int
    dim: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    seq_len: int
    rows: int
    micro_batches: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    sequence_parallel: bool
    chunks: int
    shares_optimizer: bool
    half: bool
    generation: int
    recompute: tuple[str, int] | None
    modules: tuple[str, ...]
    float8: bool
    flags: Mapping[str, str]

    def has(self, name: str) -> bool:
        return self.flags.get(name, "False") not in ("False", "0", "None")

    def number(self, name: str, default: int = 0) -> int:
        return int(self.flags.get(name, DEFAULTS.get(name, default)))

    def drops(self, name: str) -> bool:
        """Whether hidden-dropout or attention-dropout is on."""
        return float(self.flags.get(name, "0.1")) > 0

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len // self.cp

    @property
    def cut(self) -> int:
        """Into how many parts sequence parallelism cuts the hidden states."""
        return self.tp if self.sequence_parallel else 1

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states between layers."""
        return self.tokens * self.dim * 2 // self.cut

    @property
    def gate(self) -> int:
        """First products of a feed-forward layer."""
        return 1 + self.has("swiglu")

    @property
    def norm(self) -> int:
        """Vectors of a norm: weight, and bias of a LayerNorm."""
        return 1 if self.flags.get("normalization") == "RMSNorm" else 2

    @property
    def expert_tp(self) -> int:
        return self.number("expert-tensor-parallel-size", self.tp)

    @property
    def keys(self) -> int:
        """This rank's heads of keys and of values."""
        return max(1, self.groups // self.tp)

    @property
    def has_mla(self) -> bool:
        return self.has("multi-latent-attention")

    @property
    def head_widths(self) -> tuple[int, int]:
        """Numbers of a head of queries and keys, and of values."""
        if self.has_mla:
            return self.number("qk-head-dim") + self.number("qk-pos-emb-head-dim"), self.number("v-head-dim")
        return (self.number("kv-channels", self.dim // self.heads),) * 2

    @property
    def is_local(self) -> bool:
        return self.flags.get("transformer-impl") == "local"

    @property
    def profile(self) -> str:
        """Whose layers, and whose sharding."""
        if self.has("use-megatron-fsdp"):
            return f"{NAME} (Megatron-FSDP)"
        return f"{NAME} (local layers)" if self.is_local else f"{NAME} (Transformer Engine)"

    @property
    def attention(self) -> str:
        """unfused, flash or fused."""
        backend = "unfused" if self.is_local else self.flags.get("attention-backend", "auto")
        if backend != "auto":
            return backend
        has_cudnn = self.generation == 90 or not self.has("deterministic-mode")
        if self.head_widths[0] != self.head_widths[1]:  # which flash attention 2 has not
            return "fused" if has_cudnn else "unfused"
        return "fused" if has_cudnn and self.generation >= 90 else "flash"

    @property
    def scores(self) -> int:
        """Numbers of whole attention scores."""
        return self.rows * self.heads // self.tp * self.seq_len**2

    @property
    def table(self) -> int:
        """Numbers of this rank's part of the table."""
        return self.vocab // self.tp * self.dim

    @property
    def logits(self) -> int:
        """Bytes of 16-bit logits."""
        return self.tokens * self.vocab // self.tp * 2

    @property
    def loss(self) -> str:
        """plain, or whose fused cross entropy: native or te."""
        fused = self.flags.get("cross-entropy-fusion-impl", "native")
        return fused if self.has("cross-entropy-loss-fusion") else "plain"

    def is_moe(self, layer: int) -> bool:
        text = self.flags.get("moe-layer-freq", "1")
        if not self.has("num-experts") or text.isdigit():
            return self.has("num-experts") and layer % int(text) == 0
        parts = re.findall(r"\[([01, ]+)\](?:\*(\d+))?", text)
        return [digit == "1" for part, times in parts for digit in re.findall(r"\d", part) * int(times or 1)][layer]

    @cached_property
    def stages(self) -> list[range]:
        """The layers of every stage; chunk c of rank r is stage c pp + r (core/transformer/transformer_block.py)."""
        count = self.pp * self.chunks
        first, last = (self.number(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
        if first or last:  # ranks at the ends hold so many in all their chunks
            inner = (self.layers - first - last) // max(1, self.pp - (first > 0) - (last > 0))
            ranks = [first or inner, *[inner] * (self.pp - 2), last or inner]
            sizes = [ranks[stage % self.pp] // self.chunks for stage in range(count)]
        else:
            ends = [self.has(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
            sizes = [(self.layers + sum(ends)) // count] * count
            sizes[0], sizes[-1] = sizes[0] - ends[0], sizes[-1] - ends[1]
        if sum(sizes) != self.layers:
            raise NotCovered(f"{self.layers} layers cannot be cut into {count} stages as its columns say")
        return [range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(count)]

    def layer_numbers(self, layer: int) -> tuple[int, int, int]:
        """Parameters of this rank's part of a layer: in products, besides, and of routed experts."""
        d, tp, bias = self.dim, self.tp, int(not self.has("disable-bias-linear"))
        (qk, v), own = self.head_widths, self.heads // self.tp
        if self.has_mla:
            q, kv, positions = (self.number(n) for n in ("q-lora-rank", "kv-lora-rank", "qk-pos-emb-head-dim"))
            products = (d * q + q * own * qk if q else d * own * qk) + d * (kv + positions)
            products += kv * own * (qk - positions + v) + own * v * d
            rest = self.norm * (q + kv) * self.has("qk-layernorm") + bias * d
        else:
            wide = (own + 2 * self.keys) * qk
            products, rest = d * wide + own * v * d, bias * (wide + d) + 2 * self.norm * qk * self.has("qk-layernorm")
        rest += 2 * self.norm * d
        if not self.is_moe(layer):
            first = self.gate * self.ffn // tp
            return products + d * first + self.ffn // tp * d, rest + bias * (first + d), 0
        experts, width = self.number("num-experts"), self.number("moe-ffn-hidden-size", self.ffn) // self.expert_tp
        products += (self.gate + 1) * d * self.number("moe-shared-expert-intermediate-size") // tp
        one = (self.gate + 1) * d * width + bias * (self.gate * width + d)
        return products, rest + experts * d, experts // self.ep * one

    def rank_numbers(self, rank: int) -> tuple[int, int, int]:
        """The same of all that a pipeline rank holds."""
        is_first, is_last = rank == 0, rank == self.pp - 1
        mtp = self.number("mtp-num-layers") * is_last
        held = [layer for stage in range(rank, self.pp * self.chunks, self.pp) for layer in self.stages[stage]]
        parts = [self.layer_numbers(layer) for layer in [*held, *[self.layers - 1] * mtp]]
        untied = self.has("untie-embeddings-and-output-weights")
        # The last stage has a head, or a copy of a tied table; MTP looks tokens up there.
        tables = is_first + (is_last and (untied or not is_first)) + (mtp > 0 and untied and not is_first)
        rest = tables * self.table + is_last * self.norm * self.dim + mtp * 3 * self.norm * self.dim
        if is_first and self.flags.get("position-embedding-type", "learned").startswith("learned"):
            rest += self.number("max-position-embeddings", self.seq_len) * self.dim
        products, besides, experts = (sum(part[i] for part in parts) for i in range(3))
        return products + mtp * 2 * self.dim**2 // self.tp, besides + rest, experts

    def weights(self, rank: int) -> Counter[str]:
        """Bytes of what belongs to parameters."""
        products, rest, experts = self.rank_numbers(rank)
        grads_16 = self.half or self.has("grad-reduce-in-bf16") or self.flags.get("main-grads-dtype") == "bf16"
        state = sum(WIDTHS[self.flags.get(f"{n}-dtype", "fp32")] for n in ("main-params", "exp-avg", "exp-avg-sq"))
        fsdp = self.flags.get("data-parallel-sharding-strategy", "") if self.has("use-megatron-fsdp") else ""
        ranks, copies = self.dp * self.cp, self.number("num-distributed-optimizer-instances", 1)
        sizes = Counter[str]()
        for count, over in ((products + rest, ranks), (experts, ranks * self.tp // (self.expert_tp * self.ep))):
            shards = max(1, over // copies) if self.shares_optimizer else 1
            sizes["weights"] += 2 * count // (shards if fsdp == "optim_grads_params" else 1)
            sizes["gradients"] += (2 if grads_16 else 4) * count // (shards if fsdp.startswith("optim_grads") else 1)
            sizes["optimizer"] += state * count // shards
            sizes["fp32 gradients"] += 4 * self.half * count // shards
        if self.float8:  # products read rows and columns; Blackwell reads one layout both ways unless blocks are scaled
            once = self.generation >= 100 and self.flags.get("fp8-recipe") not in ("mxfp8", "blockwise")
            sizes["weights"] += (products + experts) * ((1 if once else 2) - 2 * self.has("fp8-param-gather"))
        if not self.has("no-gradient-accumulation-fusion"):  # autograd is given a gradient per shape that nobody reads
            table = self.table * (rank in (0, self.pp - 1))
            sizes["dummy gradients"] += 2 * (table + self._largest(range(self.layers)))
        return sizes

    def _largest(self, layers: range) -> int:
        return max((self.layer_numbers(layer)[0] for layer in layers), default=0)

    def workspaces(self, rank: int) -> int:
        """Bytes that products of matrices and Megatron's global buffer keep; without an own setting of torch's."""
        own = 32 * MIB if self.generation >= 90 else 4 * MIB
        one = 32 * MIB if self.has("deterministic-mode") or self.generation == 90 else 8 * MIB + MIB // 8
        buffer = 2 * self.scores * self.is_local
        if self.cut > 1 and rank == self.pp - 1:
            buffer = max(buffer, self.hidden * self.cut)
        kinds = 1 + 4 * self.has("moe-grouped-gemm") + 3 * self.has("tp-comm-overlap")
        return 2 * one + own * kinds * (not self.is_local) + buffer

    # What a layer keeps of a micro-batch

    def layer_keeps(self, layer: int) -> list[Kept]:
        moe, stats = self.is_moe(layer), self.tokens // self.cut * 4 * self.norm
        mask = [Kept("dropout mask", self.hidden // 2)] * self.drops("hidden-dropout")
        normed = self.hidden // (1 + self.float8)
        keeps = [Kept("x", self.hidden + stats), Kept("x normed", normed, ("layernorm",) if self.has_mla else ())]
        keeps += [*self._attention_keeps(), *mask, Kept("h", self.hidden + stats)]
        keeps.append(Kept("h normed", normed, ("layernorm",) if moe else ("mlp",)))
        mlp = self._expert_keeps() if moe else self._mlp_keeps(self.tokens, self.ffn // self.tp, "mlp")
        return [*keeps, *mlp, *mask]

    def _attention_keeps(self) -> list[Kept]:
        own, (qk, v) = self.heads // self.tp, self.head_widths
        result = self.tokens * own * v * 2
        if self.has_mla:
            low = self.number("q-lora-rank") + self.number("kv-lora-rank")  # before and after their norms
            keeps = [Kept("low ranks", 2 * low * self.tokens // self.cut * 2)]
            keeps.append(Kept("q, k, v", self.tokens * own * (2 * qk + v) * 2, ("mla_up_proj",)))
        else:
            keeps = [Kept("q, k, v", self.tokens * (own + 2 * self.keys) * qk * 2)]
        keeps += [Kept("attention", result), Kept("attention in fp8", result // 2 * self.float8)]
        if self.attention != "unfused":
            twice = self.attention == "flash" and self.rows > 1 and self.cp == 1
            kernel = result * twice + self.tokens * own * 4
            return [*keeps, Kept("result and logsumexp of the kernel", kernel, ("core_attn",))]
        torchs = self.is_local and (self.seq_len > 4096 or self.has("no-masked-softmax-fusion"))
        wide = self.has("attention-softmax-in-fp32") or self.has("apply-query-key-layer-scaling")
        number = (4 if torchs and wide else 2) + 3 * self.drops("attention-dropout")  # its mask, and what it makes
        return [*keeps, Kept("scores", self.scores * number, ("core_attn",))]

    def _mlp_keeps(self, tokens: int, width: int, *modules: str) -> list[Kept]:
        first = self.gate * (1 if self.has("activation-func-fp8-input-store") else 2)
        activated = Kept("activated", tokens * width * 2 // (1 + self.float8), (*modules, f"{modules[0]}_act"))
        return [Kept("first products", tokens * width * first, modules), activated]

    def _expert_keeps(self) -> list[Kept]:
        """Of this rank's experts, with as many tokens for each."""
        own, width = self.tokens // self.cut, self.number("moe-ffn-hidden-size", self.ffn) // self.expert_tp
        routed = own * self.number("moe-router-topk") * self.expert_tp
        keeps = [Kept("router", own * self.number("num-experts") * 9, ("moe",))]  # fp32 logits, probabilities, a bool
        keeps.append(Kept("routed tokens", routed * self.dim * 2 // (1 + self.float8), ("moe",)))
        keeps += self._mlp_keeps(routed, width, "moe")
        if self.gate == 1:  # no kernel fuses GELU and the probabilities
            keeps.append(Kept("not yet scaled", routed * width * 2, ("moe", "moe_act")))
        if self.has("deterministic-mode") and not self.has("moe-permute-fusion"):
            keeps.append(Kept("results of experts", routed * self.dim * 2, ("moe",)))
        shared = self.number("moe-shared-expert-intermediate-size") // self.tp
        return keeps + self._mlp_keeps(self.tokens, shared, "shared_experts", "moe") * (shared > 0)

    def _sizes(self, layers: range, *, dropped: bool) -> list[int]:
        """Bytes of each layer that selective recompute drops, or does not."""
        modules = set(self.modules)
        keeps = [self.layer_keeps(layer) for layer in layers]
        return [sum(k.size for k in of_layer if dropped != modules.isdisjoint(k.modules)) for of_layer in keeps]

    def stored(self, layers: range) -> int:
        """Bytes that layers keep of a micro-batch from its forward to its backward."""
        sizes = self._sizes(layers, dropped=False)
        if self.recompute is None:
            return sum(sizes)
        method, count = self.recompute
        if method == "block":
            return min(count, len(sizes)) * self.hidden + sum(sizes[count:])
        return -(-len(sizes) // count) * self.hidden

    def work_of_backward(self, layers: range) -> dict[str, int]:
        """Bytes that are made while one layer of these runs backward: gradients, and what is recomputed."""
        if not layers:
            return {}
        wide = [kept.size for layer in layers for kept in self.layer_keeps(layer) if kept.name == "first products"]
        weight = 2 * self._largest(layers) * self.has("no-gradient-accumulation-fusion")
        again = sorted(self._sizes(layers, dropped=True))[-1:]
        if self.recompute is not None:
            count = self.recompute[1] if self.recompute[0] == "uniform" else 1
            again = sorted(self._sizes(layers, dropped=False))[-count:]
        scores = 2 * self.scores * (self.attention == "unfused")
        return {"backward": self.hidden + max(scores, *wide) + weight, "recomputed": sum(again)}

    # The pipeline

    def actions(self, rank: int) -> Iterator[Action]:
        """Forwards and backwards, with the chunk in place of the stage."""
        count, chunks, warm = self.micro_batches, self.chunks, self.pp - rank - 1
        group = count
        if chunks > 1:  # the trainer refuses a last group that is neither whole nor as large as the pipeline
            group = next((g for g in range(self.pp, count + 1) if not 0 < count % g < self.pp), count)
            warm = 2 * warm + (chunks - 1) * group
        starts = range(0, count, group)
        order = [(c, i) for s in starts for c in range(chunks) for i in range(s, min(s + group, count))]
        backwards = iter([Action("B", chunks - 1 - chunk, i) for chunk, i in order])
        for index, (chunk, i) in enumerate(order):
            yield Action("F", chunk, i)
            if index >= warm:
                yield next(backwards)
        yield from backwards

    def memory(self, rank: int) -> Memory:
        """What one pipeline rank holds."""
        static = self.weights(rank)
        left, static["workspaces"] = static.pop("fp32 gradients"), self.workspaces(rank)
        parked = 2 * self.hidden * (self.chunks - (rank == 0)) * (self.pp > 1)
        resident = static.total() + left + parked
        if self.has("use-megatron-fsdp"):  # this layer and the next, and the table
            layer = max(sum(self.layer_numbers(layer)) for layer in range(self.layers))
            static["gathered weights"] = 2 * (2 * layer + self.table)
        highest, parts = resident, [{"fp32 gradients": left, "newest inputs": parked}]
        kept, base = Counter[str](), static.total()
        for kind, chunk, _ in self.actions(rank):
            stage = chunk * self.pp + rank
            own = self._own(stage)
            if kind == "F":
                kept.update(own)
            for work in self._forward(stage) if kind == "F" else self._backward(stage):
                now = base + kept.total() + sum(work.values())
                if now > highest:
                    highest, parts = now, [dict(kept), work]
            if kind == "B":
                kept.subtract(own)
                kept.update(self._deferred(stage, kept["deferred"]))
        for part in parts:
            static.update(part)
        return Memory(resident, highest, {name: size for name, size in static.items() if size})

    def _is_last(self, stage: int) -> bool:
        return stage == self.pp * self.chunks - 1

    def _own(self, stage: int) -> Counter[str]:
        """What a stage keeps from its forward to its backward."""
        own = Counter({"activations": self.stored(self.stages[stage])})
        own["activations"] += self.hidden // 2 * (stage == 0 and self.drops("hidden-dropout"))
        if self._is_last(stage):
            mtp = self.number("mtp-num-layers")
            own["activations"] += mtp * (self.stored(range(self.layers - 1, self.layers)) + 4 * self.hidden)
            own["input of the head"] = 2 * self.hidden * (1 + mtp)
            own["probabilities"] = self._probabilities * (1 + mtp)
        return own

    @property
    def _probabilities(self) -> int:
        return self.logits * (1 if self.loss == "te" else 2)

    def _forward(self, stage: int) -> Iterator[dict[str, int]]:
        has_mask = (stage == 0 or self._is_last(stage)) and not self.has("no-create-attention-mask-in-dataloader")
        work = {"mask": self.rows * self.seq_len**2 * has_mask}
        if stage:  # a gradient that was sent, and in the interleaved schedule the next one
            work["messages"] = self.hidden * min(self.chunks, 2)
        if self._is_last(stage) and self.loss != "te":
            work |= {"logits": self.logits, "second fp32 logits": 2 * self.logits * (self.loss == "native")}
        yield work

    def _backward(self, stage: int) -> Iterator[dict[str, int]]:
        gone = 0
        if self._is_last(stage):
            gone = self._probabilities
            yield {"d logits": self.logits * (self.loss != "te")}
            head = {"d logits": self.logits, "gradient of the table": 2 * self.table, "backward": self.hidden}
            yield {"probabilities": -gone, **head}
        yield {"probabilities": -gone, **self.work_of_backward(self.stages[stage])}

    def _deferred(self, stage: int, held: int) -> Counter[str]:
        """Gradients of logits, and inputs, whose product waits for the end of the step."""
        if not (self._is_last(stage) and self.has("defer-embedding-wgrad-compute")):
            return Counter()
        one = self.logits + self.tokens * self.dim * 2
        limit = self.number("wgrad-deferral-limit") or self.micro_batches
        return Counter({"deferred": one * (held < limit * one)})
