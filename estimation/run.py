"""One loaded micro-batch of a rank: its forwards and backwards in the order of a pipeline's schedule.

Between them lies what the schedule itself holds: weights asked for ahead, messages on their way, gradients that wait.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from estimation.job import Job
from estimation.schedules import Action, gathered_stages
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
        sums: there are sums of whole gradients.
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
        self.waiting: set[int] = set()
        self._left = Counter(action.stage for action in actions if action.kind in "BW")
        self._sent = 0  # messages that nobody but the schedule holds
        self._hidden = job.shape.hidden
        sizes = (-self._hidden, self._hidden)
        self._receive = [Segment.of([Event("receive buffers", 0, size, COMMUNICATION)], "messages") for size in sizes]

    def segments(self) -> Iterator[Segment]:
        """In order, reductions of gradients included."""
        is_looped = self.job.schedule == "looped" and self.job.wrapped
        changes = gathered_stages(self.actions) if is_looped else [([], [])] * len(self.actions)
        for (kind, number, _), (evicted, fetched) in zip(self.actions, changes, strict=True):
            yield from self._prepare(number, evicted, fetched)
            if kind == "F":
                yield from self._forward(number)
            elif kind == "I":
                yield from self._inputs(number)
            elif kind == "W" and number > 0:  # the first stage has no gradient of its input to begin with
                yield from self._weights(number)
            else:
                yield from self._backward(number)
            yield from self._messages(kind, number)
            if kind in "BW":
                self._left[number] -= 1
            if self.job.pp > 1 and kind in "BW" and not self._left[number]:
                if self.job.schedule == "GPipe" and self.job.profile.gpu:
                    yield self._drop_messages()
                yield from self._reduce(number)
        yield self._drop_messages()

    def _prepare(self, number: int, evicted: list[int], fetched: list[int]) -> Iterator[Segment]:
        for stage in evicted:
            if stage in self.begun:  # the reduction of gradients gives weights back too
                yield self.stages[stage].release(whole=stage in self.whole)
            self._forget(stage)
        for stage in fetched:
            yield self.stages[stage].unshard()
        self.asked.update(fetched)
        if number in self.asked:
            yield self.stages[number].wait()
            self.asked.remove(number)
            self.begun.add(number)
            self.whole.add(number)

    def _forward(self, number: int) -> Iterator[Segment]:
        yield self.stages[number].forward(gathers=number not in self.whole, first=number not in self.begun)
        self.begun.add(number)
        if self.job.pp > 1 and not self.job.reshard:
            self.whole.add(number)
        else:
            self.whole.discard(number)

    def _inputs(self, number: int) -> Iterator[Segment]:
        if number == 0:
            return
        if number in self.waiting and self.job.wrapped:  # the hooks of FSDP2 run with it, and find them
            yield self.stages[number].accumulation(first=number not in self.sums)
            self.waiting.remove(number)
            self.sums.add(number)
        yield self.stages[number].inputs_backward()

    def _weights(self, number: int) -> Iterator[Segment]:
        found = self.waiting if self.job.wrapped else self.sums
        yield self.stages[number].weights_backward(adds=number in found or not (self.job.wrapped or self.fresh))
        found.add(number)

    def _backward(self, number: int) -> Iterator[Segment]:
        yield self.stages[number].backward(
            first=number not in self.sums, fresh=self.fresh, reduces=self.reduces, gathers=number not in self.whole
        )
        if self.job.pp > 1:  # torch's stages free weights only with the reduction
            self.whole.add(number)
        if number in self.waiting:
            yield self.stages[number].accumulation(first=False)
            self.waiting.remove(number)
        self.sums.add(number)

    def _reduce(self, number: int) -> Iterator[Segment]:
        if number in self.waiting:
            yield self.stages[number].accumulation(first=number not in self.sums)
        yield self.stages[number].reduction(fresh=self.fresh)
        self._forget(number)

    def _forget(self, number: int) -> None:
        self.whole.discard(number)
        self.begun.discard(number)

    def _messages(self, kind: str, number: int) -> Iterator[Segment]:
        """What has been sent stays until the schedule waits for it: at its end, but in GPipe before the first backward
        (on a GPU), and in 1F1B with the next of its kind. A neighbour on the same rank gets no message: the result
        itself takes the place of the buffer for it."""
        if kind != "I" and number + 1 in self.stages:
            yield self._receive[kind != "F"]
        count = 0 if kind == "F" or self.job.pp == 1 else self._new_messages(kind, number)
        self._sent += count
        if count:
            yield self._messages_segment(count)

    def _new_messages(self, kind: str, number: int) -> int:
        schedule = self.job.schedule
        has_sent_gradient = kind in "BI" and number > 0 and number - 1 not in self.stages
        has_sent_result = kind in "BW" and number < len(self.job.stages) - 1 and number + 1 not in self.stages
        if schedule == "1F1B":
            is_first, is_last = not self._sent, self._left[number] == 1
            has_sent_gradient, has_sent_result = has_sent_gradient and is_first, has_sent_result and is_last
        if schedule == "GPipe" and self.job.profile.gpu:
            has_sent_result = False
        return has_sent_gradient + has_sent_result

    def _messages_segment(self, count: int) -> Segment:
        """`count` more, or fewer, of them."""
        sign = 1 if count > 0 else -1
        return Segment.of([Event("messages", 0, sign * self._hidden, COMMUNICATION)] * abs(count), "messages")

    def _drop_messages(self) -> Segment:
        count, self._sent = self._sent, 0
        return self._messages_segment(-count)
