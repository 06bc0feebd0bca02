"""How long `python -m records verify` takes.

    python benchmarks/records_verify.py [--records 100] [--runs 8]

Fills a temporary folder with made-up records that hold the source of the working train_gpt.py and
as many steps as a run of the nano track logs. The last line has the time, without that which the
process takes to start.
"""

import argparse
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parent.parent / folder) for folder in ("", "tests/records")
]
import records_helpers as made
import train_gpt
from records.__main__ import main as records_command
from records.record import Repository
from records.source import config_of


def build(root, count, runs):
    """A repository of so many records, each of code and runs of its own."""
    repository = made.make_repository(Path(root))
    repository.rules["nano"] = Repository.at().rules["nano"]
    source = Path(train_gpt.__file__).read_text()
    config = config_of(source, "nano")
    for number in range(count):
        script = f"{source}# {number}\n"
        made.write_logs(
            repository.root / "logs",
            script,
            count=runs,
            rng=number,
            loss=config["target_loss"] - 0.01,
            steps=config["steps"],
            config=config,
            began=made.YESTERDAY + timedelta(hours=number > 0, minutes=number),
        )
        made.submitted(repository, f"Record-{number:04d}", script)
    records_command(["table"], made.fresh(repository))
    return repository


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100)
    parser.add_argument("--runs", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        repository = build(folder, arguments.records, arguments.runs)
        logs = list(repository.root.glob("records/*/*/*/*.txt"))
        size = sum(path.stat().st_size for path in logs)
        began = time.perf_counter()
        status = records_command(["verify"], made.fresh(repository))
        print(
            f"records: {arguments.records} logs: {len(logs)} size: {size / 2**20:.0f} MiB "
            f"verify: {time.perf_counter() - began:.2f} s"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
