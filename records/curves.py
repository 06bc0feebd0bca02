"""`plot`: losses of runs and records as a PNG. Logs of other speedruns are drawn as well: whatever
has lines such as `step:125/1750 val_loss:4.6 train_time:21243ms`. Nothing is verified here."""

import re
from pathlib import Path

from records.files import LOG_LIMIT, SCRIPT_LIMIT, RecordError, read_bytes, require

LINE = re.compile(
    r"^step:(\d{1,9})/\d{1,9} (train|val)_loss:(\d{1,9}\.\d{1,9})\b.*?"
    r" train_time:(\d{1,12}(?:\.\d{1,9})?)(ms|s)\b",
    re.MULTILINE,
)


def curves_of(path):
    """{"train": [(step, time in s, loss), ...], "val": [...]} of a log."""
    try:
        text = read_bytes(path, LOG_LIMIT + SCRIPT_LIMIT).decode(errors="replace")
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None
    curves = {"train": [], "val": []}
    for step, kind, loss, time, unit in LINE.findall(text):
        seconds = float(time) / (1000 if unit == "ms" else 1)
        curves[kind].append((int(step), seconds, float(loss)))
    holds = any(curves.values())
    require(holds, f"{path}: holds no line `step:N/M val_loss:X train_time:Tms`")
    return curves


def logs_at(path):
    """The logs of a record's folder, of a run's folder, or of a folder of logs; or the log
    itself."""
    path = Path(path)
    for folder in (path / "logs", path):
        logs = sorted(folder.glob("*.txt")) if folder.is_dir() else []
        if logs:
            return logs
    return [path]


def plot(paths, out):
    """Draw losses against time and steps into a PNG: one colour a path, training losses faint."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    styles = {"train": {"linewidth": 0.8, "alpha": 0.4}, "val": {"marker": "o", "markersize": 3}}
    for number, path in enumerate(paths):
        label = Path(path).absolute().name.replace("$", r"\$")  # which would begin a formula
        for curves in map(curves_of, logs_at(path)):
            for kind, style in styles.items():
                steps, times, losses = zip(*curves[kind], strict=True) if curves[kind] else [[]] * 3
                for axes, values in zip(panels, (times, steps), strict=True):
                    axes.plot(values, losses, color=f"C{number}", label=label, **style)
                label = None  # once a path
    panels[0].set(xlabel="training time, s", ylabel="loss, nats per token")
    panels[1].set(xlabel="step")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend()
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=120)
    plt.close(figure)
