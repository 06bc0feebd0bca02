"""Kills at random moments, over many settings: each run is killed and resumed until it is complete,
and compared with one that nobody killed. Also runs under torchrun, which restarts them by itself.
Writes kills.md, the table of counts.

    python tests/faults/kills.py [--kills 200] [--restarts 50] [--out tests/faults/kills.md]
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch

import helpers
import ranks

SETTINGS = {  # name: (ranks before a kill, ranks after it, what differs from helpers.RICH)
    "one rank": (1, 1, {}),
    "bfloat16": (1, 1, {"dtype": "bfloat16"}),
    "adam": (1, 1, {"matrix_update": "adam"}),
    "soap": (1, 1, {"matrix_update": "soap", "basis_every": 3}),
    "no table": (1, 1, helpers.NO_TABLE),
    "two workers": (1, 1, {"workers": 2}),
    "two ranks": (2, 2, {}),
    "two ranks, soap": (2, 2, {"matrix_update": "soap", "basis_every": 3}),
    "three ranks, no table": (3, 3, helpers.NO_TABLE),
    "two ranks, then one": (2, 1, {}),
    "one rank, then two, adam": (1, 2, {"matrix_update": "adam"}),
}
RESTARTS = "two ranks under `torchrun --max-restarts=3`, without another start"
ALWAYS = {"save_every": 4, "resume": "auto", "run_id": "run"}
TOLERANCE = 1e-4  # of losses where the number of ranks changes
PAGE = """Written by `python tests/faults/kills.py`. SIGKILL at a random moment, to all ranks or one
of them, then `--resume auto`: wrong is a run that does not finish, or whose checkpoint, training
losses or final loss differ from those of the run that nobody killed: by a bit, or, where the number
of ranks changes, by {tolerance}.

| setting | runs | kills | wrong |
|---|---|---|---|
{rows}

{made_of}, torch {torch}.
"""


def start(folder, values, world_size):
    """The pids of ranks that train in a folder, in processes that are forked from this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def call():
        ranks.speak_into(folder)
        os.chdir(folder)
        ranks.train_gpt.plot = lambda folder: ""
        return ranks.train_gpt.main(helpers.arguments(values))

    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            ranks._run_rank(rank, world_size, port, call, ())
        pids.append(pid)
    return pids


def end(pids, after=None, victims=()):
    """Wait for processes, of which some are killed after so many seconds; the others are told to
    end soon after, as a launcher does. Returns their exit statuses."""
    signals = []
    if after is not None:
        signals.append((after, victims, signal.SIGKILL))
        signals.append((5, pids, signal.SIGTERM))
        signals.append((60, pids, signal.SIGKILL))
    began, codes = time.monotonic(), {}
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if signals and time.monotonic() > began + signals[0][0]:
            _, those, number = signals.pop(0)
            for pid in set(those) - codes.keys():
                os.kill(pid, number)
            began = time.monotonic()
        time.sleep(0.01)
    return [*codes.values()]


def state_of(folder, run="run"):
    """(What a checkpoint has of a complete run, its training losses by step, its final loss)."""
    folder = folder / "logs" / run
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    losses = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if "train_loss" in event:
            losses[event["step"]] = event["train_loss"]
    state = {part: content[part] for part in ("step", "model", "groups", "loader", "rng")}
    return state, losses, json.loads((folder / "result.json").read_text())["val_loss"]


def differences(actual, expected, is_exact):
    """What of a run's checkpoint, training losses and final loss is not as in the other one, as
    words."""
    if is_exact:
        try:
            helpers.assert_bitwise(actual[0], expected[0])
        except AssertionError as error:
            return f"checkpoint {error}"
        return "" if actual[1:] == expected[1:] else "losses"
    gaps = [abs(actual[1][step] - loss) for step, loss in expected[1].items()]
    worst = max(*gaps, abs(actual[2] - expected[2]))
    return "" if worst < TOLERANCE else f"losses by {worst:.1e}"


def kill_and_resume(place, values, world_sizes, seconds, rng):
    """One run that is killed up to three times, within so many seconds of a start each. Returns
    (the exit statuses of its last start, how often it was killed)."""
    world_size, kills = world_sizes[0], 0
    for attempt in range(100):
        pids = start(place, values, world_size)
        victims = pids if rng.random() < 0.5 else [rng.choice(pids)]
        after = rng.uniform(0, seconds) if attempt < 3 else None
        codes = end(pids, after, victims)
        kills += -signal.SIGKILL in codes
        if not any(codes):
            break
        world_size = world_sizes[1]
    return codes, kills


