"""Published runs of Megatron-LM, and of trainers that run its code, read from the rows of a table."""

import re
from collections.abc import Mapping

from estimation.megatron import MegatronRun, Memory
from estimation.profiles import NotCovered

FRAMEWORKS = ("megatron-lm/", "megatron-lm 20", "megatron-bridge", "primus/megatron")
GENERATIONS = {"A100": 80, "A800": 80, "H100": 90, "H200": 90, "H800": 90, "B200": 100, "B300": 100}
# Options that change memory in ways that the model of the code has not.
UNKNOWN = (
    "offload", "cuda-graph", "paged-stash", "hybrid-layer-pattern", "pipeline-model-parallel-layout", "heterogeneous",
    "experimental-attention-variant", "moe-latent", "overlap-moe-expert-parallel-comm", "delay-wgrad", "fp32-residual",
    "torch-fsdp2", "modelopt", "muon",
)  # fmt: skip
NEEDED = ("layers", "dim", "heads", "ffn_dim", "vocab", "seq_len", "micro_bs", "tp", "pp")
# What the recipe of a test says and its row does not: tests/functional_tests/test_cases/gpt/NAME/model_config.yaml
RECIPES = {"uninstall_te": {"no-masked-softmax-fusion": "True", "apply-query-key-layer-scaling": "True"}}


def covers(row: Mapping[str, str]) -> bool:
    """Whether a row's trainer runs Megatron's code."""
    return row["framework"].lower().startswith(FRAMEWORKS)


def run_of(row: Mapping[str, str]) -> MegatronRun:
    """The run that a row describes.

    Raises:
        NotCovered: a column that is missing, or an option that is not modelled.
    """
    flags = dict(part.split("=", 1) for part in row["other_flags"].split(";") if "=" in part)
    if missing := [name for name in NEEDED if not re.search(r"\d", row[name])]:
        raise NotCovered(f"its {', '.join(missing)} are not published")
    if unknown := [name for name in UNKNOWN if name in row["model"] or any(name in flag for flag in flags)]:
        raise NotCovered(f"{unknown[0]} is not modelled")
    if not row["optimizer"].startswith("Adam"):
        raise NotCovered(f"the optimizer {row['optimizer'] or 'that is not published'} is not modelled")
    for part, more in RECIPES.items():
        flags |= more if part in row["model"] else {}
    layers, pp, tp, rows, dim, heads = (int(row[name]) for name in ("layers", "pp", "tp", "micro_bs", "dim", "heads"))
    dp = int(row["dp_shard"] or 1) * int(row["dp_replicate"] or 1)
    micro_batches = int(row["grad_accum"] or 0) or int(row["global_bs"] or 0) // (rows * dp)
    if micro_batches < 1:
        raise NotCovered("its batch is not published")
    if experts := re.search(r"moe (\d+) x(\d+)(?: top(\d+))?", row["ffn_dim"]):
        names = ("moe-ffn-hidden-size", "num-experts", "moe-router-topk")
        flags = {name: value for name, value in zip(names, experts.groups(), strict=True) if value} | flags
    vocab, multiple = _first(row, "vocab", r"~?([1-9]\d{0,11})(\(.*\))?"), re.search(r"mult of (\d+)", row["vocab"])
    padding = int(multiple[1]) if multiple else 128 * tp
    return MegatronRun(
        layers=layers, dim=dim, heads=heads, groups=int(row["kv_heads"] or heads), vocab=-(-vocab // padding) * padding,
        ffn=_first(row, "ffn_dim", r"(?:moe |dense )?([1-9]\d{0,11})(.*moe.*| x\d.*)?"),
        seq_len=int(row["seq_len"]), rows=rows, micro_batches=micro_batches, dp=dp, tp=tp, pp=pp,
        cp=int(row["cp"] or 1), ep=int(row["ep"] or 1), sequence_parallel=row["sp"] == "1",
        chunks=_chunks(row["pp_schedule"], layers, pp), shares_optimizer="ZeRO" in row["optimizer"],
        half=row["precision"].startswith("fp16"), generation=_generation(row["gpu"]), recompute=_recompute(row["ac"]),
        modules=_modules(row["ac"], flags), float8=bool(row["float8"]), flags=flags,
    )  # fmt: skip


def _first(row: Mapping[str, str], name: str, pattern: str) -> int:
    """Raises: NotCovered, where a column is not a number with a remark."""
    if found := re.fullmatch(pattern, row[name]):
        return int(found[1])
    raise NotCovered(f"{name} {row[name]!r} is not understood")


def _generation(gpu: str) -> int:
    for name, generation in GENERATIONS.items():
        if name in gpu:
            return generation
    raise NotCovered(f"kernels and workspaces on {gpu or 'a GPU that is not named'} are not known")


def _chunks(schedule: str, layers: int, pp: int) -> int:
    if found := re.search(r"(?:vstages=|vpp|VP=)(\d+)", schedule):
        return int(found[1])
    if found := re.search(r"layers_per_vstage=(\d+)", schedule):
        return layers // pp // int(found[1])
    if schedule and not schedule.startswith(("1F1B", "VP=")):
        raise NotCovered(f"the schedule {schedule} is not modelled")
    return 1


def _recompute(text: str) -> tuple[str, int] | None:
    if text.startswith(("none", "selective")):
        return None
    if not text.startswith("full"):
        raise NotCovered(f"recompute {text!r} is not modelled")
    found = re.search(r"(uniform|block)\D*(\d+)", text)
    return (found[1], int(found[2])) if found else ("uniform", 1)


def _modules(text: str, flags: Mapping[str, str]) -> tuple[str, ...]:
    """Megatron's --recompute-modules; core_attn is its default."""
    if not text.startswith("selective"):
        return ()
    return tuple(re.findall(r"\w+", flags.get("recompute-modules", "core_attn")))


def measured_rank(row: Mapping[str, str], run: MegatronRun) -> Memory:
    """The last rank of the pipeline where the row says so, else the fullest."""
    ranks = [run.pp - 1] if "last rank" in row["mem_kind"] else range(run.pp)
    return max((run.memory(rank) for rank in ranks), key=lambda memory: memory.peak)
