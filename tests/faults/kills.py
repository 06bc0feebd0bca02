"""Kills at random moments, over many settings: each run is killed and resumed until it is complete, and compared with
one that nobody killed. Also runs under torchrun, which restarts them by itself. Writes kills.md, the table of counts.

    python tests/faults/kills.py [--kills 200] [--restarts 50] [--out tests/faults/kills.md]
"""
import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

import helpers  # noqa: E402
import ranks  # noqa: E402

SETTINGS = {  # name: (ranks before a kill, ranks after it, what differs from helpers.RICH)
    "one rank": (1, 1, {}),
    "bfloat16": (1, 1, {"dtype": "bfloat16"}),
    "one rank, sharded table": (1, 1, {"ngram_comms": "sharded"}),
    "adam": (1, 1, {"matrix_update": "adam"}),
    "soap": (1, 1, {"matrix_update": "soap", "basis_every": 3}),
    "no table": (1, 1, helpers.NO_TABLE),
    "two workers": (1, 1, {"workers": 2}),
    "two ranks": (2, 2, {}),
    "two ranks, sharded table": (2, 2, {"ngram_comms": "sharded"}),
    "two ranks, soap": (2, 2, {"matrix_update": "soap", "basis_every": 3}),
    "two ranks, then one": (2, 1, {}),
    "one rank, then two, adam": (1, 2, {"matrix_update": "adam"}),
}


