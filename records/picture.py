"""Pictures of losses, of `plot` and `report`, and loss.png, which the trainer draws at the end.

Logs of other speedruns are drawn as well: whatever has lines such as
`step:125/1750 val_loss:4.6 train_time:21243ms`. Nothing is verified here.
"""

import json
import re
from pathlib import Path

from records.files import LIMIT, read_bytes, require

LINE = re.compile(
    r"^step:(\d{1,9})/\d{1,9} (train|val)_loss:(\d{1,9}\.\d{1,9})\b.*?"
    r" train_time:(\d{1,12}(?:\.\d{1,9})?)(ms|s)\b",
    re.MULTILINE,
)
STYLES = {"train": {"linewidth": 0.8, "alpha": 0.4}, "val": {"marker": "o", "markersize": 3}}


def curves_of(path):
    """{"train": [(time in s, step, loss), ...], "val": [...]} of a log."""
    text = read_bytes(path, LIMIT).decode(errors="replace")
    curves = {"train": [], "val": []}
    for step, kind, loss, time, unit in LINE.findall(text):
        seconds = float(time) / (1000 if unit == "ms" else 1)
        curves[kind].append((seconds, int(step), float(loss)))
    hint = "holds no line `step:N/M val_loss:X train_time:Tms`"
    require(curves["train"] or curves["val"], f"{path}: {hint}")
    return curves


def logs_at(path):
    """The logs of a record's folder, of a run's, or of any folder of logs; or the log itself."""
    return sorted(path.glob("logs/*.txt")) or sorted(path.glob("*.txt")) or [path]


def plot(paths, out, target=0.0):
    """Draw losses against time and steps into a PNG, which is a path or a file: one colour a path,
    training losses faint, and a target as a line if there is one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # It is narrow, so that its letters can be read on a phone.
    figure, panels = plt.subplots(2, figsize=(5, 8), layout="constrained", sharey=True)
    for number, path in enumerate(map(Path, paths)):
        colour = plt.get_cmap("turbo")((number + 0.5) / len(paths))
        for curves in map(curves_of, logs_at(path)):
            for kind, points in curves.items():
                times, steps, losses = zip(*points, strict=True) if points else [[]] * 3
                panels[0].plot(times, losses, color=colour, **STYLES[kind])
                panels[1].plot(steps, losses, color=colour, **STYLES[kind])
        name = path.absolute().name.replace("$", r"\$")  # which would begin a formula
        panels[0].plot([], [], color=colour, label=name)
    panels[0].set(xscale="log", xlabel="training time, s")
    panels[0].xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    panels[0].xaxis.set_major_formatter("{x:g}")
    panels[1].set(xlabel="step")
    for axes in panels:
        axes.set(yscale="log", ylabel="loss, nats per token")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(which="both", alpha=0.2)
        if target:
            axes.axhline(target, color="grey", linestyle=":", label=f"target {target:g}")
    names = panels[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside upper center", ncols=2, fontsize="x-small")
    figure.savefig(out, format="png", dpi=200)
    plt.close(figure)


def plot_run(folder):
    """Draw a run's log into the loss.png of its folder, with its target; returns the path."""
    target = json.loads((folder / "result.json").read_text())["target_loss"]
    plot([folder], folder / "loss.png", target)
    return folder / "loss.png"
