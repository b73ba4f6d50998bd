"""The CSV of published runs: reads its rows, has each scored, and keeps the reason of each that is not."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from estimation.profiles import NotCovered
from titan_like.config.errors import ConfigError

Row = Mapping[str, str]
LeftOut = tuple[int, str]  # line, reason
Scored = TypeVar("Scored")

# Columns of whole numbers above 0, and of measured sizes and rates; either may be empty.
WHOLE = (
    "layers", "dim", "heads", "kv_heads", "seq_len", "ngpus", "dp_shard", "dp_replicate", "tp", "pp", "cp", "ep",
    "micro_bs", "grad_accum", "global_bs",
)  # fmt: skip
MEASURED = ("gpu_mem_GiB", "peak_mem_GiB", "resident_mem_GiB", "tokens_per_s_per_gpu")
WORDS = (
    "source_url", "framework", "framework_version", "model", "ffn_dim", "vocab", "gpu", "sp", "pp_schedule", "ac",
    "compile", "precision", "float8", "optimizer", "other_flags", "mem_kind", "complete", "dup_group", "family",
    "notes",
)  # fmt: skip
NEEDED = ("framework", "complete", "layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab", "seq_len")
BEYOND = "cells beyond the header's"
SHOWN = 6  # ranges of lines that are printed of one reason; the table has them all


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Line number and row; what is not there is empty. A quote that nothing closes would swallow rows: it is an error.

    Raises:
        ConfigError: no CSV, or columns are missing that every row needs.
    """
    table = csv.DictReader(io.StringIO(_text(path), newline=""), restkey=BEYOND, restval="", strict=True)
    try:
        if missing := [name for name in NEEDED if name not in (table.fieldnames or ())]:
            raise ConfigError(f"--csv {path} lacks the columns {', '.join(missing)}; name a CSV of published runs")
        for row in table:
            beyond = {BEYOND: "".join(row.get(BEYOND, ""))}
            yield table.line_num, {**dict.fromkeys((*WHOLE, *MEASURED, *WORDS), ""), **row, **beyond}
    except csv.Error as error:
        raise ConfigError(f"--csv {path} is no CSV after line {table.line_num}: {error}; name another file") from None


def _text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise ConfigError(f"--csv {path} cannot be read: {error.strerror}; name another file") from None
    if not text.strip():
        raise ConfigError(f"--csv {path} is empty; name a CSV of published runs")
    if "\0" in text or "\ufffd" in text.split("\n")[0]:
        raise ConfigError(f"--csv {path} is no text in UTF-8; name a CSV of published runs")
    return text


def score_rows(path: Path, score: Callable[[int, Row], list[Scored]]) -> tuple[list[Scored], list[LeftOut]]:
    """Scores, and all rows without one. An unforeseen error costs its own row, never the others."""
    scores, left_out = list[Scored](), list[LeftOut]()
    for line, row in read_rows(path):
        try:
            scores += score(line, row)
        except NotCovered as reason:
            left_out.append((line, str(reason)))
        except Exception as error:
            left_out.append((line, f"an error of the program, please report it: {type(error).__name__}: {error}"))
    return scores, left_out


def say_left_out(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """A sentence for each reason, with its number of rows and their lines."""
    lines: dict[str, list[int]] = {}
    for line, reason in left_out:
        lines.setdefault(reason, []).append(line)
    for reason, found in lines.items():
        few = "1 row (line" if len(found) == 1 else f"{len(found)} rows (lines"
        yield f"left out: {few} {_ranges(found)}): {reason}"


def _ranges(lines: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    runs = [[line for _, line in run] for _, run in groupby(enumerate(lines), lambda pair: pair[1] - pair[0])]
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:SHOWN]]
    return ", ".join(shown + ["..."] * (len(runs) > SHOWN))


def write_lines(path: Path, header: Sequence[str], scored: Sequence[Sequence[object]], left: Sequence[LeftOut]) -> None:
    """A CSV of all rows by line, the first column; the reason of those left out is in the last."""
    empty = [""] * (len(header) - 1)
    lines = [[*cells, ""] for cells in scored] + [[line, *empty, reason] for line, reason in left]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([[*header, "left out"], *sorted(lines, key=lambda cells: int(str(cells[0])))])


def total(scored: int, left_out: int) -> str:
    """How many rows there are, and what became of them."""
    return f"{scored + left_out} rows: {scored} scored, {left_out} left out"