def start(folder, values, world_size):
    """The pids of ranks that train in a folder, in processes that are forked from this one."""
    import socket
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
    """Wait for processes, of which some are killed after so many seconds; the others are told to end soon after, as a
    launcher does. Returns their exit statuses."""
    began, codes, signals = time.monotonic(), {}, [(after, victims, signal.SIGKILL), (5, pids, signal.SIGTERM),
                                                   (60, pids, signal.SIGKILL)] if after is not None else []
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
    content = torch.load(folder / "logs" / run / "checkpoint.pt", weights_only=True)
    metrics = [json.loads(line) for line in (folder / "logs" / run / "metrics.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["train_loss"] for event in metrics if "train_loss" in event}
    return {part: content[part] for part in ("step", "model", "groups", "loader", "rng")}, losses, json.loads(
        (folder / "logs" / run / "result.json").read_text())["val_loss"]


def differences(actual, expected, exact):
    """What of a run's checkpoint, training losses and final loss is not as in the other one, as words."""
    if exact:
        try:
            helpers.assert_bitwise(actual[0], expected[0])
        except AssertionError as error:
            return f"checkpoint {error}"
        return "" if actual[1:] == expected[1:] else "losses"
    worst = max(abs(actual[1][step] - loss) for step, loss in expected[1].items())
    return "" if max(worst, abs(actual[2] - expected[2])) < 1e-4 else f"losses by {worst:.1e}"


def kill_runs(name, kills, folder, corpus, rng):
    """Runs of one setting until so many kills are done. Returns (runs, kills, wrong ones as words)."""
    before, after, changes = SETTINGS[name]
    values = {**helpers.RICH, "data": str(corpus), "save_every": 4, "val_every": 6, "resume": "auto",
              "run_id": "run", **changes}
    values["save_every"] -= values["save_every"] % values["adam_every"]
    whole = folder / "whole"
    whole.mkdir(parents=True)
    began = time.monotonic()
    assert set(end(start(whole, values, before))) == {0}, ranks.spoken(whole, "stdout", before) + ranks.spoken(whole, "stderr", before)
    seconds, expected, runs, done, wrong = time.monotonic() - began, state_of(whole), 0, 0, []
    while done < kills:
        place, world_size, codes = folder / f"run{runs}", before, [1]
        place.mkdir()
        for attempt in range(100):
            pids = start(place, values, world_size)
            victims = pids if rng.random() < 0.5 else [rng.choice(pids)]
            kill = attempt < 3
            codes = end(pids, rng.uniform(0, seconds) if kill else None, victims)
            done += -signal.SIGKILL in codes
            if not any(codes):
                break
            world_size = after
        runs += 1
        if any(codes):
            wrong.append(f"{name}: not finished: " + ranks.spoken(place, "stdout", world_size)[-200:])
        elif found := differences(state_of(place), expected, before == after):
            wrong.append(f"{name}: {found}")
        shutil.rmtree(place)
    return runs, done, wrong


def restart_runs(count, folder, corpus, rng):
    """Runs of two ranks under torchrun, of which one rank or both are killed once or twice. Returns (runs, kills, wrong)."""
    kills, wrong, expected = 0, [], None
    values = {**helpers.RICH, "data": str(corpus), "save_every": 4, "resume": "auto", "run_id": "run"}
    for number in range(count + 1):  # the first one is not killed
        place = folder / f"restarted{number}"
        place.mkdir(parents=True)
        command = [*helpers.command(2)[:-1], "--max-restarts=3", helpers.command(2)[-1], *helpers.arguments(values)]
        process = subprocess.Popen(command, cwd=place, env=helpers.environment(), text=True,
                                   stdout=open(place / "out", "w"), stderr=subprocess.STDOUT)
        for _ in range(rng.randint(1, 2) if number else 0):
            log, seen = place / "logs/run/log.txt", time.monotonic()
            at = rng.randint(1, 19)
            while process.poll() is None and time.monotonic() < seen + 120:
                text = log.read_text(errors="replace") if log.exists() else ""
                if re.search(rf"^step:{at}/20 train", text, re.MULTILINE):
                    break
                time.sleep(0.01)
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
            if process.poll() is None and children:
                kills += 1
                for pid in children if rng.random() < 0.3 else [rng.choice(children)]:
                    os.kill(int(pid), signal.SIGKILL)
                time.sleep(1)
        try:
            code = process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            code = "no end in 300 s"
        if code:
            wrong.append(f"torchrun: {code}: " + (place / "out").read_text()[-300:])
        elif number and (found := differences(state_of(place), expected, True)):
            wrong.append(f"torchrun: {found}")
        elif not number:
            expected = state_of(place)
        if number:
            shutil.rmtree(place)
    return count, kills, wrong


def write(path, rows, made_of):
    """The table of what has been done so far, and of which commit."""
    rows = [*rows, ("all", *(sum(row[column] for row in rows) for column in (1, 2, 3)))]
    path.write_text("".join([
        "Written by `python tests/faults/kills.py`. SIGKILL at a random moment, to all ranks or one of them, then `--resume "
        "auto`: wrong is a\nrun that does not finish, or whose checkpoint, training losses or final loss differ from those "
        "of the run that nobody killed:\nby a bit, or, where the number of ranks changes, by 1e-4.\n\n"
        "| setting | runs | kills | wrong |\n|---|---|---|---|\n", *(f"| {' | '.join(map(str, row))} |\n" for row in rows),
        f"\n{made_of}, torch {torch.__version__}.\n"]))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    given = parser.parse_args(argv)
    rng, rows, wrong, (commit, dirty) = random.Random(given.seed), [], [], ranks.train_gpt.git_state()
    made_of = f"Seed {given.seed}, commit {commit[:12]}{' with changes' * dirty}"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        corpus = helpers.make_corpus(folder / "corpus")
        for index, name in enumerate(SETTINGS):
            share = given.kills * (index + 1) // len(SETTINGS) - given.kills * index // len(SETTINGS)
            runs, kills, bad = kill_runs(name, share, folder / str(index), corpus, rng)
            rows.append((name, runs, kills, len(bad)))
            wrong += bad
            print(*rows[-1], *bad, sep=" | ", flush=True)
            write(given.out, rows, made_of)
        if given.restarts:
            runs, kills, bad = restart_runs(given.restarts, folder / "torchrun", corpus, rng)
            rows.append(("two ranks under `torchrun --max-restarts=3`, without another start", runs, kills, len(bad)))
            wrong += bad
            print(*rows[-1], *bad, sep=" | ", flush=True)
            write(given.out, rows, made_of)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
