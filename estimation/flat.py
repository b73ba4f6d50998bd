"""FSDP1: each group's weights are one flat parameter. Only published runs of other trainers use it.

Source: torch/distributed/fsdp/_runtime_utils.py (_unshard, _reshard, _post_backward_hook, _reduce_grad) and
_flat_param.py, with use_orig_params, mixed precision and limit_all_gathers.
"""

from estimation.groups import Group
from estimation.stage import StageMemory
from estimation.tape import Event, Segment
from estimation.types import ALL_GATHER, REDUCE_SCATTER
from estimation.wrapped import GATHERED, event_of


class FlatStageMemory(StageMemory):
    """Weights are views of what was gathered; gradients are put together to a flat one, cast, and reduced."""

    def _gather(
        self, name: str, previous: Group | None, *, is_here: bool = False, is_forward: bool = True
    ) -> list[Event]:
        return [] if is_here else self._all_gather(self.groups[name][0])

    def _free_gathered(self, group: Group | None) -> list[Event]:
        return []

    def _reshard(self, name: str) -> list[Event]:
        return super()._free_gathered(self.groups[name][0])

    def _reduce(self, group: Group, freed: list[Event], pending: Group | None, fresh: bool) -> list[Event]:
        numbers = group.padded(self.job.fsdp)
        flat = event_of("flat gradient", numbers * self.job.number, REDUCE_SCATTER)
        wide = event_of("flat gradient to reduce", numbers * self.job.reduce_number, REDUCE_SCATTER, "reduce")
        part = event_of("gradients", numbers // self.job.fsdp * self._weight, "gradients", "reduce")
        events = [flat, *freed, wide, part, *(event._replace(size=-event.size) for event in (flat, wide))]
        return events if fresh else [*events, part._replace(size=-part.size)]

    def _in_flight(self, group: Group) -> Group | None:
        return None

    def _freed(self, sign: int) -> Segment:
        """Two blocks' buffers are free for the host, but taken until the device has used them: its limit."""
        group, _ = self.groups["block"]
        size = sign * group.gathered(self.job.fsdp, self.job.number)
        return Segment.of([event_of(f"freed {GATHERED}", size, ALL_GATHER, "gather")] * 2, "freed")

    def _forward(self, gathers_all: bool, first: bool) -> list[Segment]:
        return [self._freed(1), *super()._forward(gathers_all, first)]

    def _backward(self, first: bool, fresh: bool, reduces: bool, gathers: bool) -> list[Segment]:
        return [*super()._backward(first, fresh, reduces, gathers), self._freed(-1)]
