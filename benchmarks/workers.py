"""Show what a second worker thread is worth on a CPU, on an idle machine and on a busy one.

    python benchmarks/workers.py [--steps 6] [--repeats 7] [--cores 2]

Takes the same steps of the nano track with one worker and with one a core, in turns, in one process: alone on the
machine, then beside other processes that compute all the time, one of them and one a core. Both arms see
the same batches, so their losses must be bitwise equal: if not, the exit status is 1. Results:
benchmarks/results/workers.{json,md}; the last line is `speedup:<steps per second with all workers over one, idle>
busy:<the same where it is worst>`.
"""
import contextlib
import dataclasses
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402
import train_gpt  # noqa: E402


@contextlib.contextmanager
def competitors(count):
    """So many other processes that use up a core each."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


class Arm:
    """A trainer with a number of workers, and the batches of its first steps."""

    def __init__(self, config, workers, steps):
        self.trainer = train_gpt.Trainer(config, train_gpt.Runtime("cpu", workers=workers))
        shards, indexed, _ = train_gpt.open_corpus(config)
        train_gpt.warm_up(self.trainer)
        runtime, index = self.trainer.runtime, self.trainer.table.index
        self.loader = train_gpt.TrainLoader(config, shards, runtime, index=index)
        index.read(indexed, runtime, lambda: self.loader.text.copies(self.loader.text.starts))  # before a run's steps
        self.batch, self.steps, self.losses = self.loader.next(), steps, []

    def round(self):
        """Seconds a step, with the loader that works ahead, as in a run."""
        began = time.perf_counter()
        for step in range(len(self.losses), len(self.losses) + self.steps):
            loss, self.batch = self.trainer.step(step, self.batch, self.loader.next)
            self.losses.append(loss.item())
        return (time.perf_counter() - began) / self.steps


def main():
    arguments = common.parser(__doc__, steps=6, repeats=7, cores=2).parse_args()
    config = dataclasses.replace(train_gpt.TRACKS["nano"], seed=1)
    assert 3 * arguments.repeats * arguments.steps < config.steps, "the rounds go on where the one before ended"
    arms = {workers: Arm(config, workers, arguments.steps) for workers in (1, arguments.cores)}
    rows, data = [], {}
    for busy in (0, 1, arguments.cores):
        seconds = {workers: [] for workers in arms}
        with competitors(busy):
            for repeat in range(arguments.repeats):
                for workers in sorted(arms, reverse=repeat % 2):
                    seconds[workers].append(arms[workers].round())
        ratios = [one / all_ for one, all_ in zip(seconds[1], seconds[arguments.cores])]
        data[busy] = {"seconds": seconds, "ratios": ratios}
        rows.append([busy, *(f"{1000 * statistics.median(each):.0f}" for each in seconds.values()),
                     f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"])
    same = arms[1].losses == arms[arguments.cores].losses
    table = common.markdown_table(["other busy processes", "ms a step, 1 worker",
                                   f"ms a step, {arguments.cores} workers", "ratio, median", "range"], rows)
    common.write_results(arguments.results, "workers", common.environment("cpu"),
                         {"by_competitors": data, "losses_are_equal": same},
                         f"{table}\n\n{arguments.cores} cores; {arguments.repeats} rounds of {arguments.steps} steps each; "
                         f"all losses of both arms are {'' if same else 'not '}bitwise equal.")
    medians = [statistics.median(entry["ratios"]) for entry in data.values()]
    print(table)
    print(f"speedup:{medians[0]:.2f} busy:{min(medians[1:]):.2f}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
