"""The search's answer as one HTML file without scripts or network: a table, and plots as inline SVG."""

from collections.abc import Iterable, Sequence
from html import escape

from estimation.devices import GIB, Device
from estimation.search import SHOWN, Found
from estimation.time.timeline import timeline

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
KIND_COLOURS = {"F": COLOURS[0], "B": COLOURS[1], "I": COLOURS[3], "W": COLOURS[8], "R": COLOURS[7]}
WIDTH = 900
STYLE = (
    "body{font:14px sans-serif;max-width:960px;margin:2em auto}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:2px 8px;text-align:left}svg{width:100%;height:auto}"
)


def page(title: str, rows: Sequence[Sequence[str]], found: Sequence[Found], device: Device) -> str:
    """The whole file; `rows`: the printed table, its heads first."""
    heads, *body = rows
    table = "".join(
        f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"
        for tag, row in [("th", heads), *(("td", row) for row in body)]
    )
    best = found[0]
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1><table>{table}</table>"
        f"<h2>Memory of the fastest at its peaks, by pipeline rank (GiB)</h2>{memory_bars(best, device)}"
        f"<h2>Memory and step time of the fastest {len(found)}</h2>{pareto(found)}"
        f"<h2>Its step: pipeline ranks over time</h2>{pipeline_picture(best)}</html>\n"
    )


def memory_bars(found: Found, device: Device) -> str:
    """One stacked bar per pipeline rank; the line is what the device leaves the allocator."""
    reports = [memory.report() for memory in found.ranks]
    kinds = list(dict.fromkeys(kind for report in reports for kind in report.at_peak))
    limit = device.memory_gib - device.outside(found.ranks[0].job.communicators)
    scale = (WIDTH - 80) / max(limit, *(report.peak_bytes / GIB for report in reports))
    parts = []
    for number, report in enumerate(reports):
        x, y = 50.0, 22 * number
        parts.append(_text(0, y + 14, f"rank {number}"))
        for kind, size in report.at_peak.items():
            width = size / GIB * scale
            colour = COLOURS[kinds.index(kind) % len(COLOURS)]
            parts.append(_box(x, y, width, 18, colour, f"{kind}: {size / GIB:.2f} GiB"))
            x += width
    bottom = 22 * len(reports)
    parts.append(
        f'<line x1="{50 + limit * scale:.1f}" x2="{50 + limit * scale:.1f}" y1="0" y2="{bottom}" stroke="red"/>'
    )
    for place, kind in enumerate(kinds):
        x, y = 50 + 210 * (place % 4), bottom + 8 + 18 * (place // 4)
        parts += [_box(x, y, 12, 12, COLOURS[place % len(COLOURS)], kind), _text(x + 16, y + 11, kind)]
    return _svg(bottom + 30 + 18 * (len(kinds) // 4), parts)


def pareto(found: Sequence[Found]) -> str:
    """Points, and the line of those that nothing beats in both."""
    points = [(each.reserved_bytes / GIB, each.seconds) for each in found]
    (left, right), (low, high) = (_range(values) for values in zip(*points, strict=True))
    places = [(60 + (x - left) / (right - left) * 800, 280 - (y - low) / (high - low) * 260) for x, y in points]
    front, least = [], float("inf")
    for (memory, _), place in zip(points, places, strict=True):  # fastest first
        if memory < least:
            front.append(place)
            least = memory
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    parts = [f'<polyline points="{path}" fill="none" stroke="{COLOURS[3]}"/>']
    for number, ((x, y), (memory, seconds)) in enumerate(zip(places, points, strict=True), start=1):
        colour = COLOURS[3] if (x, y) in front else COLOURS[0]
        name = f"{number}: {memory:.1f} GiB, {seconds:.3f} s"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{name}</title></circle>')
        if number <= SHOWN:
            parts.append(_text(x + 6, y - 4, str(number)))
    parts += [_text(60, 300, f"{left:.1f} GiB reserved"), _text(780, 300, f"{right:.1f} GiB")]
    parts += [_text(0, 20, f"{high:.2f} s"), _text(0, 280, f"{low:.2f} s")]
    return _svg(310, parts)


def pipeline_picture(found: Found) -> str:
    slices = list(timeline(found.step))
    end = max(each.start + each.seconds for each in slices)
    tracks = list(dict.fromkeys((each.rank, each.track) for each in slices))
    parts = []
    for number, (rank, track) in enumerate(tracks):
        parts.append(_text(0, 20 * number + 13, f"{rank} {track}"))
    for each in slices:
        x, y = 110 + each.start / end * (WIDTH - 110), 20 * tracks.index((each.rank, each.track))
        title = f"{each.name}: {each.seconds * 1e3:.2f} ms"
        parts.append(_box(x, y, each.seconds / end * (WIDTH - 110), 16, KIND_COLOURS[each.kind], title))
    return _svg(20 * len(tracks) + 4, parts)


def _range(values: Iterable[float]) -> tuple[float, float]:
    values = list(values)
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + 1)


def _box(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height}" fill="{colour}" stroke="white" '
        f'stroke-width="0.3"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
