"""One loaded micro-batch of a rank: its forwards and backwards in the order of a pipeline's schedule.

Between them lies what the schedule itself holds: weights asked for ahead, messages on their way, gradients that wait.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from estimation.job import Job
from estimation.schedules import Action, Step, rounds
from estimation.stage import StageMemory
from estimation.tape import Event, Segment
from estimation.types import COMMUNICATION


class Run:
    """Attributes say which stages of this rank are in which state.

    Args:
        fresh: the first of an optimizer step: there are no gradients yet.
        is_last: the last of an optimizer step.

    Attributes:
        begun: weights that always stay are there.
        whole: all weights are, after a forward or a backward that has not freed them.
        asked: weights are on their way.
        sums: there are sums of whole gradients; early: of the blocks (see GroupMemory.adds_early).
        waiting: there are whole gradients that no hook of FSDP2 has seen.
    """

    def __init__(
        self, job: Job, actions: tuple[Action, ...], stages: Mapping[int, StageMemory], *, fresh: bool, is_last: bool
    ) -> None:
        self.job, self.actions, self.stages = job, actions, stages
        self.fresh, self.reduces = fresh, is_last or not job.reduces_once
        self.begun: set[int] = set()
        self.whole: set[int] = set()
        self.asked: set[int] = set()
        self.sums: set[int] = set()
        self.early: set[int] = set()
        self.waiting: set[int] = set()
        self._rounds = rounds(actions, gathers_ahead=job.schedule == "looped" and job.wrapped)
        self._left = Counter[int]()
        for steps, times in self._rounds:
            self._count(steps, times)
        self._sent = self._newest = 0  # messages that nobody but the schedule holds
        self._found: list[Segment] = []
        self._add = self._found.append
        self._hidden = job.shape.hidden
        self._receive = [messages("receive buffers", self._hidden, count) for count in (-1, 1)]

    def _count(self, steps: list[Step], times: int) -> None:
        """How many backwards there are to come."""
        for step in steps:
            if step.kind in "BW":
                self._left[step.stage] += times

    def segments(self) -> list[Segment]:
        """In order, reductions of gradients included."""
        self._found.clear()
        self._add(messages("gradients of buffers", self._hidden, -left_gradients(self.actions, self.stages)))
        for steps, times in self._rounds:
            while times > 2:
                before, sent, at = self._state(), self._sent, len(self._found)
                self._act(steps)
                times -= 1
                if self._state() == before:  # so do all others; but the last of all may be a stage's last
                    self._found += self._found[at:] * (times - 1)
                    self._count(steps, 1 - times)
                    self._sent += (self._sent - sent) * (times - 1)
                    times = 1
            self._act(steps * times)
        self._drop_messages()
        return self._found

    def _state(self) -> tuple[object, ...]:
        """What decides how an action runs."""
        stages = (self.begun, self.whole, self.asked, self.sums, self.early, self.waiting)
        return self._sent > 0, *map(frozenset, stages)

    def _act(self, steps: list[Step]) -> None:
        for kind, number, evicted, fetched in steps:
            if evicted or fetched or number in self.asked:
                self._prepare(number, evicted, fetched)
            if kind == "F":
                self._forward(number)
            elif kind == "I":
                self._inputs(number)
                self._add(messages("gradients of buffers", self._hidden, leaves_gradient(number, self.stages)))
            elif kind == "W" and number > 0:  # the first stage has no gradient of its input to begin with
                self._weights(number)
            else:
                self._backward(number)
            self._messages(kind, number)
            if kind in "BW":
                self._end(number)

    def _end(self, number: int) -> None:
        """A backward is over; after a stage's last one its gradients are reduced."""
        self._left[number] -= 1
        if self.job.pp > 1 and not self._left[number]:
            if self.job.schedule == "GPipe" and self.job.profile.gpu:
                self._drop_messages(but=self._newest)
            self._reduce(number)

    def _prepare(self, number: int, evicted: tuple[int, ...], fetched: tuple[int, ...]) -> None:
        for stage in evicted:
            if stage in self.begun:  # the reduction of gradients gives weights back too
                self._add(self.stages[stage].release(whole=stage in self.whole))
            self._forget(stage)
        for stage in fetched:
            self._add(self.stages[stage].unshard())
        self.asked.update(fetched)
        if number in self.asked:
            self._add(self.stages[number].wait())
            self.asked.remove(number)
            self.begun.add(number)
            self.whole.add(number)

    def _forward(self, number: int) -> None:
        self._add(self.stages[number].forward(gathers=number not in self.whole, first=number not in self.begun))
        self.begun.add(number)
        if self.job.pp > 1 and not self.job.reshard:
            self.whole.add(number)
        else:
            self.whole.discard(number)

    def _inputs(self, number: int) -> None:
        if number == 0:
            return
        if number in self.waiting and self.job.wrapped:  # the hooks of FSDP2 run with it, and find them
            self._add(self.stages[number].accumulation(first=number not in self.sums))
            self.waiting.remove(number)
            self.sums.add(number)
        self._add(self.stages[number].inputs_backward())

    def _weights(self, number: int) -> None:
        found = self.waiting if self.job.wrapped else self.sums
        adds = number in found or not (self.job.wrapped or self.fresh)
        self._add(self.stages[number].weights_backward(adds=adds, first=self._is_first(number)))
        found.add(number)
        if self.stages[number].adds_early:
            self.early.add(number)

    def _backward(self, number: int) -> None:
        first, gathers = self._is_first(number), number not in self.whole
        self._add(self.stages[number].backward(first=first, fresh=self.fresh, reduces=self.reduces, gathers=gathers))
        if self.job.pp > 1:  # torch's stages free weights only with the reduction
            self.whole.add(number)
        if number in self.waiting:
            self._add(self.stages[number].accumulation(first=number in self.early and number not in self.sums))
            self.waiting.remove(number)
        self.sums.add(number)

    def _is_first(self, number: int) -> bool:
        """Whether there are no sums yet."""
        return number not in self.sums and number not in self.early

    def _reduce(self, number: int) -> None:
        if number in self.waiting:
            self._add(self.stages[number].accumulation(first=number not in self.sums))
        self._add(self.stages[number].reduction(fresh=self.fresh))
        self._forget(number)

    def _forget(self, number: int) -> None:
        self.whole.discard(number)
        self.begun.discard(number)

    def _messages(self, kind: str, number: int) -> None:
        """What has been sent stays until the schedule waits for it: at its end, but in GPipe (on a GPU) before the
        first backward and before the reduction, all but the last; and in 1F1B with the next of its kind. A neighbour on
        the same rank gets no message: the result itself takes the place of the buffer for it."""
        if kind != "I" and number + 1 in self.stages:
            self._add(self._receive[kind != "F"])
        self._newest = 0 if kind == "F" or self.job.pp == 1 else self._new_messages(kind, number)
        if self._newest:
            self._sent += self._newest
            self._add(messages("messages", self._hidden, self._newest))

    def _new_messages(self, kind: str, number: int) -> int:
        schedule = self.job.schedule
        has_sent_gradient = kind in "BI" and number > 0 and number - 1 not in self.stages
        has_sent_result = kind in "BW" and number < len(self.job.stages) - 1 and number + 1 not in self.stages
        if schedule == "1F1B":
            is_first, is_last = not self._sent, self._left[number] == 1
            has_sent_gradient, has_sent_result = has_sent_gradient and is_first, has_sent_result and is_last
        if schedule == "GPipe" and self.job.profile.gpu:  # its loop's variable holds the last
            has_sent_result = has_sent_result and self._left[number] == 1
        return has_sent_gradient + has_sent_result

    def _drop_messages(self, but: int = 0) -> None:
        self._add(messages("messages", self._hidden, but - self._sent))
        self._sent = but


def left_gradients(actions: Iterable[Action], stages: Collection[int]) -> int:
    """How many a rank's actions leave until the schedule runs again (torch: clear_runtime_states)."""
    return sum(leaves_gradient(stage, stages) for kind, stage, _ in actions if kind == "I")


def leaves_gradient(stage: int, stages: Collection[int]) -> bool:
    """Whether a backward for inputs leaves the gradient of a receive buffer there (torch: stage_backward_input)."""
    return stage > 0 and stage - 1 not in stages


@lru_cache(maxsize=256)
def messages(name: str, size: int, count: int) -> Segment:
    """`count` more, or fewer, of so many bytes."""
    sign = 1 if count > 0 else -1
    return Segment.of([Event(name, 0, sign * size, COMMUNICATION)] * abs(count), "messages")
