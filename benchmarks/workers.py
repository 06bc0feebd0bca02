"""Show what a second worker thread is worth on a CPU, on an idle machine and on a busy one.

    python benchmarks/workers.py [--steps 6] [--repeats 7] [--cores 2]

Takes the same steps of the nano track with one worker and with one a core, in turns, in one
process: alone on the machine, then beside other processes that compute all the time, one of them
and one a core. Both arms see the same batches, so their losses must be bitwise equal: if not, the
exit status is 1. Results: benchmarks/results/workers.{json,md}; the last line is
`speedup:<steps per second with all workers over one, idle> busy:<the same where it is worst>`.
"""

import contextlib
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt
from benchmarks import common


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

    def __init__(self, config, runtime, steps):
        self.trainer = train_gpt.Trainer(config, runtime)
        corpus, index = train_gpt.open_corpus(config), self.trainer.table.index
        train_gpt.warm_up(self.trainer)
        index.read(corpus.indexed, runtime.in_parallel)  # before a run's steps
        self.loader = train_gpt.TrainLoader(config, corpus.shards, runtime, index)
        self.batch = self.loader.next_batch()
        self.steps = steps
        self.losses = []

    def round(self):
        """Seconds a step, with the loader that works ahead, as in a run."""
        began = time.perf_counter()
        for step in range(len(self.losses), len(self.losses) + self.steps):
            upcoming = self.loader.next_batch()
            loss = self.trainer.step(step, self.batch, upcoming)
            self.losses.append(loss.item())
            self.batch = upcoming
        return (time.perf_counter() - began) / self.steps


def in_turns(arms, repeats, busy):
    """{workers: seconds a step of each round} beside so many busy processes."""
    seconds = {workers: [] for workers in arms}
    with competitors(busy):
        for repeat in range(repeats):
            for workers in sorted(arms, reverse=repeat % 2):
                seconds[workers].append(arms[workers].round())
    return seconds


def main(argv=None):
    data = str(common.ROOT / train_gpt.TRACKS["nano"].data)
    parser = common.parser(__doc__, steps=6, repeats=7, cores=2, data=data, tiny=False)
    arguments = parser.parse_args(argv)
    cores = arguments.cores
    values = {"seed": 1, "data": arguments.data}
    if arguments.tiny:
        values = {**common.TINY, "steps": 40, **values}
    arms = {}
    for workers in (1, cores):
        runtime = train_gpt.Runtime("cpu", workers)
        config = common.config_of("nano", runtime, **values)
        steps = 3 * arguments.repeats * arguments.steps
        assert steps < config.steps, "a round goes on where the one before ended"
        arms[workers] = Arm(config, runtime, arguments.steps)
    rows = []
    data = {}
    for busy in (0, 1, cores):
        seconds = in_turns(arms, arguments.repeats, busy)
        ratios = [one / many for one, many in zip(seconds[1], seconds[cores], strict=True)]
        data[busy] = {"seconds": seconds, "ratios": ratios}
        times = [f"{1000 * statistics.median(own):.0f}" for own in seconds.values()]
        extremes = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([busy, *times, f"{statistics.median(ratios):.2f}", extremes])
    are_equal = arms[1].losses == arms[cores].losses
    header = ["other busy processes", "ms a step, 1 worker", f"ms a step, {cores} workers"]
    table = common.markdown_table([*header, "ratio, median", "range"], rows)
    note = (
        f"{cores} cores; {arguments.repeats} rounds of {arguments.steps} steps each, in "
        f"{config.dtype}; all losses of both arms are {'' if are_equal else 'not '}bitwise equal."
    )
    facts = common.environment("cpu")
    data = {"by_competitors": data, "losses_are_equal": are_equal}
    common.write_results(arguments.results, "workers", facts, data, f"{table}\n\n{note}")
    by_busy = data["by_competitors"].values()
    medians = [statistics.median(entry["ratios"]) for entry in by_busy]
    print(table)
    print(f"speedup:{medians[0]:.2f} busy:{min(medians[1:]):.2f}")
    for arm in arms.values():
        arm.loader.close()
    return int(not are_equal)


if __name__ == "__main__":
    sys.exit(main())
