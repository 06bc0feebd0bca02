"""How long `python -m records verify` takes.

    python benchmarks/records_verify.py [--records 100] [--runs 8]

Makes a chain of synthetic records of the nano track in a temporary folder, each with the given number of runs and as
many paired runs of its parent, source and logs as long as real ones. Prints one line, without the process's start.
"""
import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import records_helpers  # noqa: E402
import train_gpt  # noqa: E402
from records.__main__ import main as records_command  # noqa: E402
from records.record import load  # noqa: E402


def build(root, count, runs):
    """A repository with that many records, each faster than its parent."""
    repository = records_helpers.make_repository(Path(root))
    padding = len(Path(train_gpt.__file__).read_text().splitlines())
    words = [f"word{number}" for number in range(count)]
    options = {"count": runs, "steps": train_gpt.TRACKS["nano"].steps}
    for number, word in enumerate(words):
        logs = repository.root / "logs" / word
        name, source = f"ab-nano-{word}", records_helpers.source_of(word, padding)
        paths = records_helpers.write_logs(logs, name, side="a", seed=1000 * number, source=source,
                                           time_ms=2**20 * 0.99**number, **options)
        before = records_helpers.source_of(words[number - 1], padding)
        baseline = records_helpers.write_logs(
            logs, name, side="b", seed=1000 * number + 500, source=before,
            time_ms=2**20 * 0.99**(number - 1), **options) if number else []
        record, failures = records_helpers.submit(repository, f"R{number:03d}", paths, baseline)
        assert not failures, failures
        repository.records["nano"].append(load(record.folder, "nano"))  # spares reading all of them again
    return repository


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100)
    parser.add_argument("--runs", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = build(folder, arguments.records, arguments.runs)
        records_command(["table"], records_helpers.fresh(repository))
        logs = list(repository.root.glob("records/*/*/*/*.txt"))
        size, began = sum(path.stat().st_size for path in logs), time.perf_counter()
        status = records_command(["verify"], records_helpers.fresh(repository))
        print(f"records: {arguments.records} logs: {len(logs)} size: {size / 2**20:.0f} MiB "
              f"verify: {time.perf_counter() - began:.2f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
