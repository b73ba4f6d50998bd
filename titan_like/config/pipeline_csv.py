"""Pipeline schedules given as a file: torch's "compute only" CSV format, one row of actions per rank, e.g. 0F0,0F1,0B0.

An action is <stage><F|I|W|B><micro-batch>: forward, backward for inputs, backward for weights, whole backward; an empty
cell is a pause. Source: torch.distributed.pipelining.schedules.
"""

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class CsvSchedule:
    """Facts of a schedule file: the stages of each rank in ascending order, and the number of micro-batches."""

    stages_of_rank: tuple[tuple[int, ...], ...]
    micro_batches: int
    splits_backward: bool

    @property
    def stages(self) -> int:
        return sum(map(len, self.stages_of_rank))


@cache
def read_schedule(path: Path) -> CsvSchedule:
    """Read and check a schedule.

    Raises:
        OSError: the file cannot be read.
        ValueError: the sentence says which cell is no action, or which stage is missing or on two ranks.
    """
    rows: list[list[tuple[int, str, int]]] = []
    with path.open(newline="") as file:
        for row, cells in enumerate(csv.reader(file)):
            matches = [(cell, re.fullmatch(r"(\d+)([FIWB])(\d+)", cell.strip())) for cell in cells if cell.strip()]
            wrong = next((cell for cell, match in matches if match is None), None)
            if wrong is not None:
                raise ValueError(f"row {row + 1} holds {wrong!r}, which is no action like 0F0, 0B0, 0I0 or 0W0")
            rows.append([(int(match[1]), match[2], int(match[3])) for _, match in matches if match])
    stages_of_rank = tuple(tuple(sorted({stage for stage, _, _ in row})) for row in rows)
    stages = [stage for row in stages_of_rank for stage in row]
    if sorted(stages) != list(range(len(stages))) or not stages:
        raise ValueError(f"its rows hold the stages {sorted(stages)}; each of 0, 1, 2, ... must be on exactly one rank")
    actions = [action for row in rows for action in row]
    micro_batches = 1 + max(action[2] for action in actions)
    for stage in stages:
        done = {(kind, index) for at, kind, index in actions if at == stage}
        for index in range(micro_batches):
            if ("F", index) not in done or not (("B", index) in done or {("I", index), ("W", index)} <= done):
                raise ValueError(f"stage {stage} lacks the forward or the backward of micro-batch {index}")
    return CsvSchedule(stages_of_rank, micro_batches, any(kind in "IW" for _, kind, _ in actions))
