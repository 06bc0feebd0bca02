"""The command line, `python -m records COMMAND`: see records/README.md."""

import argparse
import sys
from pathlib import Path

from records import compare, curves, experiment, render
from records.files import RecordError, printable, read_text, write_whole
from records.judge import judge_all, judge_one, judge_records
from records.record import MOST_LOGS, Repository, load
from records.submit import pull_request, submit

WHERE = "a record's folder, a run's folder or a log"
EXECUTES = "; executes code of a record"


class Parser(argparse.ArgumentParser):
    """It reports what is wrong with the command line as one line, like everything else."""

    def error(self, message):
        """Called by argparse, whose own would print the usage and exit."""
        raise RecordError(f"{message}; see `python -m records --help`")


def parser():
    """The whole command line. Each command names the function that carries it out."""
    top = Parser(
        prog="python -m records", description="Records that anyone can judge and run again."
    )
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )

    def command(name, action, help):
        it = commands.add_parser(name, help=help, description=help)
        it.set_defaults(action=action)
        return it

    add_commands_of_records(command)
    add_commands_that_train(command)
    add_commands_that_draw(command)
    return top


def add_commands_of_records(command):
    """submit, verify, table and diff."""
    it = command(
        "submit",
        submit_command,
        "make a record's folder out of logs, refusing what verify would refuse",
    )
    it.add_argument("logs", nargs="+", metavar="LOG", help="log.txt or folder of a run")
    it.add_argument("--name", required=True, help="letters, digits and '-'")
    it.add_argument(
        "--baseline",
        nargs="+",
        default=[],
        metavar="LOG",
        help="the parent's runs, made in pairs by ab",
    )
    it = command(
        "verify",
        verify_command,
        "judge records; without FOLDER all of them and the leaderboards",
    )
    it.add_argument("folders", nargs="*", metavar="FOLDER")
    it.add_argument(
        "--tree",
        help="judge the records of this checkout, by the rules and with the code of this one",
    )
    command("table", table_command, "renew the leaderboards in records/README.md")
    it = command(
        "diff",
        diff_command,
        "code and configuration of two records, or of a record and the working train_gpt.py",
    )
    it.add_argument("a", metavar="A", help=WHERE)
    it.add_argument(
        "b", metavar="B", nargs="?", help="the same; left out: the working train_gpt.py"
    )


def add_commands_that_train(command):
    """run, ab and reproduce."""
    it = command(
        "run",
        run_command,
        "make the runs of a record of the working train_gpt.py that are still missing",
    )
    add_counts(it, runs=8)
    add_track(it)
    it = command(
        "ab",
        ab_command,
        "run the working train_gpt.py (A) and OTHER's script (B) in pairs" + EXECUTES,
    )
    add_counts(it, runs=8)
    add_track(it)
    it.add_argument("path", metavar="OTHER", nargs="?", help=f"{WHERE} [the last record]")
    add_consent(it)
    it.add_argument("--compare", action="store_true", help="go on where no record can come of it")
    it = command(
        "reproduce",
        reproduce_command,
        "run a record's code with fresh seeds, and say whether its loss is reproduced" + EXECUTES,
    )
    add_counts(it, runs=4)
    it.add_argument("path", metavar="FOLDER", help=WHERE)
    add_consent(it)


def add_counts(it, runs):
    """How many runs a command makes, of how many processes."""
    it.add_argument(
        "--runs",
        type=int,
        default=runs,
        metavar="N",
        help=f"fixed before the first run [{runs}]",
    )
    it.add_argument(
        "--world-size",
        type=int,
        default=0,
        metavar="W",
        help="processes [as in the logs, else 1]",
    )


def add_track(it):
    """The track of the working script."""
    it.add_argument("--track", default="nano", help="[nano]")


def add_consent(it):
    """The word that spares the question before code is executed."""
    it.add_argument("--yes", action="store_true", help="do not ask before code is executed")


def add_commands_that_draw(command):
    """plot and report."""
    it = command(
        "plot",
        plot_command,
        "draw losses of runs or records against time and steps, as PNG",
    )
    it.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a record's folder, a run's folder, a log of this or another trainer, or a folder of "
        "the latter",
    )
    it.add_argument("--out", default="logs/plot.png", help="[logs/plot.png]")
    it = command(
        "report",
        report_command,
        "write leaderboards, the ladder of records and interactive curves as one HTML page",
    )
    it.add_argument(
        "paths",
        nargs="*",
        metavar="LOG",
        help="other trainers' logs, or folders of such, to draw as well",
    )
    it.add_argument(
        "--track", default="fineweb", help="the track in whose chart these are drawn [fineweb]"
    )
    it.add_argument("--out", default="logs/report.html", help="[logs/report.html]")


