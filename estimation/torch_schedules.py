"""torch's pipeline tables without processes: the schedule classes are built over stand-ins for stages.

Private attributes of torch, checked on torch 2.13; imported only where a schedule has several stages per rank.
"""

from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

from estimation.schedules import Action
from titan_like.config.schema import V_SHAPED

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


@dataclass
class _Stage:
    """What a schedule reads of a PipelineStage before it runs."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    has_backward: bool = True
    device: str = "cpu"
    submod: Any = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def _no_messages(schedule: Any, actions: Any, format: str = "compute_only") -> None:
    """Adding sends and receives takes a table most of its time, and nobody reads them here."""


def compute_actions(name: str, degree: int, virtual: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The forwards and backwards of every rank, in order."""
    count = degree * virtual
    mine = [0, count - 1] if name in V_SHAPED else [i * degree for i in range(virtual)]
    stages: Any = [_Stage(number, count, degree) for number in mine]
    kind: Any = type("Table", (get_schedule_class(name),), {"_prepare_schedule_with_comms": _no_messages})
    schedule = kind(stages, n_microbatches=micro_batches, loss_fn=lambda out, target: out)
    rows = []
    for rank in range(degree):
        parts = [
            part for action in schedule.pipeline_order[rank] if action for part in (action.sub_actions or (action,))
        ]
        rows.append(
            tuple(
                Action(KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
                for part in parts
                if part.computation_type.name in KINDS
            )
        )
    return tuple(rows)
