"""The jobs that published rows of PyTorch trainers describe; Megatron's are in megatron_rows.py."""

import re
from dataclasses import replace
from typing import Any, Literal

from estimation.float8 import Float8
from estimation.job import Job
from estimation.profiles import (
    TITAN_2024_03,
    TITAN_2024_06,
    TITAN_2024_08,
    TITAN_2024_12,
    TITAN_2025_06,
    TITAN_2025_11,
    TITAN_2025_12,
    TORCHTUNE,
    TORCHTUNE_FSDP2,
    NotCovered,
    Profile,
)
from estimation.row_table import Row
from estimation.schedules import Action, Schedule, single_stage, torch_tables
from titan_like.config.schema import SINGLE_STAGE
from titan_like.models.flavors import ModelConfig, block_parameters

NUMBER = r"([0-9]{1,12})(\((un)?tied\))?"  # of a vocabulary with the remark whether one table serves both ends
TRAINERS = ("torchtitan", "torchtune", "prime-rl")


def is_torch(row: Row) -> bool:
    """Whether a row's trainer is one of those with profiles."""
    return row["framework"].lower().startswith(TRAINERS)


def profile_of(row: Row) -> Profile:
    """The profile of a row's trainer at its time.

    Raises:
        NotCovered: a trainer without a profile.
    """
    if not is_torch(row):
        raise NotCovered(f"no profile for {row['framework'] or 'a trainer that is not named'}")
    if row["framework"].lower().startswith("torchtune"):
        return TORCHTUNE if int(row["dp_shard"] or 1) == 1 else TORCHTUNE_FSDP2
    year, month = date_of(row)
    if (year, month) < (2024, 5):
        return TITAN_2024_03
    if (year, month) < (2024, 9):
        return TITAN_2024_06 if month < 8 else TITAN_2024_08
    if (year, month) < (2025, 11):
        return _as_launched(row, TITAN_2024_12 if (year, month) < (2025, 5) else TITAN_2025_06, (year, month))
    return _as_launched(row, TITAN_2025_11 if (year, month) < (2025, 12) else TITAN_2025_12, (year, month))


def _as_launched(row: Row, profile: Profile, date: tuple[int, int]) -> Profile:
    """What depends on the device and on the script.

    Expandable segments are there on ROCm since March 2026 (pytorch pull request 177974), and are set by run_train.sh,
    which one published table did not use (its page has the command). On Blackwell torchtitan chose cuDNN's attention
    before it did so everywhere (models/attention.py: has_cuda_capability(10, 0)).
    """
    has_none = (row["gpu"].startswith("MI") and date < (2026, 4)) or "trainy" in row["source_url"]
    is_expandable = profile.expandable and not has_none
    keeps_attention = profile.keeps_attention and not (profile is TITAN_2025_06 and "B200" in row["gpu"])
    return replace(profile, expandable=is_expandable, keeps_attention=keeps_attention)


# Commits of torchtitan that published rows name without a date.
COMMITS = {
    "83c879f18": (2024, 3), "40f8fd007": (2024, 6), "6a6f755d2": (2024, 11), "9dec370": (2024, 12),
    "5940ddeb5": (2025, 2), "069bae286": (2025, 2), "88247277c": (2025, 2), "473674acf": (2025, 2),
    "e23bb707d": (2025, 3), "9a2f578": (2025, 3), "e7c0cae": (2025, 6), "2c8b594": (2025, 8),
    "6fc499f": (2025, 8), "d9bdfbb20": (2025, 11),
}  # fmt: skip


def date_of(row: Row) -> tuple[int, int]:
    """Year and month of a row's trainer.

    Raises:
        NotCovered: no date is published.
    """
    return _date(f"{row['framework_version']} {row['notes']}")


def _date(text: str) -> tuple[int, int]:
    for commit, date in COMMITS.items():
        if commit in text:
            return date
    if found := re.search(r"(20\d\d)-(\d\d)(?:/(\d\d))?", text):
        return int(found[1]), int(found[3] or found[2])
    raise NotCovered(f"no date in the version {text.strip()!r}")


def job_of_row(row: Row) -> Job:
    """The job that a row describes.

    Raises:
        NotCovered: the row asks for what no profile describes.
    """
    flags = row["other_flags"]
    is_one_graph = "SimpleFSDP" in flags
    compiled = is_one_graph or not row["compile"].startswith("no")
    model = _model(row)
    profile = _with_flags(row, profile_of(row), compiled)
    number = {name: _whole(row, name) for name in ("micro_bs", "seq_len")}
    number |= {name: int(row[name] or 1) for name in ("dp_shard", "dp_replicate", "tp", "pp", "cp")}
    fsdp, is_fp32 = number["dp_shard"] * number["cp"], profile.weights == "fp32"
    job = Job(
        model=model, rows=number["micro_bs"], batch_rows=number["micro_bs"], seq_len=number["seq_len"],
        accumulation=int(row["grad_accum"] or 1), replicate=number["dp_replicate"], fsdp=fsdp, cp=number["cp"],
        tp=number["tp"], stages=(range(model.n_layers),), actions=((Action("F", 0, 0), Action("B", 0, 0)),),
        recompute=_recompute(row["ac"]), number=2, reduce_number=4 if is_fp32 else 2, reshard="never" not in flags,
        wrapped=is_fp32 or fsdp > 1, compiled=compiled, float8=_float8(row, model.n_layers),
        only_first_step="step 1" in row["notes"].split(";")[0], profile=profile,
    )  # fmt: skip
    return _pipelined(job, number["pp"], row["pp_schedule"]) if number["pp"] > 1 else job