# ----- what is printed


def shown(path, root):
    """A path for a message: relative to the repository where it lies inside, without control
    characters."""
    path = Path(path)
    if path.is_relative_to(root):
        path = path.relative_to(root)
    return ascii(str(path))[1:-1]


def tell(failures, root):
    """Print each failure as one line; returns the exit status."""
    for failure in failures:
        print(f"{shown(failure.path, root)}: {printable(failure.reason)}")
    return 1 if failures else 0


def counted(records):
    """A number of records in words."""
    return "1 record" if records == 1 else f"{records} records"


# ----- the commands: each takes the repository and its options, and returns the exit status


def submit_command(repository, options):
    """Make a record, and print the description of its pull request."""
    record, failures = submit(repository, options.name, options.logs, options.baseline)
    if failures:
        return tell(failures, record.folder)
    print(
        f"{pull_request(record)}\n\nmade {shown(record.folder, repository.root)}; next: write why "
        f"it works into its README.md, then python -m records table"
    )
    return 0


def verify_command(repository, options):
    """Judge some records, or everything."""
    if options.folders:
        failures = []
        for folder in options.folders:
            failures += judge_one(record_at(Path(folder), repository), repository)
        count = len(options.folders)
    else:
        failures = judge_all(repository)
        count = sum(map(len, repository.records.values()))
    status = tell(failures, repository.root)
    if not status:
        print(f"verify: ok, {counted(count)}")
    return status


def record_at(folder, repository):
    """The Record of a folder that lies in a track's."""
    if not folder.is_symlink():  # which is a failure of the record
        folder = folder.resolve()
    track = folder.parent.name
    if track not in repository.rules:
        known = ", ".join(repository.rules)
        raise RecordError(f"{folder}: lies in no track's folder; those are {known}")
    return load(folder, track)


def table_command(repository, options):
    """Renew the leaderboards, if all records are good."""
    failures = judge_records(repository)
    if failures:
        return tell(failures, repository.root)
    text = read_text(repository.readme)
    write_whole(repository.readme, render.with_leaderboards(text, repository.records))
    for records in repository.records.values():
        if records:
            print(render.leaderboard(records), end="")
    return 0


def diff_command(repository, options):
    """Print what two sides differ in."""
    before = compare.side_of(options.a, repository)
    if options.b:
        after = compare.side_of(options.b, repository)
    else:
        after = compare.working_side(before.track, repository)
    print(compare.describe(before, after))
    return 0


def run_command(repository, options):
    """Make the runs of a record."""
    experiment.run(repository, options.track, options.runs, options.world_size)
    return 0


def ab_command(repository, options):
    """Run the working script beside another one."""
    if options.path:
        other = compare.side_of(options.path, repository)
    else:
        other = experiment.tip_of(repository, options.track)
    experiment.ab(repository, other, options.runs, options.world_size, options.yes, options.compare)
    return 0


def reproduce_command(repository, options):
    """Run a record again."""
    record = compare.side_of(options.path, repository)
    experiment.reproduce(repository, record, options.runs, options.world_size, options.yes)
    return 0


def plot_command(repository, options):
    """Draw curves as a PNG."""
    curves.plot(repository, options.paths, options.out)
    print(f"plot: {options.out}")
    return 0


def report_command(repository, options):
    """Write the page of records."""
    count, failures = curves.report(repository, options.out, options.paths, options.track)
    print(f"report: {options.out}, {counted(count)}, {len(failures)} failures of verify")
    return 0


def main(argv=None, repository=None):
    """Returns the exit status: 0 good, 1 failures of verify, 2 bad input, 130 interrupted."""
    try:
        options = parser().parse_args(argv)
        runs = getattr(options, "runs", MOST_LOGS)
        if not 2 <= runs <= MOST_LOGS:
            raise RecordError(
                f"--runs {runs}: takes at least 2, for statistics, and at most {MOST_LOGS}"
            )
        repository = repository or Repository.at(getattr(options, "tree", None))
        return options.action(repository, options)
    except (RecordError, OSError) as error:
        print(f"records: {printable(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "records: interrupted; run, ab and reproduce go on where they stopped when called "
            "again",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
