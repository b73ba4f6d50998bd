"""Seconds of one pipeline stage (or the whole model): its passes over a micro-batch, and its reduction of gradients."""

from functools import cached_property

from estimation.groups import Group as Parameters
from estimation.groups import block_group, groups_of, local_rows
from estimation.time.block import Coster, Unit
from estimation.time.network import Group
from estimation.time.overlap import Pass, Work, overlapped
from estimation.time.seconds import Seconds


class StageTime:
    """Passes that are equal are worked out once."""

    def __init__(self, coster: Coster, number: int) -> None:
        self.coster, self.job = coster, coster.job
        self.layers = self.job.stages[number]
        self.is_first, self.is_last = number == 0, number == len(self.job.stages) - 1
        together = self.job.profile.groups == "together"
        model, tp = self.job.model, self.job.tp
        blocks = {"block": (block_group(model, tp), len(self.layers))}
        self.groups = groups_of(model, tp, blocks=blocks, first=self.is_first, last=self.is_last, together=together)
        self._passes: dict[tuple[str, bool], Pass] = {}
        self._moved: dict[tuple[str, str], tuple[float, float]] = {}

    @cached_property
    def order(self) -> list[tuple[str, Unit, int | None]]:
        names: list[tuple[str, int | None]] = [("embedding", None)] if self.is_first else []
        names += [("block", layer) for layer in self.layers]
        names += [("head", None)] if self.is_last else []
        mode_of = self.job.mode_of
        return [
            (name, self.coster.unit(name, "none" if layer is None else mode_of(layer)), layer) for name, layer in names
        ]

    def run(self, kind: str, flag: bool) -> Pass:
        """One micro-batch.

        Args:
            kind: F forward; B backward, or its halves: I for inputs with recomputation, W for weights.
            flag: F: no weights are there from before; B: gradients are reduced unit by unit.
        """
        if (kind, flag) not in self._passes:
            works = self._forward(flag) if kind == "F" else self._backward(kind, flag)
            found = overlapped(works, self.coster.network.crowding)
            found.parts.add(self._kinds(kind))
            self._passes[kind, flag] = found
        return self._passes[kind, flag]

    def _forward(self, gathers: bool) -> list[Work]:
        works = []
        for name, unit, layer in self.order:
            weights = self._parameters(name) if gathers else None
            gather, copy = self._once("gather", weights)
            works.append(Work(_label(name, layer), unit.totals[0], gather, copy))
        return works

    def _backward(self, kind: str, reduces: bool) -> list[Work]:
        works = []
        for name, unit, layer in self.order[::-1]:
            own = self._parameters(name)
            gather, copy = self._once("gather", own if self._frees(name, layer) else None)
            pack, reduce = self._once("reduce", own if reduces and kind == "B" else None)
            _, inputs, weights = unit.totals
            compute = {"B": inputs + weights, "I": inputs, "W": weights}[kind]
            works.append(Work(_label(name, layer), compute, gather, copy, pack, reduce))
        return works

    @cached_property
    def reduction(self) -> tuple[float, float]:
        """Pipelining: (packing, reducing) all gradients after the last backward."""
        parts = [self._once("reduce", group) for group, copies in self.groups.values() for _ in range(copies)]
        return sum(pack for pack, _ in parts), sum(reduce for _, reduce in parts)

    def _kinds(self, kind: str) -> Seconds:
        """What a pass computes, by kind."""
        total = Seconds()
        for _, unit, _ in self.order:
            halves = {"F": (unit.forward,), "I": (unit.inputs,), "W": (unit.weights,), "B": (unit.inputs, unit.weights)}
            for half in halves[kind]:
                total.add(half)
        return total

    @cached_property
    def numbers(self) -> int:
        """Parameters of a rank, padding left out."""
        groups = self.groups.values()
        return sum(
            copies * sum(local_rows(table.rows_of(0), self.job.fsdp, 0) * table.columns for table in group.tables)
            for group, copies in groups
        )

    # FSDP2

    def _parameters(self, name: str) -> Parameters | None:
        """The group that a unit gathers; the root's is gathered with the first unit that needs it."""
        if name in self.groups:
            return self.groups[name][0]
        is_root = "root" in self.groups and name == ("embedding" if self.is_first else "head")
        return self.groups["root"][0] if is_root else None

    def _frees(self, name: str, layer: int | None) -> bool:
        """Whether the backward gathers again what the forward has freed."""
        profile = self.job.profile
        stays = (name == "head" and profile.head_stays) or name not in self.groups
        stays = stays or (name == "block" and layer == self.layers[-1] and profile.last_block_stays)
        return self.job.reshard and not stays

    @property
    def _shards(self) -> Group:
        return Group(self.job.fsdp, self.job.tp)

    def _once(self, what: str, group: Parameters | None) -> tuple[float, float]:
        """Gathering or reducing a group, worked out once."""
        if group is None or not self.job.wrapped:
            return 0.0, 0.0
        key = (what, group.name)
        if key not in self._moved:
            self._moved[key] = self._gathering(group) if what == "gather" else self._reducing(group)
        return self._moved[key]

    def _gathering(self, group: Parameters) -> tuple[float, float]:
        """(all-gather, casts and copies) of a group of weights."""
        job = self.job
        numbers, speed = group.padded(job.fsdp), self.coster.speed
        stored = 4 if job.profile.weights == "fp32" else 2
        cast = numbers / job.fsdp * (stored + job.number) if job.number != stored else 0
        if job.fsdp == 1:
            return 0.0, speed.moving(cast)
        number = job.number / 2 if self.coster.way.float8_gather and group.name == "block" else job.number
        gather = self.coster.network.gather(numbers * number, self._shards)
        return gather, speed.moving(cast) + speed.moving(2 * numbers * number)

    def _reducing(self, group: Parameters) -> tuple[float, float]:
        """(copies, reduce-scatter and all-reduce over the replicas) of a group of gradients."""
        job = self.job
        numbers = group.padded(job.fsdp)
        network, replicas = self.coster.network, Group(job.replicate, job.tp * job.fsdp)
        pack = self.coster.speed.moving(numbers * (job.number + job.reduce_number))
        reduce = network.gather(numbers * job.reduce_number, self._shards)
        return pack, reduce + network.all_reduce(numbers / job.fsdp * job.reduce_number, replicas)


def _label(name: str, layer: int | None) -> str:
    return name if layer is None else f"block {layer}"


def stage_times(coster: Coster) -> list[StageTime]:
    """One per stage; stages that are alike are one object."""
    job = coster.job
    alike: dict[tuple[object, ...], StageTime] = {}
    found = []
    for number, layers in enumerate(job.stages):
        key = (number == 0, number == len(job.stages) - 1, tuple(map(job.mode_of, layers)))
        if key not in alike:
            alike[key] = StageTime(coster, number)
        found.append(alike[key])
    return found
