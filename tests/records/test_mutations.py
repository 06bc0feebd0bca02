"""Random changes of record folders: `verify` catches each one, or it changes no figure that a
record shows. The changes are drawn by their number, so that a failure can be made again."""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import records_helpers as made
from records.__main__ import main
from records.files import CONTROL
from records.record import Repository

ODD = [
    "\x1b[2J",
    "\udcff",
    "\u202e",
    "\0",
    "9" * 400,
    "-1",
    "0",
    "1e999",
    "nan",
    "\n",
    "verify: ok, 9 records",
    "é",
    " " * 300,
]


def lines_changed(draw, text, other):
    """A text with one to three changes of its lines; half of them lie behind the source of a
    log."""
    for _ in range(draw.randint(1, 3)):
        lines = text.split("\n")
        behind = next((at for at, line in enumerate(lines) if "END OF CODE" in line), 0)
        at = draw.randrange(draw.choice([0, behind]), len(lines))
        how = draw.randrange(7)
        if how == 0:
            del lines[at]
        elif how == 1:
            lines.insert(at, lines[at])
        elif how == 2:
            lines.insert(draw.randrange(len(lines) + 1), lines.pop(at))
        elif how == 3:
            lines[at] = draw.choice(other.split("\n"))
        else:
            words = re.findall(r"\d+|\w+", lines[at]) or [lines[at]]
            number, word = (
                str(draw.randrange(10 ** draw.randint(1, 9))),
                draw.choice(re.findall(r"\w+", other)),
            )
            lines[at] = lines[at].replace(
                draw.choice(words), draw.choice([draw.choice(ODD), number, word]), 1
            )
        text = "\n".join(lines) or "\n"
    return text


def mutate(draw, root):
    """Change something in one record's folder. Returns what was done."""
    files = sorted(path for path in root.glob("records/mini/*/**/*") if path.is_file())
    path, other = draw.choice(files), draw.choice(files)
    how = draw.choice(
        [
            *["lines"] * 12,
            *["bytes"] * 3,
            "cut",
            "gone",
            "renamed",
            "copied",
            "exchanged",
            "folder renamed",
            "folder gone",
            "json",
        ]
    )
    if how == "lines":
        text = lines_changed(draw, path.read_text(), other.read_text())
        path.write_bytes(text.encode(errors="surrogatepass"))
    elif how == "bytes":
        content = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    elif how == "gone":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name(draw.choice(["x", "run.txt", "é\n.txt", other.name + "x"])))
    elif how == "copied":
        shutil.copy(path, other.with_name(f"more-{path.name}"))
    elif how == "exchanged":
        contents = path.read_bytes(), other.read_bytes()
        path.write_bytes(contents[1])
        other.write_bytes(contents[0])
    elif how.startswith("folder"):
        folder = draw.choice(
            [path.parent, *[path.parent.parent] * (path.parent.name in ("logs", "baseline"))]
        )
        if how == "folder gone":
            shutil.rmtree(folder)
        else:
            folder.rename(folder.with_name(folder.name + draw.choice("xé")))
    else:
        results = sorted(root.glob("records/mini/*/result.json"))
        path = draw.choice(results)
        content = json.loads(path.read_text())
        content[draw.choice([*content, "new"])] = draw.choice(
            [None, 0, "x", [], {}, "\ud800", 1e308, {"a": [1]}]
        )
        path.write_text(json.dumps(content))
    return how


def claims(root):
    """What the records and the leaderboard say."""
    results = {
        path.parent.name: json.loads(path.read_text())
        for path in root.glob("records/mini/*/result.json")
    }
    return results, (root / "records" / "README.md").read_text()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two records, the second of which claims speed against the first. Not to be changed."""
    repository = made.make_repository(tmp_path_factory.mktemp("pristine"))
    made.add_first(repository)
    made.add_faster(repository)
    assert main(["table"], made.fresh(repository)) == 0
    shutil.rmtree(repository.root / "logs")
    return repository


def survey(pristine, folder, capsys, numbers):
    """Counter of (what was done, caught or harmless); asserts that there is no third case."""
    before, counts = claims(pristine.root), Counter()
    for number in numbers:
        root = folder / str(number)
        shutil.copytree(pristine.root, root)
        how = mutate(random.Random(number), root)
        capsys.readouterr()
        status = main(["verify"], Repository(root, pristine.rules))
        out, err = capsys.readouterr()
        line = r"records: records[^:]*: .*\n" if status else r"verify: ok, \d+ records?\n"
        assert status in (0, 2) and re.fullmatch(line, out + err), (number, how, out, err)
        assert not CONTROL.search(out + err), (number, how)
        # without one of its folders a repository is another one, of which nothing is wrong
        assert status or how == "folder gone" or claims(root) == before, (number, how)
        counts[how, "caught" if status else "harmless"] += 1
        shutil.rmtree(root)
    return counts


def page_of(counts, numbers):
    """Markdown: how many changes of each kind were caught, and how many changed no figure of a
    record."""
    kinds = sorted({how for how, _ in counts})
    rows = [f"| {how} | {counts[how, 'caught']} | {counts[how, 'harmless']} |" for how in kinds]
    return (
        "\n".join(
            [
                f"# Random changes of record folders, numbers {numbers[0]} to {numbers[-1]}",
                "",
                "Written by `./run.sh test --all tests/records/test_mutations.py`. None ended in a "
                "traceback, a line without",
                "the name of a file, or a control character on the terminal.",
                "",
                "| what was done | caught | no figure changed |",
                "|---|---|---|",
                *rows,
            ]
        )
        + "\n"
    )


@pytest.mark.slow
def test_changes_of_records_are_caught_or_harmless(pristine, tmp_path, capsys):
    counts = survey(pristine, tmp_path, capsys, range(150))
    assert (
        sum(counts.values()) == 150
        and sum(counts[key] for key in counts if key[1] == "caught") > 90
    ), counts


@pytest.mark.long
def test_many_changes_of_records_are_caught_or_harmless(pristine, tmp_path, capsys):
    numbers = range(150, 2000)
    counts = survey(pristine, tmp_path, capsys, numbers)
    Path(__file__).with_name("mutations.md").write_text(page_of(counts, numbers))