def kill_runs(name, kills, folder, corpus, rng):
    """Runs of one setting until so many kills are done. Returns (runs, kills, wrong ones as
    words)."""
    before, after, changes = SETTINGS[name]
    values = {**helpers.RICH, "data": str(corpus), "val_every": 6, **ALWAYS, **changes}
    whole = folder / "whole"
    whole.mkdir(parents=True)
    began = time.monotonic()
    codes = end(start(whole, values, before))
    assert not any(codes), [ranks.spoken(whole, name, before) for name in ("stdout", "stderr")]
    seconds, expected = time.monotonic() - began, state_of(whole)
    runs, done, wrong = 0, 0, []
    while done < kills:
        place = folder / f"run{runs}"
        place.mkdir()
        codes, times = kill_and_resume(place, values, (before, after), seconds, rng)
        runs, done = runs + 1, done + times
        if any(codes):
            wrong.append(f"{name}: not finished: {ranks.spoken(place, 'stdout', after)[-200:]}")
        elif found := differences(state_of(place), expected, before == after):
            wrong.append(f"{name}: {found}")
        shutil.rmtree(place)
    return runs, done, wrong


def kill_ranks_at(step, process, place, rng):
    """SIGKILL to all ranks of a launcher, or one of them, once a step is in the log. Returns
    whether there were any."""
    log, began = place / "logs/run/log.txt", time.monotonic()
    while process.poll() is None and time.monotonic() < began + 120:
        text = log.read_text(errors="replace") if log.exists() else ""
        if re.search(rf"^step:{step}/20 train", text, re.MULTILINE):
            break
        time.sleep(0.01)
    command = ["pgrep", "-P", str(process.pid)]
    children = subprocess.run(command, capture_output=True, text=True).stdout.split()
    if process.poll() is not None or not children:
        return False
    for pid in children if rng.random() < 0.3 else [rng.choice(children)]:
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(1)
    return True


def run_under_torchrun(place, values, times, rng):
    """A run of two ranks under torchrun, in which ranks are killed so many times. Returns (its exit
    status, or words where it has none; how often ranks were killed)."""
    place.mkdir(parents=True)
    *launcher, script = helpers.command(2)
    kills = 0
    with open(place / "out", "w") as out:
        process = subprocess.Popen(
            [*launcher, "--max-restarts=3", script, *helpers.arguments(values)],
            cwd=place,
            env=helpers.environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        for _ in range(times):
            kills += kill_ranks_at(rng.randint(1, 19), process, place, rng)
        try:
            return process.wait(timeout=300), kills
        except subprocess.TimeoutExpired:
            process.kill()
            return "no end in 300 s", kills


def restart_runs(count, folder, corpus, rng):
    """Runs of two ranks under torchrun, of which one rank or both are killed once or twice. Returns
    (runs, kills, wrong ones as words)."""
    values = {**helpers.RICH, "data": str(corpus), **ALWAYS}
    whole = folder / "whole"
    code, _ = run_under_torchrun(whole, values, 0, rng)
    assert code == 0, (whole / "out").read_text()
    expected, kills, wrong = state_of(whole), 0, []
    for number in range(count):
        place = folder / f"restarted{number}"
        code, times = run_under_torchrun(place, values, rng.randint(1, 2), rng)
        kills += times
        if code:
            wrong.append(f"torchrun: {code}: {(place / 'out').read_text()[-300:]}")
        elif found := differences(state_of(place), expected, True):
            wrong.append(f"torchrun: {found}")
        shutil.rmtree(place)
    return count, kills, wrong


def write(path, rows, made_of):
    """The table of what has been done so far, and of which commit."""
    sums = [sum(row[column] for row in rows) for column in (1, 2, 3)]
    lines = [f"| {' | '.join(map(str, row))} |" for row in [*rows, ("all", *sums)]]
    page = PAGE.format(
        rows="\n".join(lines), made_of=made_of, torch=torch.__version__, tolerance=TOLERANCE
    )
    path.write_text(page)


def main(argv=None):
    """Returns how many runs were wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args(argv)
    rng, rows, wrong = random.Random(given.seed), [], []
    commit, is_dirty = ranks.train_gpt.git_state()
    made_of = f"Seed {given.seed}, commit {commit[:12]}{' with changes' * is_dirty}"

    def count(name, runs, kills, bad):
        rows.append((name, runs, kills, len(bad)))
        wrong.extend(bad)
        print(*rows[-1], *bad, sep=" | ", flush=True)
        write(given.out, rows, made_of)

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        corpus = helpers.make_corpus(folder / "corpus")
        for index, name in enumerate(SETTINGS):
            done = given.kills * index // len(SETTINGS)
            share = given.kills * (index + 1) // len(SETTINGS) - done
            count(name, *kill_runs(name, share, folder / str(index), corpus, rng))
        if given.restarts:
            runs = restart_runs(given.restarts, folder / "torchrun", corpus, rng)
            count(RESTARTS, *runs)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
