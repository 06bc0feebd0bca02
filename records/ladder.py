"""The ladder of a track's records as a staircase, an SVG that a README can show."""

import html
import math

# In pixels.
WIDTH = 480
ROW = 46
HEAD = 54
EDGE = 14

STYLE = """
:root { --ink: #1f2328; --faint: #59636e; --grid: #d1d9e0; --mark: #0969da; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #f0f6fc; --faint: #9198a1; --grid: #3d444d; --mark: #4493f8; --paper: #0d1117; }
}
.stairs text { font: 14px system-ui, sans-serif; fill: var(--ink);
  paint-order: stroke; stroke: var(--paper); stroke-width: 5px; }
.stairs .head { font-weight: 600; font-size: 17px; }
.stairs .faint { fill: var(--faint); font-size: 12px; }
.stairs .paper { fill: var(--paper); }
.stairs path { fill: none; stroke: var(--mark); stroke-width: 3; }
.stairs circle { fill: var(--mark); }
.stairs line { stroke: var(--grid); }
"""


def ladder(links):
    """[(title, seconds, gain or None), ...] of a chain of records: the first one's time, and what
    is left of it if each gain that was measured in pairs holds on that machine."""
    left = links[0].result["train_time_ms"]["mean"] / 1000
    steps = [(links[0].title, left, None)]
    for record in links[1:]:
        gain = record.result["speed"]["relative"][0]
        left *= 1 + gain
        steps.append((record.title, left, gain))
    return steps


def staircase(track, links):
    """The text of an SVG file of a chain of records, light or dark as its reader has it: one row
    each, and time from right to left."""
    steps = ladder(links)
    height = HEAD + ROW * len(steps) + 30
    low = math.log(min(left for _, left, _ in steps))
    high = math.log(steps[0][1])

    def across(left):
        share = (math.log(left) - low) / (high - low or 1)
        return f"{EDGE + 30 + share * (WIDTH - 2 * EDGE - 60):.1f}"

    count = f"{len(steps) - 1} proven step{'s' * (len(steps) != 2)}"
    title = html.escape(f"{track}: {steps[0][1]:.0f} s to {steps[-1][1]:.1f} s in {count}")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stairs" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="head" x="{EDGE}" y="24">{title}</text>',
    ]
    down = f"M{across(steps[0][1])} {HEAD + 30}"
    for number, (_, left, _) in enumerate(steps[1:], 1):
        down += f"V{HEAD + ROW * number + 30}H{across(left)}"
    parts.append(f'<path d="{down}"/>')
    for number, (name, left, gain) in enumerate(steps):
        y = HEAD + ROW * number
        shown = f"{left:.1f} s" if gain is None else f"{left:.1f} s, {100 * gain:+.0f} %"
        parts += [
            f'<circle cx="{across(left)}" cy="{y + 30}" r="5"/>',
            f'<text x="{EDGE}" y="{y + 16}">{html.escape(name)}</text>',
            f'<text x="{WIDTH - EDGE}" y="{y + 16}" text-anchor="end">{shown}</text>',
        ]
    note = "what the gains measured in pairs leave of the first record's time; log scale"
    parts.append(f'<text class="faint" x="{EDGE}" y="{height - 8}">{note}</text></svg>')
    return "\n".join(parts) + "\n"