def _with_flags(row: Row, profile: Profile, compiled: bool) -> Profile:
    """What a row's flags change.

    Raises:
        NotCovered: to what no profile describes.
    """
    flags, changes = row["other_flags"], dict[str, Any]()
    loss = "chunked" if "chunked" in flags + row["compile"] else "whole"
    if compiled and profile.compiles_loss and "SimpleFSDP" not in flags:
        loss = profile.compiles_loss[loss]
    changes.update(loss=loss, loss_chunks=8 if "chunked" in loss else 1)
    if "FSDP1" in flags:
        changes.update(flat=True, last_block_stays=False)
    if "LoRA" in flags:
        raise NotCovered("adapters have no profile")
    if profile.name.startswith("torchtune") and "packed" not in flags:
        raise NotCovered("batches that are not packed have no fixed length")
    if "SimpleFSDP" in flags:
        changes.update(own_streams=False)
    if "8bit" in row["optimizer"]:
        changes.update(adam="8bit")
    if "abs() in SAC" in flags and "rowwise" in row["float8"]:  # of other recipes nobody reads what is kept
        raise NotCovered("a defect of that commit, which kept absolute values of weights")
    if "RS copy-in in RS stream" in flags:  # pytorch pull request 129721, before and after
        changes.update(flat_pool="reduce")
    if "always" in flags:
        changes.update(last_block_stays=False)
    if "activation offloading" in flags and row["ac"].startswith("full"):
        changes.update(stash=5)  # torchtune/training/_activation_offloading.py: max_fwd_stash_size
    elif "offload" in flags:
        raise NotCovered("offloading of anything but the inputs of blocks has no profile")
    if "optimizer_in_bwd" in flags:
        changes.update(updates_in_backward=True)
    return replace(profile, **changes)


def _pipelined(job: Job, degree: int, schedule: str) -> Job:
    """A batch is split into as many micro-batches as ranks, torchtitan's default; weights stay gathered."""
    from titan_like.parallel.pipeline import balanced_ranges  # imports torch

    if not schedule:
        raise NotCovered("its pp_schedule is not published")
    virtual = 1 if schedule in SINGLE_STAGE else 2
    model, table = job.model, float(job.model.vocab_size * job.model.dim)
    count, block = degree * virtual, float(block_parameters(model))
    if model.n_layers < count:
        raise NotCovered(f"{model.n_layers} layers cannot be cut into {count} stages")
    cuts = balanced_ranges(model.n_layers, count, first=table, last=table, block=block)
    if virtual == 1:
        actions = tuple(single_stage(schedule, degree, rank, degree) for rank in range(degree))
    else:
        actions = torch_tables(schedule, degree, virtual, degree)
    rows = max(1, job.batch_rows // degree)
    kind: Schedule = schedule if schedule in ("GPipe", "1F1B") else "looped"  # type: ignore[assignment]
    return replace(job, rows=rows, stages=tuple(cuts), actions=actions, schedule=kind, reshard=False)


PRODUCTS = frozenset({"wq", "wk", "wv", "wo", "w1", "w2", "w3"})  # of a block; torchtitan's files filter out the head


def _float8(row: Row, layers: int) -> Float8 | None:
    """None for micro-scaled formats too, whose products are like those in bf16 for memory."""
    recipe = re.match(r"float8 (tensorwise|rowwise_with_gw_hp|rowwise)", row["float8"])
    if recipe is None:
        return None
    return Float8(recipe[1], (PRODUCTS,) * layers, gathered="fp8 all-gather" in row["float8"])  # type: ignore[arg-type]


def _model(row: Row) -> ModelConfig:
    if "moe" in row["ffn_dim"]:
        raise NotCovered("mixtures of experts have no profile")
    dim, heads = _whole(row, "dim"), _whole(row, "heads")
    return ModelConfig(
        vocab_size=_whole(row, "vocab"), dim=dim, n_layers=_whole(row, "layers"), n_heads=heads,
        n_kv_heads=_whole(row, "kv_heads"), head_dim=dim // heads, ffn_dim=_whole(row, "ffn_dim"),
        max_seq_len=_whole(row, "seq_len"),
        tie_embeddings="(tied)" in row["vocab"],
    )  # fmt: skip


def _whole(row: Row, name: str) -> int:
    """Raises: NotCovered, where the row has no whole number there."""
    if found := re.fullmatch(NUMBER, row[name]):
        return int(found[1])
    raise NotCovered(f"its {name} is not published" if not row[name] else f"{name} {row[name]} has no profile")


def _recompute(text: str) -> Literal["none", "full", "op"] | int:
    """As [activation_checkpoint] would say it."""
    if found := re.search(r"every (\d+)", text):
        return int(found[1])
    if text.startswith("selective op"):
        return "op"
    if text.startswith("full"):
        return "full"
    if text.startswith("none"):
        return "none"
    raise NotCovered(f"recompute {text!r} has no profile")
