"""Cross entropy as titan_like/loss.py and the profiles compute it: events over logits of `shape.logits` bytes."""

from estimation.program import Shape
from estimation.tape import Event
from estimation.types import LOSS


def loss_forward(shape: Shape, held: bool) -> list[Event]:
    """From logits to the loss; `held`: somebody keeps the logits until the backward is over."""
    wide = shape.logits // shape.number * 4
    cast = wide if shape.number < 4 else 0
    profile = shape.profile
    if profile.loss == "compiled":
        return [_event("row maxima and sums", shape.tokens * 8)]
    free = [] if held or profile.keeps_logits == "compute" else [_event("logits", -shape.logits)]
    if profile.keeps_logits == "fp32" and cast:  # the model returns them so
        return [_event("fp32 logits", cast), *free, _event("log-probabilities", wide)]
    if profile.loss == "chunked":
        piece = wide // profile.loss_chunks
        one = [_event("fp32 logits", piece), _event("log-probabilities", piece), _event("fp32 logits", -piece)]
        return [*one * profile.loss_chunks, *free]
    names = ["log-probabilities"]
    if shape.tp > 1 and profile.loss_parallel:
        names.insert(0, "shifted logits")
    events = [_event("fp32 logits", cast), *(_event(name, wide) for name in names)]
    events += [_event(name, -wide) for name in names[:-1]]
    return [*events, _event("fp32 logits", -cast), *free]


def loss_backward(shape: Shape, held: bool) -> list[Event]:
    """From the saved tensors to the gradient of the logits."""
    wide = shape.logits // shape.number * 4
    profile = shape.profile
    if profile.loss == "compiled":
        free = [] if held else [_event("logits", -shape.logits)]
        return [_event("d logits", shape.logits), *free, _event("row maxima and sums", -shape.tokens * 8)]
    release = []
    if not held and profile.keeps_logits == "compute":
        release = [_event("logits", -shape.logits)]
    if profile.keeps_logits == "fp32" and shape.number < 4:
        release = [_event("fp32 logits", -wide)]
    if profile.loss == "chunked":
        piece = wide // profile.loss_chunks
        part = shape.logits // profile.loss_chunks
        one = [
            _event("picked gradient", piece), _event("d fp32 logits", piece), _event("picked gradient", -piece),
            _event("log-probabilities", -piece), _event("d logits of a piece", part), _event("d fp32 logits", -piece),
        ]  # fmt: skip
        whole = [_event("d logits", shape.logits), *[_event("d logits of a piece", -part)] * profile.loss_chunks]
        return [*one * profile.loss_chunks, *whole, *release]
    events = [_event("picked gradient", wide), _event("d fp32 logits", wide), _event("picked gradient", -wide)]
    if shape.number == 4:
        return [
            *events,
            _event("log-probabilities", -wide),
            _event("d fp32 logits", -wide),
            _event("d logits", wide),
            *release,
        ]
    return [
        *events, _event("log-probabilities", -wide), _event("d logits", shape.logits),
        _event("d fp32 logits", -wide), *release,
    ]  # fmt: skip


def _event(name: str, size: int) -> Event:
    return Event(name, 0, size, LOSS)
