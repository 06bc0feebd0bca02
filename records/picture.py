"""Pictures of losses: of records, of runs, and of other speedruns' logs. Nothing is verified."""

import json
import re
from pathlib import Path

from records.files import require

LINE = re.compile(
    r"(?m)^step:(\d{1,9})/\d{1,9} (train|val)_loss:(\d{1,9}\.\d{1,9})\b.*?"
    r" train_time:(\d{1,12}(?:\.\d{1,9})?)(ms|s)\b"
)
STYLES = {"train": {"linewidth": 0.8, "alpha": 0.4}, "val": {"marker": "o", "markersize": 3}}


def curves_of(path):
    """{"train": [(time in s, step, loss), ...], "val": [...]} of a log."""
    require(path.is_file(), f"{path}: is no regular file")
    curves = {"train": [], "val": []}
    for step, kind, loss, time, unit in LINE.findall(path.read_text(errors="replace")):
        seconds = float(time) / (1000 if unit == "ms" else 1)
        curves[kind].append((seconds, int(step), float(loss)))
    hint = "holds no line `step:N/M val_loss:X train_time:Tms`"
    require(curves["train"] or curves["val"], f"{path}: {hint}")
    return curves


def plot(paths, out, target=0.0):
    """Draw the losses of records' folders, runs' folders and logs into a PNG, a path or a file."""
    from matplotlib import colormaps, ticker
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 8), layout="constrained")  # so narrow that a phone can show it
    panels = figure.subplots(2, sharey=True)
    for number, path in enumerate(map(Path, paths)):
        colour = colormaps["turbo"]((number + 0.5) / len(paths))
        logs = sorted(path.glob("logs/*.txt")) or sorted(path.glob("*.txt")) or [path]
        for kind, points in (pair for log in logs for pair in curves_of(log).items()):
            times, steps, losses = zip(*points, strict=True) if points else [[]] * 3
            for axes, places in zip(panels, (times, steps), strict=True):
                axes.plot(places, losses, color=colour, **STYLES[kind])
        name = path.absolute().name.replace("$", r"\$")  # which would begin a formula
        panels[0].plot([], [], color=colour, label=name)
    panels[0].set(xscale="log", xlabel="training time, s")
    panels[0].xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panels[0].xaxis.set(major_formatter="{x:g}", minor_formatter="")
    panels[1].set(xlabel="step")
    for axes in panels:
        axes.set(yscale="log", ylabel="loss, nats per token")
        axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        axes.grid(which="both", alpha=0.2)
        if target:
            axes.axhline(target, color="grey", linestyle=":", label=f"target {target:g}")
    names = panels[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside upper center", ncols=2, fontsize="x-small")
    figure.savefig(out, format="png", dpi=200)


def plot_run(folder):
    """Draw a run's log into the loss.png of its folder, with its target; returns the path."""
    target = json.loads((folder / "result.json").read_text())["config"]["target_loss"]
    plot([folder], folder / "loss.png", target)
    return folder / "loss.png"
