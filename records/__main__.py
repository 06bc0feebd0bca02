"""The command line, `python -m records COMMAND`: see records/README.md."""

import argparse
import difflib
import os
import sys
from pathlib import Path

from records import experiment, picture, report
from records.files import RecordError, printable, require
from records.judge import drawn_files, judge_all, judge_records
from records.record import MOST_LOGS, Repository, difference, script_at
from records.submit import submit

SCRIPT = "a record's folder or a script"
OPTIONS = {  # of several commands
    "--track": {"default": "nano", "help": "[nano]"},
    "--runs": {"type": int, "metavar": "N", "help": "fixed before the first run [%(default)s]"},
    "--world-size": {"type": int, "default": 0, "metavar": "W", "help": "processes [the record's]"},
    "--yes": {"action": "store_true", "help": "do not ask before a record's code is executed"},
}


def parser():
    """The whole command line. Each command names the function that carries it out."""
    top = argparse.ArgumentParser(prog="python -m records", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name, action, help, *options, runs=8):
        it = commands.add_parser(name, help=help, description=help)
        it.set_defaults(action=action, runs=runs, tree=None)
        for option in options:
            it.add_argument(option, **OPTIONS[option])
        return it

    it = command("ab", experiment.ab, "run train_gpt.py and the last record's in pairs", *OPTIONS)
    it.add_argument("other", nargs="?", metavar="OTHER", help=f"{SCRIPT}; counts for no record")
    words = "run train_gpt.py alone, for a record that claims no gain"
    command("run", experiment.run, words, "--track", "--runs", "--world-size")
    it = command("submit", submit_runs, "make a record's folder of these runs", "--track")
    it.add_argument("--name", required=True, help="letters, digits and '-'")
    it.add_argument("--by", required=True, help="who had the idea")
    command("table", table, "renew the leaderboards in records/README.md, and the staircases")
    it = command("verify", verify, "judge all records, and the leaderboards")
    it.add_argument("--tree", help="judge this checkout, by the rules and the code of this one")
    it = command("diff", diff, "what train_gpt.py changes of the last record, or B of A", "--track")
    it.add_argument("a", nargs="?", metavar="A", help=f"{SCRIPT} [the last record]")
    it.add_argument("b", nargs="?", metavar="B", help=f"{SCRIPT} [train_gpt.py]")
    words = "run a record's script with fresh seeds, and judge it"
    options = ("--runs", "--world-size", "--yes")
    it = command("reproduce", experiment.reproduce, words, *options, runs=4)
    it.add_argument("folder", metavar="FOLDER", help="a record's folder")
    it = command("plot", plot, "draw losses against time and steps, as a PNG")
    it.add_argument("paths", nargs="+", metavar="PATH", help="a record, a run, or a folder of logs")
    it.add_argument("--out", default="logs/plot.png", help="[%(default)s]")
    it = command("report", report_page, "write ladder, leaderboards and curves as one HTML page")
    it.add_argument("--out", default="logs/report.html", help="[%(default)s]")
    return top


def tell(failures, root):
    """Print each failure as one line; returns the exit status."""
    for failure in failures:
        path = failure.path
        if path.is_relative_to(root):
            path = path.relative_to(root)
        print(f"{ascii(str(path))[1:-1]}: {printable(failure.reason)}")
    return 1 if failures else 0


# ----- the commands that train nothing: each takes the repository and its options, and returns the
# exit status


def submit_runs(repository, options):
    """Make a record, and print its page, which describes its pull request as well."""
    record, failures = submit(repository, options.name, options.track, options.by)
    if not failures:
        print((record.folder / "README.md").read_text())
        print(f"made {record.folder.relative_to(repository.root)}; write why it works into its")
        print("README.md, then: python -m records table && python -m records verify")
    return tell(failures, repository.root)


def table(repository, options):
    """Renew the leaderboards and staircases, if all records are good."""
    failures = judge_records(repository)
    if not failures:
        for path, text in drawn_files(repository).items():
            path.write_text(text)
    return tell(failures, repository.root)


def verify(repository, options):
    """Judge everything."""
    failures = judge_all(repository)
    if not failures:
        count = len(repository.all)
        print(f"verify: ok, {count} record{'s' * (count != 1)}")
    return tell(failures, repository.root)


def diff(repository, options):
    """Print what two scripts differ in."""
    tip = repository.tip(options.track) if options.track in repository.rules else None
    require(tip or options.a, f"track {ascii(options.track)} has no record; name what to compare")
    paths = [options.a or tip.folder, options.b or repository.root / "train_gpt.py"]
    labels = [options.a or tip.name, options.b or "train_gpt.py"]
    before, after = map(script_at, paths)
    summary = difference(before, after, options.track)
    lines = [text.splitlines(keepends=True) for text in (before, after)]
    print("".join(difflib.unified_diff(*lines, *labels)), end="")
    print(summary)


def plot(repository, options):
    """Draw curves as a PNG."""
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    picture.plot(options.paths, options.out)
    print(f"plot: {options.out}")


def report_page(repository, options):
    """Write the page of records, if all of them are good."""
    failures = judge_records(repository)
    if not failures:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(report.page(repository, out.parent))
        print(f"report: {options.out}")
    return tell(failures, repository.root)


def main(argv=None, repository=None):
    """Returns the exit status: 0 good, 1 failures of verify, 2 bad input, 130 interrupted."""
    try:
        options = parser().parse_args(argv)
        is_number = 2 <= options.runs <= MOST_LOGS
        require(is_number, f"--runs {options.runs}: takes 2, for statistics, to {MOST_LOGS}")
        repository = repository or Repository.at(options.tree)
        return options.action(repository, options) or 0
    except BrokenPipeError:  # the reader has seen enough, as behind `| head`
        sys.stdout = open(os.devnull, "w")  # Python would write to the pipe once more at its end
        return 0
    except (RecordError, OSError) as error:
        print(f"records: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("records: interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
