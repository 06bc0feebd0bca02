"""One-line mutations of train_gpt.py, and whether the tests that are aimed at them notice.

    python tests/mutations.py               all of them, some minutes
    python tests/mutations.py rotary polar  those of these names

Each is made alone, in a copy of the tree, and the tests of its row run there; without a mutation
these must pass. Beside this file stand the changes, mutations.toml, and the results, mutations.md.
Where the trainer's text changes, a row follows it: what is broken stays the same.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600  # after which tests hang, which is a failure, too
FAILED = (1, 2)  # pytest's exit status where tests fail, or cannot be collected
# A run of a test needs no history, corpus or record, but it does need the package of the records.
LEFT_OUT = shutil.ignore_patterns(".*", "logs", "__pycache__", "*.bin", "nano", "mini")


class Mutation(NamedTuple):
    """A change of one line."""

    name: str
    old: str  # stands once in train_gpt.py
    new: str
    tests: str  # words for pytest: the tests that must notice


ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
MUTATIONS = [Mutation(name, **row) for name, row in ROWS.items()]


def tests_fail(folder, tests):
    """Whether tests fail in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--all", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=folder / "tests",
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, *FAILED):
        sys.exit(f"pytest ends with status {done.returncode}: {done.stdout[-2000:]}")
    return done.returncode in FAILED


def choose(names, source):
    """The mutations of these names, or all; each must find its text once in the source."""
    known = [mutation.name for mutation in MUTATIONS]
    unknown = set(names) - set(known)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no such mutation; they are {', '.join(known)}")
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    for mutation in chosen:
        count = source.count(mutation.old)
        if count != 1:
            sys.exit(f"{mutation.name}: its old text stands {count} times in train_gpt.py")
    return chosen


def main(names):
    source = (ROOT / "train_gpt.py").read_text("utf-8")
    chosen = choose(names, source)
    all_tests = sorted({word for mutation in chosen for word in mutation.tests.split()})
    caught = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "tree")
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        if tests_fail(folder, all_tests):
            sys.exit(f"tests fail without any mutation: {' '.join(all_tests)}")
        for mutation in chosen:
            mutated = source.replace(mutation.old, mutation.new)
            (folder / "train_gpt.py").write_text(mutated, "utf-8")
            is_caught = tests_fail(folder, mutation.tests.split())
            caught += is_caught
            print(f"{'caught' if is_caught else 'MISSED'}  {mutation.name}", flush=True)
    print(f"mutations: {caught}/{len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
