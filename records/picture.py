"""Pictures of losses: of records, of runs, and of other speedruns' logs. Nothing is verified."""

import json
import re
from pathlib import Path

from records.files import about, require, whole

LINE = re.compile(
    r"(?m)^step:\d{1,9}/\d{1,9} (train|val)_loss:(\d{1,9}\.\d{1,9})\b.*?"
    r" train_time:(\d{1,12}(?:\.\d{1,9})?)(ms|s)\b"
)
STYLE = {"svg.hashsalt": "", "svg.fonttype": "none"}  # the same file each time
STYLES = {"train": {"linewidth": 0.8, "alpha": 0.4}, "val": {"marker": "o", "markersize": 3}}


def curves_of(path):
    """{"train": [(seconds, loss), ...], "val": [...]} of a log, or of a JSON file of one curve."""
    require(path.is_file(), f"{path}: is no regular file")
    text = path.read_text("utf-8", "replace")
    if path.suffix == ".json":
        with about(path):
            found = json.loads(text)
            return {"val": [*zip(found["seconds"], found["loss"], strict=True)]}
    curves = {"train": [], "val": []}
    for kind, loss, time, unit in LINE.findall(text):
        curves[kind].append((float(time) / (1000 if unit == "ms" else 1), float(loss)))
    hint = "holds no line `step:N/M val_loss:X train_time:Tms`"
    require(curves["train"] or curves["val"], f"{path}: {hint}")
    return curves


def plot(paths, out, target=0.0, labels=()):
    """Draw the losses of records' folders, runs' folders and logs against seconds, into a PNG or,
    where its name says so, an SVG. labels: of the paths, in place of their names."""
    with about("matplotlib"):  # it may be absent, or misled by a variable
        from matplotlib import style

    with style.context(["default", STYLE]), whole(out) as partial:  # whatever a matplotlibrc says
        kind = "svg" if out.suffix == ".svg" else "png"
        figure = figure_of(paths, target, labels)
        figure.savefig(partial, format=kind, dpi=200, metadata={"Date": None})


def figure_of(paths, target, labels=()):
    """The matplotlib Figure of losses against seconds."""
    from matplotlib import colormaps, ticker
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")  # so narrow that a phone can show it
    axes = figure.subplots()
    for number, path in enumerate(map(Path, paths)):
        colour = colormaps["turbo"]((number + 0.5) / len(paths))
        logs = sorted(path.glob("logs/[!.]*.txt")) or sorted(path.glob("[!.]*.txt")) or [path]
        for kind, points in (pair for log in logs for pair in curves_of(log).items()):
            seconds, losses = zip(*points, strict=True) if points else ([], [])
            axes.plot(seconds, losses, color=colour, **STYLES[kind])
        name = labels[number] if labels else path.absolute().name
        axes.plot([], [], color=colour, label=name.replace("$", r"\$"))  # which begins a formula
    axes.set(xscale="log", xlabel="training time, s", yscale="log", ylabel="loss, nats per token")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set(major_formatter="{x:g}", minor_formatter="")
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    axes.grid(which="both", alpha=0.2)
    if target:
        axes.axhline(target, color="grey", linestyle=":", label=f"target {target:g}")
    figure.legend(loc="outside upper center", ncols=2, fontsize="x-small")
    return figure


def plot_run(folder):
    """Draw a run's log into the loss.png of its folder, with its target; returns the path."""
    config = re.search(r"^config:(.*)$", (folder / "log.txt").read_text("utf-8"), re.MULTILINE)
    target = json.loads(config[1])["target_loss"]
    plot([folder], folder / "loss.png", target)
    return folder / "loss.png"
