"""The picture of one run, which the trainer draws at its end: nothing here waits for the rest of the package."""
import json


def plot_run(folder):
    """Draw what a run left in metrics.jsonl and result.json against training time into loss.png: the mean training loss
    since the last point, validation losses, and the target as a line. Returns the picture's path."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    target = json.loads((folder / "result.json").read_text())["target_loss"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for key in sorted({key for event in events for key in event if key.endswith("_loss")}):
        points = [(event["train_time"] / 1000, event[key]) for event in events if key in event]
        axes.plot(*zip(*points), label=key, **({"linewidth": 1} if key == "train_loss" else {"marker": "o"}))
    if target:
        axes.axhline(target, color="grey", linestyle=":", label=f"target {target:g}")
    axes.set(xlabel="training time, s", ylabel="loss, nats per token", title=folder.name.replace("$", r"\$"))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", format="png", dpi=120)
    plt.close(figure)
    return folder / "loss.png"
