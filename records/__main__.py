"""The command line, `python -m records COMMAND`: see records/README.md."""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from records import experiment, picture, render
from records.files import CONTROL, RULES, RecordError, require
from records.judge import check_pages, check_records
from records.record import MOST_LOGS, Repository, read_script


def table(repository, options):
    check_records(repository)
    for path, text in render.pages_of(repository).items():
        path.write_text(text)


def verify(repository, options):
    check_records(repository)
    check_pages(repository)
    count = len(repository.all)
    print(f"verify: ok, {count} record{'s' * (count != 1)}")


def diff(repository, options):
    tip = repository.tip(options.track) if options.track in repository.rules else None
    require(tip or options.a, f"track {ascii(options.track)} has no record; name what to compare")
    paths = [Path(options.a or tip.folder), Path(options.b or repository.root)]
    files = [path / "train_gpt.py" if path.is_dir() else path for path in paths]
    for path in files:
        read_script(path)  # refuses what is no script
    subprocess.run(["git", "diff", "--no-index", "--stat", "--patch", "--", *files])


def plot(repository, options):
    out = options.out or Path("logs/plot.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.plot(options.paths, out)
    print(f"plot: {out}")


def report(repository, options):
    check_records(repository)
    out = options.out or Path("logs/report.html")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render.page(repository, out.parent))
    print(f"report: {out}")


TRACK = RULES["default_track"]
OPTIONS = {
    "--track": {"default": TRACK, "help": f"[{TRACK}]"},
    "--runs": {"type": int, "metavar": "N", "default": 8, "help": "fixed before the first run [8]"},
    "--world-size": {"type": int, "default": 0, "metavar": "W", "help": "processes [the record's]"},
    "--name": {"required": True, "help": "letters, digits and '-'"},
    "--by": {"required": True, "help": "who had the idea"},
    "--tree": {"help": "judge this checkout, by the rules and the code of this one"},
    "--out": {"type": Path, "help": "the file to write [in logs/]"},
    "a": {"nargs": "?", "metavar": "A", "help": "a record's folder or a script [the last record]"},
    "b": {"nargs": "?", "metavar": "B", "help": "the same [train_gpt.py]"},
    "folder": {"metavar": "FOLDER", "help": "a record's folder"},
    "paths": {"nargs": "+", "metavar": "PATH", "help": "a record, a run, or a folder of logs"},
}
RUN = ("--track", "--runs", "--world-size")
COMMANDS = {  # the function that carries it out, its help, and its options
    "ab": (experiment.ab, "run train_gpt.py and the last record's in pairs", *RUN),
    "run": (experiment.ab, "run train_gpt.py alone, for a record that claims no gain", *RUN),
    "submit": (experiment.submit, "make a record of these runs", "--track", "--name", "--by"),
    "table": (table, "renew the leaderboards in records/README.md, and the staircases"),
    "verify": (verify, "judge all records, and the leaderboards", "--tree"),
    "diff": (diff, "what train_gpt.py changes of the last record, or B of A", "--track", "a", "b"),
    "reproduce": (experiment.reproduce, "run a record again", "folder", *RUN[1:]),
    "plot": (plot, "draw losses against time and steps, as a PNG", "paths", "--out"),
    "report": (report, "write ladder, leaderboards and curves as one HTML page", "--out"),
}


def main(argv=None, repository=None):
    """Returns the exit status: 0 good, 2 what was refused, in one line, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m records", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, words, *options) in COMMANDS.items():
        command = commands.add_parser(name, help=words, description=words)
        for option in options:
            command.add_argument(option, **OPTIONS[option])
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and so are its runs
    try:
        repository = repository or Repository.at(getattr(options, "tree", None))
        runs = getattr(options, "runs", MOST_LOGS)
        require(2 <= runs <= MOST_LOGS, f"--runs {runs}: takes 2, for statistics, to {MOST_LOGS}")
        COMMANDS[options.command][0](repository, options)
        return 0
    except (RecordError, OSError) as error:
        shown = " ".join(str(error).split()).removeprefix(f"{repository.root}/")
        shown = CONTROL.sub(lambda found: ascii(found[0])[1:-1], shown)
        print(f"records: {shown}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("records: interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
