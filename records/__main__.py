"""The command line, `python -m records COMMAND`: see records/README.md."""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

try:
    from records import files, picture, render
    from records.experiment import ab, difference, rehearse, reproduce, run, submit
    from records.files import CONTROL, HOME, RULES, RecordError, read_text, require, settings
    from records.judge import check_pages, check_records
    from records.log import machine_of
    from records.record import Repository, read_script
    from records.source import sha256_of
except Exception as error:  # a package that is missing, or the tool's own files are damaged
    shown = " ".join(str(error).splitlines())[:300]
    remedy = "./run.sh installs what is missing into .venv, on Windows in WSL"
    print(f"records: {shown}; {remedy}; `git restore records` mends the tool", file=sys.stderr)
    sys.exit(2)


def table(repository, options):
    check_records(repository)
    for path, text in render.pages_of(repository).items():
        files.write_text(path, text)
    for track, paths in render.pictures_of(repository).items():
        target = repository.rules[track]["config"]["target_loss"]
        picture.plot(paths, repository.home / f"{track}.svg", target, render.LINES)


def verify(repository, options):
    check_records(repository)
    check_pages(repository)
    count = len(repository.all)
    print(f"verify: ok, {count} record{'s' * (count != 1)}")


def diff(repository, options):
    if options.since:
        words = ["git", "diff", "--stat", "--patch", "--merge-base", options.since]
        words += ["--", "train_gpt.py"]
        done = subprocess.run(words, cwd=repository.root)
        require(not done.returncode, f"--since {options.since}: git shows no such commit")
        return
    paths = [options.a or repository.tip(options.track).folder, options.b or repository.root]
    files = [path / "train_gpt.py" if path.is_dir() else path for path in map(Path, paths)]
    sources = [*map(read_script, files)]  # which refuses what is no script
    if not options.b:
        print(difference(repository.root, Path(paths[0]).name, *sources), flush=True)
    subprocess.run(["git", "diff", "--no-index", "--stat", "--patch", "--", *files])


def plot(repository, options):
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.plot(options.paths, out)
    print(f"plot: {out}")


def machine(repository, options):
    folder = repository.root / "logs" / options.run
    print(render.machine_row(machine_of(folder / "log.txt", options.track)))


def gates(repository, options):
    newest = sha256_of(read_text(HOME / "gates.py"))
    older = {}
    for record in repository.all:
        for sha256 in {run.gates for run in record.runs + record.baseline} - {newest}:
            older.setdefault(sha256, []).append(record.name)
    rules = json.dumps({**RULES, "gates_sha256": [newest], "older_gates": older}, indent=1)
    files.write_text(HOME / "rules.json", f"{rules}\n")


COMMANDS = (run, rehearse, ab, submit, table, verify, diff, reproduce, plot, machine, gates)
CALLS = {command.__name__: command for command in COMMANDS}


def parser_of(line):
    """The command line's parser, which commands.toml describes."""
    parser = argparse.ArgumentParser(prog="python -m records", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (words, *options) in line["commands"].items():
        command = commands.add_parser(name, help=words, description=words)
        for option in options:
            given = line["options"][option]
            kind = {} if "action" in given else {"type": type(given.get("default", ""))}
            command.add_argument(option, **kind, **given)
        command.set_defaults(track=RULES["default_track"])
    return parser


def main(argv=None, repository=None):
    """Returns the exit status: 0 good, 2 what was refused, in one line, 130 interrupted."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and so are its runs
    root = repository.root if repository else HOME.parent
    try:
        options = parser_of(settings("commands.toml")).parse_args(argv)
        repository = repository or Repository.at(getattr(options, "tree", None))
        root = repository.root
        CALLS[options.command](repository, options)
        return 0
    except (RecordError, OSError) as error:
        shown = " ".join(str(error).splitlines()).removeprefix(f"{root}/")
        shown = CONTROL.sub(lambda found: ascii(found[0])[1:-1], shown)
        print(f"records: {shown}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("records: interrupted; the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    if sys.stdout is not None:  # it may be closed; else it may lack ± in its coding
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
