"""The command line, `python -m records COMMAND`: see records/README.md."""

import argparse
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

try:
    from records import experiment, picture, render
    from records.files import CONTROL, LIMITS, RULES, RecordError, require
    from records.judge import check_pages, check_records
    from records.record import Repository, read_script
except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
    said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    print(f"records: rules.json or forms.toml is damaged ({said}); git restore it", file=sys.stderr)
    sys.exit(2)


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
    list(map(read_script, files))  # which refuses what is no script
    subprocess.run(["git", "diff", "--no-index", "--stat", "--patch", "--", *files])


def out_of(options, name):
    """The file to write, whose folder is there."""
    out = Path(options.out or f"logs/{name}")
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def plot(repository, options):
    out = out_of(options, "plot.png")
    picture.plot(options.paths, out)
    print(f"plot: {out}")


def report(repository, options):
    check_records(repository)
    out = out_of(options, "report.html")
    out.write_text(render.page(repository, out.parent))
    print(f"report: {out}")


LINE = tomllib.loads(render.template("commands.toml"))
LINE["options"]["--track"]["default"] = RULES["default_track"]
OWN = (table, verify, diff, plot, report, experiment.ab, experiment.submit, experiment.reproduce)
CALLS = {"run": experiment.ab, **{call.__name__: call for call in OWN}}


def main(argv=None, repository=None):
    """Returns the exit status: 0 good, 2 what was refused, in one line, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m records", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (words, *options) in LINE["commands"].items():
        command = commands.add_parser(name, help=words, description=words)
        for option in options:
            settings = LINE["options"][option]
            kind = {"type": type(settings["default"])} if "default" in settings else {}
            command.add_argument(option, **settings, **kind)
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and so are its runs
    try:
        repository = repository or Repository.at(getattr(options, "tree", None))
        runs = getattr(options, "runs", LIMITS.logs)
        limit = f"takes 2, for statistics, to {LIMITS.logs}"
        require(2 <= runs <= LIMITS.logs, f"--runs {runs}: {limit}")
        CALLS[options.command](repository, options)
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
