"""Cross entropy as titan_like/loss.py (linear) and other trainers (over logits of `shape.logits` bytes) compute it."""

from estimation.program import Shape
from estimation.tape import Event
from estimation.types import COMMUNICATION, LOSS


def linear_forward(shape: Shape) -> list[Event]:
    """From the normed hidden states, which are freed, to the loss and the gradients of hidden states and table."""
    tokens, rows = shape.in_loss
    e, dim, profile = shape.number, shape.model.dim, shape.profile
    size = -(-tokens // profile.loss_chunks)
    count, piece, table = -(-tokens // size), size * rows, rows * dim
    names = ["product", "fp32 sum"] if e < 4 else ["fp32 sum"]
    sizes = {"product": table * e, "fp32 sum": table * 4}
    first = [_event(name, sizes[name]) for name in names] if count > 1 else [_event("table gradient", table * e)]
    product = [_event("product", sign * table * e) for sign in (1, -1)] if e < 4 else []
    events = [_event("factors", tokens * 8), _event("gradient of the hidden states", tokens * dim * e)]
    made, undone = _piece(shape, piece)
    events += [*made, *first, *product[1:] * (count > 1), *undone]
    events += [*made, *product, *undone] * (count > 1)  # the others are alike
    if count > 1 and e < 4:
        events += [_event("table gradient", table * e), _event("fp32 sum", -table * 4)]
    elif count > 1:
        events = [event._replace(name="table gradient") if event.name == "fp32 sum" else event for event in events]
    events += [_event("factors", -tokens * 8), Event("normed", 0, -tokens * dim * e, LOSS)]
    if shape.tp == 1 or profile.loss_parallel:
        return events
    whole = Event("whole table", 0, table * e, COMMUNICATION)
    return [whole, *events, whole._replace(size=-whole.size)]


def _piece(shape: Shape, numbers: int) -> tuple[list[Event], list[Event]]:
    """What makes the gradient of one chunk's logits, and its end."""
    e, profile = shape.number, shape.profile
    logits, narrow = _event("logits", numbers * e), _event("d logits", numbers * e)
    free = logits._replace(size=-logits.size)
    if profile.loss == "linear compiled":
        return [logits, narrow, free], [narrow._replace(size=-narrow.size)]
    wide = _event("probabilities", numbers * 4)
    copy = [_event("fp32 logits", sign * numbers * 4) for sign in (1, -1)] if profile.loss_copies and e < 4 else []
    made = [logits, *copy[:1], wide, *copy[1:], free]
    if e == 4:
        return made, [wide._replace(size=-wide.size)]
    return [*made, narrow, wide._replace(size=-wide.size)], [narrow._replace(size=-narrow.size)]


def linear_backward(shape: Shape, table_name: str, term: str) -> list[Event]:
    """The gradients that the forward has made, times that of the loss; those of the hidden states stay as d normed."""
    tokens, rows = shape.in_loss
    hidden, table = tokens * shape.model.dim * shape.number, rows * shape.model.dim * shape.number
    saved = [_event("gradient of the hidden states", -hidden), _event("table gradient", -table)]
    made = Event(f"gradient of {table_name}", 0, table, term)
    if shape.tp == 1 or shape.profile.loss_parallel:
        return [_event("d normed", hidden), made, *saved]
    whole = Event("gradient of the whole table", 0, table, term)
    own = -(-shape.model.vocab_size // shape.tp) * shape.model.dim * shape.number
    return [_event("d normed", hidden), whole, *saved, made._replace(size=own), whole._replace(size=-table)]


_SAVED = ("gradient of the hidden states", "table gradient")


def linear_inputs_backward(events: list[Event]) -> list[Event]:
    """`linear_backward` in the half for inputs: the table's gradient is made and dropped, what was saved stays."""
    made = [event for event in events if event.name not in _SAVED]
    return [*made, *(event._replace(size=-event.size) for event in made[:0:-1])]


def linear_weights_backward(events: list[Event], adds: bool) -> list[Event]:
    """And in the half for weights: the gradient of the hidden states is made again and dropped."""
    kept = [event for event in events if event.name not in (*_SAVED, "d normed") and adds]
    dropped = events[0]._replace(size=-events[0].size)
    return [*events, dropped, *(event._replace(size=-event.size) for event in kept)]


def loss_forward(shape: Shape, held: bool) -> list[Event]:
    """From logits to the loss; `held`: somebody keeps the logits until the backward is over."""
    wide = shape.logits // shape.number * 4
    cast = wide if shape.number < 4 else 0
    profile = shape.profile
    if profile.loss == "compiled":
        return [_event("row maxima and sums", shape.tokens * 8)]
    if profile.loss == "chunked compiled":  # each piece is a result of the head of its own
        part = _event("logits of a piece", shape.logits // profile.loss_chunks)
        pieces = [_event("logits", -shape.logits), *[part] * profile.loss_chunks]
        return [*pieces, _event("row maxima and sums", shape.tokens * 8)]
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
    if profile.loss == "chunked compiled":
        part = shape.logits // profile.loss_chunks
        one = [_event("d logits of a piece", part), _event("logits of a piece", -part)]
        whole = [*[_event("d logits of a piece", -part)] * profile.loss_chunks, _event("d logits", shape.logits)]
        return [*one * profile.loss_chunks, *whole, _event("row maxima and sums", -shape.tokens * 8)]
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
    if shape.tp > 1 and profile.loss_parallel:  # (picked + exp(log-probabilities)) * gradient, in parallel/loss.py
        sums = [_event("exponentials", wide), _event("exponentials plus picked", wide), _event("exponentials", -wide)]
        events = [events[0], *sums, events[1], _event("exponentials plus picked", -wide), events[2]]
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
