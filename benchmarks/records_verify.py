"""How long `python -m records verify` takes.

    python benchmarks/records_verify.py [--records 100] [--runs 8]

Fills a temporary folder with copies of that of the repository's own records which has the most runs. As no run may
count twice, the copy of a log has a run id, a seed, a place among the declared runs and a first loss of its own. The
last line has the time, without that which the process takes to start.
"""
import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.__main__ import main as records_command  # noqa: E402
from records.log import END_OF_CODE  # noqa: E402
from records.record import Repository, load  # noqa: E402
from records.submit import submit  # noqa: E402


def copy_of(text, run, seed, counter, runs):
    """The log `text` as that of another run."""
    source, end, events = text.partition(f"\n{END_OF_CODE}\nrun:")
    events = events.replace(events.split()[0], run)
    for old, new in ((r" seed:\d+", f" seed:{seed}"), (r'"seed": \d+', f'"seed": {seed}'),
                     (r"^batch:.*", f"batch:1 counter:{counter}/{runs} start:1"),
                     (r" train_loss:\S+", f" train_loss:{seed}.00000")):
        events = re.sub(old, new, events, count=1, flags=re.MULTILINE)
    return source + end + events


def build(root, count, runs):
    """A repository of so many copied records."""
    own = Repository.of_trainer()
    model = max((record for records in own.records.values() for record in records), key=lambda record: len(record.runs))
    texts, repository = [run.path.read_text() for run in model.runs], Repository(Path(root), own.rules)
    repository.track_folder(model.track).mkdir(parents=True)
    repository.readme.write_text(f"<!-- records/{model.track} -->\n<!-- end -->\n")
    for number in range(count):
        paths = [Path(root, f"copy-{number}-{run}.txt") for run in range(runs)]
        for run, path in enumerate(paths):
            path.write_text(copy_of(texts[run % len(texts)], path.stem, runs * number + run, run + 1, runs))
        record, failures = submit(repository, f"Copy-{number:04d}", paths)
        assert not failures, failures
        repository.records[model.track].append(load(record.folder, model.track))  # spares reading all of them again
    records_command(["table"], repository)
    return repository


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100)
    parser.add_argument("--runs", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = build(folder, arguments.records, arguments.runs)
        logs = list(repository.root.glob("records/*/*/*/*.txt"))
        size, began = sum(path.stat().st_size for path in logs), time.perf_counter()
        status = records_command(["verify"], Repository(repository.root, repository.rules))
        print(f"records: {arguments.records} logs: {len(logs)} size: {size / 2**20:.0f} MiB "
              f"verify: {time.perf_counter() - began:.2f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
