"""Which linear layers run in float8, and whether they can. Imports no torch: it is asked before any process starts.

Layers are named as in checkpoints without ".weight", shapes are (rows, columns) = (outputs, inputs).
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from titan_like.config.schema import AUTO_FILTER, Config
from titan_like.models.flavors import ModelConfig

MULTIPLE = 16  # of rows, columns and tokens: what float8 matrix products of the hardware ask for
CUT_BY_COLUMNS = ("attention.wo", "feed_forward.w2")  # by tensor parallelism; all others are cut by rows
HEAD = "output"


@dataclass(frozen=True)
class Plan:
    """Attributes:
    converted: names of the layers that run in float8.
    skipped: reason -> names of the layers that do not.
    """

    converted: tuple[str, ...]
    skipped: dict[str, tuple[str, ...]]

    def describe(self) -> list[str]:
        """One line for what is converted and one for each reason not to."""
        total = len(self.converted) + sum(len(names) for names in self.skipped.values())
        lines = [f"{len(self.converted)} of {total} linear layers: {grouped(self.converted)}"]
        return lines + [f"{len(names)} not converted ({why}): {grouped(names)}" for why, names in self.skipped.items()]


def float8_plan(model: ModelConfig, config: Config) -> Plan:
    """Sort every linear layer of the whole model; with tensor parallelism by the part that one rank multiplies."""
    converted: list[str] = []
    skipped: dict[str, list[str]] = {}
    for name, shape in linear_layers(model, config.parallelism.tensor_parallel_degree).items():
        reason = _reason_to_skip(name, shape, config)
        (skipped.setdefault(reason, []) if reason else converted).append(name)
    return Plan(tuple(converted), {reason: tuple(names) for reason, names in skipped.items()})


def linear_layers(model: ModelConfig, tp: int = 1) -> dict[str, tuple[int, int]]:
    """Every linear layer with the shape of one tensor-parallel rank's part."""
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    block = {
        "attention.wq": (queries, model.dim),
        "attention.wk": (keys, model.dim),
        "attention.wv": (keys, model.dim),
        "attention.wo": (model.dim, queries),
        "feed_forward.w1": (model.ffn_dim, model.dim),
        "feed_forward.w2": (model.dim, model.ffn_dim),
        "feed_forward.w3": (model.ffn_dim, model.dim),
    }
    parts = {
        name: (rows, columns // tp) if name in CUT_BY_COLUMNS else (rows // tp, columns)
        for name, (rows, columns) in block.items()
    }
    layers = {f"layers.{i}.{name}": shape for i in range(model.n_layers) for name, shape in parts.items()}
    return {**layers, HEAD: (-(-model.vocab_size // tp), model.dim)}


def _reason_to_skip(name: str, shape: tuple[int, int], config: Config) -> str:
    """Why a layer stays as it is; empty: it is converted."""
    settings = config.float8
    if name == HEAD:
        return "the head never is"
    if any(part in name for part in settings.filter_fqns if part != AUTO_FILTER):
        return "named in float8.filter_fqns"
    if any(size % MULTIPLE for size in shape):
        per_rank = " of one tensor-parallel rank" if config.parallelism.tensor_parallel_degree > 1 else ""
        return f"{shape[0]} x {shape[1]}{per_rank} is not a multiple of {MULTIPLE} both ways"
    if AUTO_FILTER in settings.filter_fqns and is_small(settings.recipe, *shape):
        return f"{shape[0]} x {shape[1]} is too small to gain"
    return ""


def is_small(recipe: str, rows: int, columns: int) -> bool:
    """Whether float8 is slower than bf16 there: the thresholds of torchao's auto filter, measured on an H100.

    torchao has none for rowwise_with_gw_hp, whose forward is that of rowwise.
    """
    if recipe == "tensorwise":
        return columns <= 4096 and rows <= 1024
    return rows <= 2048 or columns <= 1024 or (rows <= 4096 and columns <= 2048)


def float8_checks(model: ModelConfig, config: Config, world_size: int) -> list[str]:
    """One sentence for each reason why float8 cannot run as asked; `world_size` 0: unknown."""
    settings = config.float8
    if not settings.enable:
        return []
    layers, plan = linear_layers(model), float8_plan(model, config)
    unknown = [p for p in settings.filter_fqns if p != AUTO_FILTER and not any(p in name for name in layers)]
    problems = [
        f'float8.filter_fqns names "{part}", which is in the name of no linear layer; there are {grouped(layers)}'
        for part in unknown
    ]
    if not plan.converted:
        # One reason of each kind: "64 x 128 is too small to gain" stands for all sizes that are.
        reasons = {
            why.partition(" is ")[2] or why: why for why, names in reversed(plan.skipped.items()) if names != (HEAD,)
        }
        small = any("too small" in kind for kind in reasons)
        remedy = f'leave "{AUTO_FILTER}" out of float8.filter_fqns or ' if small else ""
        problems.append(
            f"float8.enable would convert no layer of {config.model.name} {config.model.flavor} "
            f"({'; '.join(reasons.values())}); {remedy}turn float8.enable off"
        )
    problems += _tokens(config)
    if settings.enable_fsdp_float8_all_gather and world_size > 0:
        problems += _uneven(model, config, plan, world_size)
    return problems


def _tokens(config: Config) -> list[str]:
    """The gradient of a weight is a product over the tokens that pass through a layer together."""
    parallelism, training = config.parallelism, config.training
    key, rows = "training.local_batch_size", training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        key, rows = "parallelism.pipeline_parallel_microbatch_size", parallelism.pipeline_parallel_microbatch_size
    cp = parallelism.context_parallel_degree
    tokens = rows * training.seq_len // cp
    if tokens % MULTIPLE == 0 or config.float8.recipe == "rowwise_with_gw_hp":
        return []
    shown = f" / parallelism.context_parallel_degree ({cp})" if cp > 1 else ""
    return [
        f"{key} ({rows}) x training.seq_len ({training.seq_len}){shown} = {tokens} tokens is not a multiple of "
        f"{MULTIPLE}, which float8 matrix products ask for; change training.seq_len"
    ]


def _uneven(model: ModelConfig, config: Config, plan: Plan, world_size: int) -> list[str]:
    parallelism = config.parallelism
    ranks = world_size // (
        parallelism.pipeline_parallel_degree
        * parallelism.data_parallel_replicate_degree
        * parallelism.tensor_parallel_degree
    )
    shapes = linear_layers(model, parallelism.tensor_parallel_degree)
    bad = [name for name in plan.converted if ranks and shapes[name][0] % ranks]
    if not bad:
        return []
    rows = ", ".join(str(rows) for rows in sorted({shapes[name][0] for name in bad}))
    return [
        f"float8.enable_fsdp_float8_all_gather shards rows evenly only, but {ranks} ranks do not divide the {rows} "
        f"rows of {grouped(bad)}; turn it off or lower parallelism.data_parallel_shard_degree"
    ]


def grouped(names: Iterable[str]) -> str:
    """In short, as in "layers.*.{attention.wk, attention.wv} (32 each), output": the same in so many layers."""
    layers, others = Counter[str](), []
    for name in names:
        if match := re.match(r"layers\.\d+\.(.+)", name):
            layers[match[1]] += 1
        else:
            others.append(name)
    counts = dict.fromkeys(layers.values())
    shown = [f"layers.*.{{{', '.join(n for n in layers if layers[n] == count)}}} ({count} each)" for count in counts]
    return ", ".join(shown + others)
