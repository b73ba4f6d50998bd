"""A trace of a deep model from traces of shallow ones: blocks are alike, what a rank holds is linear in their number.

Moments (allocations) are told apart by step, phase, module, operation, and by the place of the layer at work: first,
second, last but one, last. The highest of each kind lie on straight lines through the traces of 4 and of 5 layers; a
trace of 6 has to lie on them too, to the byte.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple, TypeVar

from estimation import tracker as kinds
from estimation.allocator import round_up
from estimation.trace import ROUNDING, left_out, report, traced
from estimation.tracker import Tracker
from estimation.types import TRANSIENT, MemoryReport, Moment, Resident
from titan_like.config import Config
from titan_like.models.flavors import ModelConfig, resolve
from titan_like.quantize.layers import float8_plan

LAYERS = (4, 5, 6)
FIRST, SECOND, MIDDLE, LAST_BUT_ONE, LAST = "first", "second", "middle", "last but one", "last"
_Any = TypeVar("_Any")


class Place(NamedTuple):
    """A module, told from the ends of the model; `layer` is "" outside of all."""

    layer: str
    inside: str

    @staticmethod
    def of(name: str, layers: int) -> "Place":
        found = re.match(r"layers\.(\d+)\.?(.*)", name)
        if not found:
            return Place("", name)
        ends = {0: FIRST, 1: SECOND, layers - 2: LAST_BUT_ONE, layers - 1: LAST}
        return Place(ends.get(int(found[1]), MIDDLE), found[2])

    def names(self, layers: int) -> list[str]:
        """Of all modules there, in a model with so many layers."""
        ends = {FIRST: [0], SECOND: [1], LAST_BUT_ONE: [layers - 2], LAST: [layers - 1]}
        if not self.layer:
            return [self.inside]
        return [f"layers.{i}.{self.inside}".removesuffix(".") for i in ends.get(self.layer, range(2, layers - 2))]


class Key(NamedTuple):
    """A kind of moment; `layer` is that of the last module of a layer, where no module is known."""

    step: int
    phase: str
    layer: str
    place: Place
    operation: str


@dataclass(frozen=True)
class Heights:
    """The highest moments of each kind; bytes.

    Attributes:
        totals: what is held when most is, by category.
        largest: most of a category, or of a stream (by number).
        activations: by module, when they are most.
        resident: a whole trace's.
    """

    layers: int
    totals: Mapping[Key, Counter[str]]
    largest: Mapping[tuple[Key, Any], int]
    activations: Mapping[Key, Counter[Place]]
    resident: Resident

    @property
    def ends(self) -> set[Key]:
        """Those that a model with 4 layers has too."""
        return {key for key in self.totals if key.layer != MIDDLE}

    def highest(self, what: Any) -> int:
        return max((size for (_, of), size in self.largest.items() if of == what), default=0)

    @property
    def reserved(self) -> int:
        """All streams' peaks."""
        return sum(map(self.highest, {of for _, of in self.largest if isinstance(of, int)}))

    def fill(self, report: MemoryReport, *, gpu: bool) -> MemoryReport:
        """`report` with these numbers; the CPU has no allocator that reserves."""
        key = max(self.totals, key=lambda key: sum(self.totals[key].values()))
        saved = max(self.activations.values(), key=lambda modules: sum(modules.values()), default=Counter[Place]())
        by_module = {}
        for place, size in saved.items():
            names = place.names(self.layers)
            by_module.update(dict.fromkeys(names, size // max(1, len(names))))
        return replace(
            report,
            resident=self.resident,
            activations=by_module,
            transient={kind: self.highest(kind) for kind in TRANSIENT},
            peak_bytes=sum(self.totals[key].values()),
            at_peak=dict(self.totals[key]),
            moment=Moment(key.step, key.phase, key.place.names(self.layers)[0], key.operation),
            reserved_bytes=self.reserved if gpu else sum(self.totals[key].values()),
        )


def trace_some_layers(config: Config, world_size: int, rank: int, *, gpu: bool) -> MemoryReport | None:
    """As `trace.trace`, in a time that does not depend on the number of layers. Reserved is the sum of the peaks of the
    allocator's pools.

    None: it has to be traced whole, since layers differ, or the third trace does not lie on the lines.
    """
    layers = model_of(config).n_layers
    if layers <= LAYERS[-1] or not are_alike(config):
        return None
    heights, programs = [], dict[Any, Any]()
    for count in LAYERS:
        tracker, buffers = traced(with_layers(config, count), world_size, rank, gpu=gpu, programs=programs)
        whole = report(tracker, world_size, rank, buffers, gpu=gpu, notes=left_out(config, gpu=gpu))
        heights.append(heights_of(tracker, whole, count, gpu=gpu))
    first, second, third = heights
    if not first.ends == second.ends == third.ends:
        return None
    told = line(first, second, third.layers).fill(whole, gpu=gpu)
    if replace(told, moment=whole.moment) != replace(whole, reserved_bytes=third.reserved if gpu else whole.peak_bytes):
        return None
    return line(first, second, layers).fill(whole, gpu=gpu)


def heights_of(tracker: Tracker, whole: MemoryReport, layers: int, *, gpu: bool) -> Heights:
    """Sum the events of a trace up as `trace.report` does, but by kinds of moments."""
    unit = ROUNDING if gpu else 1
    start = round_up(whole.resident.buffers, unit)
    now, streams, modules = Counter({kinds.BUFFERS: start}), Counter({0: start}), Counter[Place]()
    totals: dict[Key, Counter[str]] = {}
    largest: Counter[tuple[Key, Any]] = Counter()
    activations: dict[Key, Counter[Place]] = {}
    highest, total, layer = Counter[Key](), start, ""
    for sign, record in tracker.events:
        kind, size, place = record.kind, sign * round_up(record.size, unit), Place.of(record.module, layers)
        total += size
        now[kind] += size
        streams[record.stream] += size
        modules[place] += size * (kind == kinds.ACTIVATIONS)
        if sign < 0:
            continue
        layer = place.layer if record.module else layer * (record.phase in ("forward", "backward", "recompute"))
        key = Key(record.step, record.phase, layer, place, record.operation)
        if total > highest[key]:
            highest[key], totals[key] = total, +now
        if kind == kinds.ACTIVATIONS and now[kind] > largest[key, kind]:
            activations[key] = +modules
        for what, amount in ((kind, now[kind]), (record.stream, streams[record.stream])):
            largest[key, what] = max(largest[key, what], amount)
    return Heights(layers, totals, largest, activations, whole.resident)


def line(first: Heights, second: Heights, layers: int) -> Heights:
    """What lies on the straight lines through two."""

    def at(a: int, b: int) -> int:
        return a + (b - a) * (layers - first.layers) // (second.layers - first.layers)

    def each(a: Mapping[Key, Counter[_Any]], b: Mapping[Key, Counter[_Any]]) -> dict[Key, Counter[_Any]]:
        return {
            key: +Counter({of: at(sizes[of], b[key][of]) for of in {**sizes, **b[key]}})
            for key, sizes in a.items()
            if key in b
        }

    return Heights(
        layers,
        each(first.totals, second.totals),
        {key: at(size, second.largest[key]) for key, size in first.largest.items() if key in second.largest},
        each(first.activations, second.activations),
        Resident(*map(at, astuple(first.resident), astuple(second.resident))),
    )


def model_of(config: Config) -> ModelConfig:
    return resolve(config.model.name, config.model.flavor, config.model.overrides)


def with_layers(config: Config, count: int) -> Config:
    model = config.model.model_copy(update={"overrides": {**config.model.overrides, "n_layers": count}})
    return config.model_copy(update={"model": model})


def are_alike(config: Config) -> bool:
    """Whether all layers are on one stage and are wrapped alike."""
    recompute = config.activation_checkpoint
    if config.parallelism.pipeline_parallel_degree > 1:
        return False
    if recompute.mode == "selective" and recompute.selective_ac_option != "op":
        return False
    if not config.float8.enable:
        return True
    model = model_of(config)
    times = Counter(name.split(".", 2)[2] for name in float8_plan(model, config).converted)
    return set(times.values()) == {model.n_layers}
