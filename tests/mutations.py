"""One-line mutations of train_gpt.py and the gates, and whether the tests aimed at them notice.

    python tests/mutations.py               all of them, some minutes
    python tests/mutations.py rotary polar  those of these names

Each is made alone, in a copy of the tree, and the tests of its row run there; without a mutation
these must pass. mutations.toml has the changes; what the tests said of them is written to
mutations.md, under today's date.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # after which tests hang, which is a failure, too
FAILED = (1, 2)  # pytest's exit status where tests fail, or cannot be collected
# A run of a test needs no history, corpus or closed board.
LEFT_OUT = shutil.ignore_patterns(".*", "logs", "__pycache__", "*.bin")

# {name: {"file": train_gpt.py where none is named, "old": what stands once in it, "new": ...,
# "tests": words for pytest}}.
ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
RESULTS = Path(__file__).with_suffix(".md")


def tests_fail(folder, tests):
    """Whether tests fail in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--all", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"cwd": folder / "tests", "env": environment, "capture_output": True, "text": True}
    try:
        done = subprocess.run([*command, *tests], timeout=SECONDS, **options)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, *FAILED):
        sys.exit(f"pytest ends with status {done.returncode}: {done.stdout[-2000:]}")
    return done.returncode in FAILED


def cells_of(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


def with_column(text, day, results):
    """The text of mutations.md with {name: "caught" or "MISSED"} of a day, and the rows of today's
    mutations. A dash stands where a mutation was not run that day."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    _, _, *days = cells_of(lines[first])
    found = {day: {} for day in days}
    for name, _, *verdicts in map(cells_of, lines[first + 2 :]):
        for known, verdict in zip(days, verdicts, strict=True):
            found[known][name] = verdict
    found[day] = found.get(day, {}) | results
    rows = [["Mutation", "Tests", *found], ["---"] * (2 + len(found))]
    for name, row in ROWS.items():
        rows.append([name, row["tests"], *(each.get(name, "-") for each in found.values())])
    table = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines[:first], *table]) + "\n"


def main(names):
    if unknown := [name for name in names if name not in ROWS]:
        sys.exit(f"{unknown[0]}: no such mutation; they are {', '.join(ROWS)}")
    chosen = {name: {"file": "train_gpt.py", **ROWS[name]} for name in names or ROWS}
    for name, row in chosen.items():
        if (count := (ROOT / row["file"]).read_text("utf-8").count(row["old"])) != 1:
            sys.exit(f"{name}: its old text stands {count} times in {row['file']}")
    all_tests = sorted({word for row in chosen.values() for word in row["tests"].split()})
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "tree")
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        if tests_fail(folder, all_tests):
            sys.exit(f"tests fail without any mutation: {' '.join(all_tests)}")
        for name, row in chosen.items():
            path = folder / row["file"]
            source = path.read_text("utf-8")
            path.write_text(source.replace(row["old"], row["new"]), "utf-8")
            results[name] = "caught" if tests_fail(folder, row["tests"].split()) else "MISSED"
            path.write_text(source, "utf-8")
            print(f"{results[name]}  {name}", flush=True)
            page = with_column(RESULTS.read_text("utf-8"), time.strftime("%Y-%m-%d"), results)
            RESULTS.write_text(page, "utf-8")
    caught = list(results.values()).count("caught")
    print(f"mutations: {caught}/{len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
