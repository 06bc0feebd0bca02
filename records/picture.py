"""The picture of one run, which the trainer draws at its end. Nothing here waits for the rest of
the package."""

import json


def plot_run(folder):
    """Draw what a run left in metrics.jsonl and result.json against training time into loss.png.

    The picture has the mean training loss since the last point, validation losses, and the target
    as a line. Returns its path.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    target = json.loads((folder / "result.json").read_text())["target_loss"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for key in losses_in(events):
        points = [event for event in events if key in event]
        times = [event["train_time"] / 1000 for event in points]
        style = {"linewidth": 1} if key == "train_loss" else {"marker": "o"}
        axes.plot(times, [event[key] for event in points], label=key, **style)
    if target:
        axes.axhline(target, color="grey", linestyle=":", label=f"target {target:g}")
    title = folder.name.replace("$", r"\$")  # a dollar sign would begin a formula
    axes.set(xlabel="training time, s", ylabel="loss, nats per token", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", format="png", dpi=120)
    plt.close(figure)
    return folder / "loss.png"


def losses_in(events):
    """The names of all losses that some event has, in order."""
    names = {name for event in events for name in event}
    return sorted(name for name in names if name.endswith("_loss"))
