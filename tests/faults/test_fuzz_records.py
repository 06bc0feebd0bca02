"""Logs of runs and folders of records: python -m records verify, plot, diff and table, in this
process."""

import json
import re
import shutil
import sys
from pathlib import Path

import matplotlib.pyplot  # noqa: F401, for its import takes long, which is no fault of the command that does it
import pytest
from hypothesis import strategies as st

import fuzzing

sys.path.append(str(Path(__file__).parents[1] / "records"))
import records_helpers as helpers
from records.__main__ import main


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """(repository, its files as {path from its root: content}) with two records, the second with
    pairs."""
    repository = helpers.make_repository(tmp_path_factory.mktemp("sound"))
    helpers.add_first(repository, count=4)
    helpers.add_faster(repository)
    shutil.rmtree(repository.root / "logs")
    made = fuzzing.observe(lambda: main(["table"], helpers.fresh(repository)))
    assert made.status == 0, made.out + made.err
    return repository, fuzzing.Files(
        {
            str(path.relative_to(repository.root)): path.read_bytes()
            for path in sorted(repository.root.rglob("*"))
            if path.is_file()
        }
    )


@pytest.fixture(scope="module")
def outcome_of(sound, tmp_path_factory):
    """outcome_of((words, changes)): what a command makes of the repository with changes, [(file,
    action, argument)]."""
    repository, files = sound
    root = repository.root

    def outcome(example):
        words, changes = example
        shutil.rmtree(root / "records")
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        for name, action, argument in changes:
            fuzzing.change(root / name, action, argument)
        seen = fuzzing.observe(lambda: main(words, helpers.fresh(repository)), lines=None)
        if not seen.problem and seen.status == 2 and (seen.out or seen.err.count("\n") != 1):
            seen.problem = (
                "message",
                f"{seen.err.count(chr(10))} lines of refusal: {seen.err[:200]!r}",
            )
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield outcome


@st.composite
def changed_json(draw, text):
    value = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(fuzzing.paths_in(value))))
        odd = draw(st.one_of(st.just(fuzzing.DROP), fuzzing.ODD_JSON))
        value = fuzzing.replaced(value, path, lambda _, odd=odd: odd)
        value = {} if value is fuzzing.DROP else value
    return json.dumps(value)


@st.composite
def changed_lines(draw, content):
    """A text of which a few lines are gone, twice there, elsewhere, or have another number or word
    in them."""
    lines = content.decode().split("\n")
    start = next((at for at, line in enumerate(lines) if "END OF CODE" in line), 0)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.one_of(st.integers(start, len(lines) - 1), st.integers(0, len(lines) - 1)))
        how = draw(
            st.sampled_from(
                ["number", "number", "number", "word", "json", "drop", "twice", "move", "new"]
            )
        )
        words = re.findall(r"\d+|[a-z_]+", lines[at])
        if how in ("number", "word") and words:
            new = draw(
                fuzzing.ODD_INT.map(str) | fuzzing.ODD_FLOAT.map(str)
                if how == "number"
                else fuzzing.ODD_TEXT
            )
            lines[at] = lines[at].replace(draw(st.sampled_from(words)), new, 1)
        elif how == "json":
            at = next((at for at, line in enumerate(lines) if line.startswith("config:")), None)
            if at is not None:
                lines[at] = "config:" + draw(changed_json(lines[at].removeprefix("config:")))
        elif how == "drop":
            del lines[at]
        elif how == "twice":
            lines.insert(at, lines[at])
        elif how == "move":
            lines.insert(draw(st.integers(0, len(lines))), lines.pop(at))
        else:
            lines.insert(at, draw(fuzzing.ODD_TEXT))
        lines = lines or [""]
    return "\n".join(lines).encode(errors=draw(st.sampled_from(["replace", "surrogatepass"])))


@st.composite
def repositories(draw, files):
    """A command and the changes of the repository that it reads."""
    changes, names = [], sorted(name for name in files if name.count("/") > 1)
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(names))
        action = draw(
            st.sampled_from(["bytes"] * 10 + ["gone", "link", "folder", "pipe", "rename", "copy"])
        )
        argument = None
        if action == "bytes":
            kinds = [
                changed_lines(files[name]),
                changed_lines(files[name]),
                fuzzing.changed_bytes(files[name]),
            ]
            if name.endswith(".json"):
                kinds.append(changed_json(files[name]).map(str.encode))
            argument = draw(st.one_of(kinds))
        elif action == "link":
            argument = draw(
                st.sampled_from(
                    [Path(name).name, "nowhere", "/dev/null", ".", "../../../README.md"]
                )
            )
        elif action in ("rename", "copy"):
            argument = draw(fuzzing.ODD_TEXT)
        changes.append((name, action, argument))
    folder = "/".join(changes[0][0].split("/")[:3])
    other = draw(st.sampled_from(sorted({"/".join(name.split("/")[:3]) for name in names})))
    return draw(
        st.sampled_from(
            [
                ["verify"],
                ["verify"],
                ["verify"],
                ["table"],
                ["diff", folder, other],
                ["diff", other, folder],
                ["diff", changes[0][0], other],
                ["plot", changes[0][0], "--out", "plot.png"],
                ["plot", folder, "--out", "plot.png"],
            ]
        )
    ), changes


def test_the_sound_repository_is_accepted(sound, outcome_of):
    folders = sorted({"/".join(name.split("/")[:3]) for name in sound[1] if name.count("/") > 2})
    for words in (
        ["verify"],
        ["table"],
        ["diff", *folders],
        ["plot", *folders, "--out", "p.png"],
    ):
        outcome = outcome_of((words, []))
        assert outcome.status == 0 and not outcome.problem, (
            words,
            outcome.out,
            outcome.err,
            outcome.problem,
        )


@pytest.mark.slow
def test_logs_and_records(sound, outcome_of):
    fuzzing.hold(repositories(sound[1]), outcome_of, 100)


@fuzzing.in_parts
def test_many_logs_and_records(part, sound, outcome_of):
    fuzzing.survey(
        "logs and records, by verify, table, diff and plot",
        part,
        repositories(sound[1]),
        outcome_of,
        2_000,
    )
