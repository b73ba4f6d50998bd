"""Whether the cells of a published row are numbers and words that are known, and agree with each other."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import prod

from pydantic import ValidationError

from estimation.megatron_rows import covers
from estimation.profiles import NotCovered
from estimation.row_table import BEYOND, MEASURED, WHOLE, Row
from titan_like.config.schema import SCHEDULES

# More than any run has: what would be estimated for minutes, and mean nothing.
LIMITS = {"layers": 1000, "pp": 128, "grad_accum": 10_000}
MESH = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
Words = Mapping[str, tuple[str, ...]]
# What cells say that is understood; each may be followed by a remark. An empty cell is the trainer's default.
TORCH: Words = {
    "compile": ("no", "per-block", "yes", "SimpleFSDP full inductor"),
    "float8": (
        "float8 tensorwise", "float8 rowwise", "float8 rowwise_with_gw_hp", "mxfp8", "mxfp8_cublas",
        "mxfp8_cublas_rceil", "mxfp8 linears", "mxfp8 grouped gemm", "nvfp4",
    ),
    "pp_schedule": SCHEDULES,
    "sp": ("0", "1"),
}  # fmt: skip
FP32: Words = {
    "optimizer": ("AdamW", "AdamW fp32 states", "AdamW8bit"),
    "precision": ("fp32 params", "bf16", "bf16 mixed"),
}
BF16: Words = {
    "optimizer": ("AdamW", "AdamW bf16 states", "AdamW8bit"),
    "precision": ("bf16", "pure bf16", "pure bf16 params"),
}
MEGATRON: Words = {
    "compile": ("no",),
    "float8": ("hybrid", "e4m3", "fp8", "FP8", "FP8-CS"),
    "precision": ("bf16", "bf16 params", "bf16 mixed", "BF16", "fp16", "fp16 params", "fp16 mixed", "FP8", "FP8-CS"),
    "sp": ("0", "1"),
}
KINDS = ("reserved", "reserved peak", "active", "active peak", "allocated", "allocated peak")


@contextmanager
def usable(row: Row) -> Iterator[None]:
    """Around what reads a row.

    Raises:
        NotCovered: cells are no number or no known word, contradict each other, or do not describe a run.
    """
    for check in (_numbers, _words, _ranks, _batch, _memory):
        check(row)
    try:
        yield
    except ValidationError as error:
        raise NotCovered(f"its numbers do not describe a model: {_fields(error)}") from error
    except (ValueError, ArithmeticError) as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise NotCovered(f"its numbers do not describe a run: {said}") from error


def _fields(error: ValidationError) -> str:
    """Field, value and what is allowed."""
    return "; ".join(
        f"{item['loc'][0]} is {item['input']!r}: {item['msg']}" if item["loc"] else item["msg"]
        for item in error.errors()
    )


def _numbers(row: Row) -> None:
    if row[BEYOND]:
        raise NotCovered("it has more cells than the header")
    for name in WHOLE:
        if row[name] and not re.fullmatch(r"0*[1-9][0-9]{0,11}", row[name]):
            raise NotCovered(f"{name} is {row[name]!r}, not a whole number above 0")
        if name in LIMITS and int(row[name] or 1) > LIMITS[name]:
            raise NotCovered(f"{name} is {row[name]}, above {LIMITS[name]}")
    for name in MEASURED:
        is_number = re.fullmatch(r"[0-9]{0,12}\.?[0-9]{1,30}", row[name]) and float(row[name])
        if row[name] and not is_number and (name, row[name]) != ("peak_mem_GiB", "OOM"):
            raise NotCovered(f"{name} is {row[name]!r}, not a number above 0")


def _words(row: Row) -> None:
    trainer = BF16 if row["framework"].lower().startswith("torchtune") else FP32
    for name, known in (MEGATRON if covers(row) else {**TORCH, **trainer}).items():
        check_word(row, name, known)


def check_word(row: Row, name: str, known: Sequence[str]) -> None:
    """Raises: NotCovered, where a cell says what is not known; it may be empty, and end with a remark."""
    if row[name] and not re.fullmatch(rf"({'|'.join(map(re.escape, known))})(\s*[(,;+/].*)?", row[name]):
        raise NotCovered(f"{name} is {row[name]!r}; known are {', '.join(known)}")


def _ranks(row: Row) -> None:
    """The mesh, and what it divides. Megatron alone copies a head of keys and values to several ranks."""
    mesh = {name: int(row[name] or 1) for name in MESH}
    size, degrees = prod(mesh.values()), " x ".join(f"{name} {degree}" for name, degree in mesh.items())
    if row["ngpus"] and int(row["ngpus"]) != size:
        raise NotCovered(f"ngpus is {row['ngpus']}, but {degrees} is {size}")
    if size % int(row["ep"] or 1):
        raise NotCovered(f"ep {row['ep']} does not divide {degrees}")
    tp, cp = mesh["tp"], mesh["cp"]
    divisors = {"heads": tp, "kv_heads": tp, "ffn_dim": tp, "seq_len": 2 * cp if cp > 1 else 1}
    if not covers(row):
        divisors["seq_len"] *= tp
    if not (covers(row) and "kv-channels" in row["other_flags"]):
        divisors["dim"] = int(row["heads"] or 1)
    for name, divisor in divisors.items():
        number = int(row[name]) if row[name].isascii() and row[name].isdigit() else 0
        is_copied = covers(row) and name == "kv_heads" and number and tp % number == 0
        if number % divisor and not is_copied:
            raise NotCovered(f"{name} {number} is not a multiple of {divisor} (tp {tp}, cp {cp}, heads {row['heads']})")
    if row["kv_heads"] and int(row["heads"] or 0) % int(row["kv_heads"]):
        raise NotCovered(f"heads {row['heads']} is not a multiple of kv_heads {row['kv_heads']}")


def _batch(row: Row) -> None:
    """Megatron's accumulation follows from the global batch where it is not said; elsewhere there is none then."""
    if not (row["global_bs"] and row["micro_bs"]):
        return
    parts = {name: int(row[name] or 1) for name in ("micro_bs", "grad_accum", "dp_replicate", "dp_shard")}
    size = prod(parts.values())
    count, rest = divmod(int(row["global_bs"]), size)
    is_derived = covers(row) and not row["grad_accum"] and count <= LIMITS["grad_accum"]
    if rest or not (count == 1 or is_derived):
        said = " x ".join(f"{name} {number}" for name, number in parts.items())
        raise NotCovered(f"global_bs is {row['global_bs']}, but {said} is {size}")


def _memory(row: Row) -> None:
    """What stays is part of the peak, and the peak of the device."""
    sizes = [name for name in ("resident_mem_GiB", "peak_mem_GiB", "gpu_mem_GiB") if row[name] not in ("", "OOM")]
    for part, whole in combinations(sizes, 2):
        if float(row[part]) > float(row[whole]):
            raise NotCovered(f"{part} is {row[part]}, above {whole} {row[whole]}")
