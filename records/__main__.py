"""python -m records run|submit|verify|table|diff|ab|reproduce|plot|report: see records/README.md."""
import argparse
import sys
from pathlib import Path

from records import compare, curves, experiment, render
from records.files import RecordError, printable, read_text, write_whole
from records.judge import judge_all, judge_one, judge_records
from records.record import MOST_LOGS, Repository, load
from records.submit import pull_request, submit


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise RecordError(f"{message}; see `python -m records --help`")


def parser():
    top = Parser(prog="python -m records", description="Records that anyone can judge and run again.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name, help):
        return commands.add_parser(name, help=help, description=help)
    it = command("submit", "make a record's folder out of logs, refusing what verify would refuse")
    it.add_argument("logs", nargs="+", metavar="LOG", help="log.txt or folder of a run")
    it.add_argument("--name", required=True, help="letters, digits and '-'")
    it.add_argument("--baseline", nargs="+", default=[], metavar="LOG", help="the parent's runs, made in pairs by ab")
    it = command("verify", "judge records; without FOLDER all of them and the leaderboards")
    it.add_argument("folders", nargs="*", metavar="FOLDER")
    it.add_argument("--tree", help="judge the records of this checkout, by the rules and with the code of this one")
    command("table", "renew the leaderboards in records/README.md")
    it = command("diff", "code and configuration of two records, or of a record and the working train_gpt.py")
    it.add_argument("a", metavar="A", help="a record's folder, a run's folder or a log")
    it.add_argument("b", metavar="B", nargs="?", help="the same; left out: the working train_gpt.py")
    for name, path, runs, help in (
            ("run", "", 8, "make the runs of a record of the working train_gpt.py that are still missing"),
            ("ab", "OTHER", 8, "run the working train_gpt.py (A) and OTHER's script (B) in pairs"),
            ("reproduce", "FOLDER", 4, "run a record's code with fresh seeds, and say whether its loss is reproduced")):
        it = command(name, help + "; executes code of a record" * bool(path))
        it.add_argument("--runs", type=int, default=runs, metavar="N", help=f"fixed before the first run [{runs}]")
        it.add_argument("--world-size", type=int, default=0, metavar="W", help="processes [as in the logs, else 1]")
        if path:
            it.add_argument("path", metavar=path, nargs="?" if name == "ab" else None,
                            help="a record's folder, a run's folder or a log" + " [the last record]" * (name == "ab"))
            it.add_argument("--yes", action="store_true", help="do not ask before code is executed")
        if name == "ab":
            it.add_argument("--compare", action="store_true", help="go on where no record can come of it")
        if name != "reproduce":
            it.add_argument("--track", default="nano", help="[nano]")
    it = command("plot", "draw losses of runs or records against time and steps, as PNG")
    it.add_argument("paths", nargs="+", metavar="PATH", help="a record's folder, a run's folder or a log")
    it.add_argument("--out", default="logs/plot.png", help="[logs/plot.png]")
    it = command("report", "write leaderboards and interactive curves as one HTML page")
    it.add_argument("--out", default="logs/report.html", help="[logs/report.html]")
    return top


def shown(path, root):
    """A path for a message: relative to the repository where it lies inside, without control characters."""
    path = Path(path)
    return ascii(str(path.relative_to(root) if path.is_relative_to(root) else path))[1:-1]


def tell(failures, root):
    """Print each failure as one line; returns the exit status."""
    for failure in failures:
        print(f"{shown(failure.path, root)}: {printable(failure.reason)}")
    return int(bool(failures))


def verify_command(repository, folders):
    if not folders:
        status = tell(judge_all(repository), repository.root)
        count = sum(map(len, repository.records.values()))
    else:
        status, count = 0, len(folders)
        for folder in map(Path, folders):
            folder = folder if folder.is_symlink() else folder.resolve()
            if folder.parent.name not in repository.rules:
                raise RecordError(f"{folder}: lies in no track's folder; those are {', '.join(repository.rules)}")
            status |= tell(judge_one(load(folder, folder.parent.name), repository), repository.root)
    if not status:
        print(f"verify: ok, {count} record{'s' * (count != 1)}")
    return status


def table_command(repository):
    if failures := judge_records(repository):
        return tell(failures, repository.root)
    text = read_text(repository.readme)
    write_whole(repository.readme, render.with_leaderboards(text, repository.records))
    for records in repository.records.values():
        print(render.leaderboard(records) if records else "", end="")
    return 0


def submit_command(repository, options):
    record, failures = submit(repository, options.name, options.logs, options.baseline)
    if failures:
        return tell(failures, record.folder)
    print(f"{pull_request(record)}\n\nmade {shown(record.folder, repository.root)}; next: write why it works into its "
          f"README.md, then python -m records table")
    return 0


def run(repository, options):
    """Carry out a parsed command; returns the exit status."""
    if "runs" in options and not 2 <= options.runs <= MOST_LOGS:
        raise RecordError(f"--runs {options.runs}: takes at least 2, for statistics, and at most {MOST_LOGS}")
    if options.command == "submit":
        return submit_command(repository, options)
    if options.command == "verify":
        return verify_command(repository, options.folders)
    if options.command == "table":
        return table_command(repository)
    if options.command == "plot":
        curves.plot(repository, options.paths, options.out)
        print(f"plot: {options.out}")
    elif options.command == "report":
        count, failures = curves.report(repository, options.out)
        print(f"report: {options.out}, {count} record{'s' * (count != 1)}, {len(failures)} failures of verify")
    elif options.command == "diff":
        before = compare.side_of(options.a, repository)
        after = (compare.side_of(options.b, repository) if options.b
                 else compare.working_side(before.track, repository))
        print(compare.describe(before, after))
    elif options.command == "run":
        experiment.run(repository, options.track, options.runs, options.world_size)
    elif options.command == "ab":
        other = (compare.side_of(options.path, repository) if options.path
                 else experiment.tip_of(repository, options.track))
        experiment.ab(repository, other, options.runs, options.world_size, options.yes, options.compare)
    else:
        record = compare.side_of(options.path, repository)
        experiment.reproduce(repository, record, options.runs, options.world_size, options.yes)
    return 0


def main(argv=None, repository=None):
    """Returns the exit status: 0 good, 1 failures of verify, 2 bad input, 130 interrupted."""
    try:
        options = parser().parse_args(argv)
        return run(repository or Repository.at(getattr(options, "tree", None)), options)
    except (RecordError, OSError) as error:
        print(f"records: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("records: interrupted; run, ab and reproduce go on where they stopped when called again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
