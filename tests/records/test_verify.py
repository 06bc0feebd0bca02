"""`python -m records verify` and `submit` beside forged figures: what is merged, files that are not
what they seem, pages, and this repository's own records."""

import json
import os
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

import helpers
import records_helpers as made
import train_gpt
from data import text as data_text
from records import files
from records.__main__ import main
from records.record import Repository
from records.source import config_of
from records_helpers import LATER, TRACK, edit, folder_of, forced, logs_in, pairs, refusal


def test_records_of_this_repository_pass():
    assert refusal(Repository.at()) == ""


def test_rules_are_those_of_the_trainer():
    source = Path(train_gpt.__file__).read_text()
    assert files.RULES["default_track"] in files.BOARDS
    for rules in files.BOARDS.values():
        if rules["track"] in train_gpt.TRACKS:
            config = config_of(source, rules["track"])
            assert {key: config[key] for key in rules["config"]} == rules["config"]
    assert files.BOARDS["english"]["manifest_sha256"] == data_text.RECORD_MANIFEST_SHA256
    gates = (helpers.ROOT / "records/gates.py").read_text()
    assert made.sha_of(gates) in files.RULES["gates_sha256"]


def test_reading_imports_no_code_of_the_branch():
    """Neither the trainer nor torch."""
    names = ("torch", "train_gpt", "data")
    code = f"import sys, records.__main__\nprint([n for n in {names} if n in sys.modules])"
    done = helpers.python("-c", code)
    assert done.stdout == "[]\n", done.stderr


# ----- what is merged


def removed(repository, pristine, pattern):
    shutil.rmtree(next(repository.home.glob(pattern)))


def edited(repository, pristine, pattern, old, new):
    edit(sorted(repository.home.glob(f"{TRACK}/*_First/{pattern}"))[0], old, new)


def linked(repository, pristine, pattern):
    """A folder that is a link to what was merged."""
    path = next(repository.root.glob(pattern))
    shutil.rmtree(path)
    path.symlink_to(pristine.root / path.relative_to(repository.root))


def older_rival(repository, pristine):
    """Another claim against First, whose runs were made before those of the merged record."""
    away = folder_of(repository, "Faster").rename(repository.root / "merged")
    began = made.YESTERDAY + timedelta(minutes=30)
    folder = forced(repository, "Earlier", pairs(repository, "rival", "first", began))
    away.rename(folder.with_name(f"{folder.name[:10]}_Faster"))


def early(repository, pristine, days):
    """The pairs of a claim were run before its merged parent was made."""
    source = pairs(repository, began=LATER - timedelta(days=days))
    forced(Repository(repository.root, pristine.rules, pristine.root), "Third", source)


STAY = "is not what was merged"
OTHER = r"_Earlier/baseline/\S+: ran other code \(\w+\) than the script it belongs to"
EARLY = "was started before the parent's record was made"
MERGED = {
    "N18 last record removed": (removed, "*/*_Faster", rf"_Faster/\S+: {STAY}"),
    "N19 all removed": (removed, TRACK, rf"_Faster/\S+: {STAY}"),
    "N20b a loss": (edited, "logs/*", "train_loss:.", "train_loss:9", rf"_First/\S+: {STAY}"),
    "N20d Why": (edited, "README.md", "It takes", "It is", rf"_First/README.md: {STAY}"),
    "N31i records is a link": (linked, "records", "records: is a symbolic link"),
    "N31i a track is a link": (linked, f"records/{TRACK}", f"{TRACK}: is a symbolic link"),
    "N31i a record is a link": (linked, "records/*/*_Faster", rf"_Faster/\S+: {STAY}"),
    "N21 an older rival": (older_rival, OTHER),
    "N17 two days early": (early, 2, EARLY),
    "N17b in 1999": (early, 9800, "or 31 days after them"),
}


@pytest.mark.parametrize("name", MERGED)
def test_what_is_merged_stays(repository, pristine, name):
    act, *words, reason = MERGED[name]
    act(repository, pristine, *words)
    found = refusal(Repository(repository.root, pristine.rules, pristine.root))
    assert re.search(reason, found), found


def test_an_honest_record_passes_beside_merged_ones(repository, pristine):
    made.submitted(repository, "Third", pairs(repository))
    assert main(["table"], made.fresh(repository)) == 0
    proposal = Repository(repository.root, pristine.rules, pristine.root)
    assert refusal(proposal) == ""
    assert [record.age[0] for record in proposal.records[TRACK]] == [False, False, True]


def test_rules_of_another_tree_do_not_count(repository, capsys):
    """A branch is judged by the rules and the code of the checkout that the tool is called in."""
    (repository.root / "records" / "rules.json").write_text('{"alpha": 1, "boards": {}}')
    (repository.root / "train_gpt.py").write_text("raise SystemExit('executed')\n")
    told = "--tree '{}': name a checkout"
    for tree, reason in ((repository.root, "is not what was merged"), ("", told), ("none", told)):
        assert main(["verify", "--tree", str(tree)]) == 2
        assert reason.format(tree) in capsys.readouterr().err


# ----- submit


def submit(repository, *words):
    return main(["submit", "--by", "Me", *words], made.fresh(repository))


@pytest.fixture
def third(repository):
    """The repository with the logs of a third script, the working one now."""
    (repository.root / "train_gpt.py").write_text(pairs(repository))
    return repository


@pytest.mark.parametrize("name", ["../../escape", "", "-x", "a" * 61, "x\n", "naïve", "<b>"])
def test_submit_refuses_names_that_are_no_folder(third, capsys, name):
    before = sorted(third.root.rglob("*"))
    assert submit(third, f"--name={name}") == 2
    assert "up to 60 letters, digits and '-'" in capsys.readouterr().err
    assert sorted(third.root.rglob("*")) == before


def test_submit_refuses_what_verify_refuses(third, capsys, monkeypatch):
    """And leaves nothing behind, as where it is interrupted."""

    def refused(*words, status=2):
        assert submit(third, "--name", "Chosen", *words) == status
        assert not list(third.root.glob("records/*/*Chosen*"))
        return capsys.readouterr().err

    path = sorted(third.root.glob(f"logs/{made.name_of(made.source_of('third'))}-*a/log.txt"))[3]
    kept = path.read_text()
    path.write_text(kept[:-100])
    assert f"logs/{path.parent.name}/log.txt: the last line is cut" in refused()
    path.write_text(kept)
    assert "by is '<b>'; names of 100 letters" in refused("--by", "<b>")
    path.unlink()
    assert "6 runs were declared, logs has [1, 2, 3, 5" in refused()
    (third.root / "train_gpt.py").write_text(made.source_of("fourth"))
    assert f"there are no runs {third.root}/logs/" in refused()
    (third.root / "train_gpt.py").write_text(made.source_of("third"))
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("records.experiment.check_records", interrupted)
    path.write_text(kept)
    refused(status=130)


def test_submit_takes_the_runs_of_its_track_alone(third, capsys):
    """Neither others of the script nor those that were reproduced; and it replaces no folder."""
    for folder in third.root.glob(f"logs/{made.name_of(made.source_of('third'))}-*"):
        for kind in ("other", f"reproduce-20261123-{TRACK}"):
            shutil.copytree(folder, folder.with_name(folder.name.replace(TRACK, kind)))
    folder = third.home / TRACK / f"{datetime.now(UTC):%Y-%m-%d}_Third"
    folder.mkdir()
    assert submit(third, "--name", "Third") == 2
    assert "exists; choose another --name" in capsys.readouterr().err
    folder.rmdir()
    assert submit(third, "--name", "Third") == 0
    for path in logs_in(folder):  # which are thin; with the script they are what the trainer wrote
        whole = (third.root / "logs" / path.stem / "log.txt").read_text()
        assert made.source_of("third") + path.read_text() == whole


def formed(repository, word, slower=1.01, name="Form"):
    """A change of form, whose pairs are with the last record that claims a gain."""
    began = made.YESTERDAY + timedelta(hours=4 + 2 * len(made.fresh(repository).records[TRACK]))
    source = made.source_of(word)
    times = {"count": 8, "time_ms": round(50_000 * slower), "slower": slower, "began": began}
    made.write_logs(repository.root, source, made.source_of("second"), **times)
    (repository.root / "train_gpt.py").write_text(source)
    assert submit(repository, "--name", name, "--form") == 0
    folder = folder_of(repository, name)
    edit(folder / "README.md", re.escape(made.render.WHY), made.WHY)
    return source


def test_a_change_of_form_claims_nothing_and_what_follows_is_compared_with_it(repository, capsys):
    """Its row says so and has no factor, and changes of form do not add up: each is compared with
    the last record that has a gain, which stays on the first page."""
    formed(repository, "form")
    first_page = repository.root / "README.md"
    assert main(["table"], made.fresh(repository)) == 0
    assert "| [Faster](" in first_page.read_text()
    source = formed(repository, "form again", name="Form-again")
    began = made.YESTERDAY + timedelta(hours=14)
    third = made.source_of("third")
    made.write_logs(repository.root, third, source, 6, 45_000, began)
    made.submitted(repository, "Third", third)
    faster = folder_of(repository, "Faster").name
    plain = made.ruled(repository.root, plain={"record": faster, "factor": 7.0})
    assert main(["table"], plain) == 0 and refusal(plain) == ""
    names = ["First", "Faster", "Form", "Form-again", "Third"]
    records = made.fresh(plain).records[TRACK]
    assert [record.title for record in records] == names
    parents = [record.parent and record.parent.title for record in records]
    assert parents == [None, "First", "Faster", "Faster", "Form-again"]
    rows = made.render.board_of(records, plain.rules[TRACK], "")[::-1]
    assert ["form" in row["time against its parent's, in pairs"] for row in rows] == [
        name.startswith("Form") for name in names
    ]
    factors = [row["faster than a plain GPT"] for row in rows]
    # It was measured for one record, and follows the pairs to others on both sides: the last one's
    # were run with the second change of form, and that one's with the record.
    _, second, _, form, third = (record.parent and 1 + record.gain[0] for record in records)
    first, last = 7.0 * second, 7.0 / (form * third)
    assert factors == [f"{first:.1f} times", "7.0 times", "-", "-", f"{last:.1f} times"]
    assert "| [Third](" in first_page.read_text()


def test_the_first_record_proposes_the_hash_of_the_validation_tokens(repository, capsys):
    """Into the rules, for whoever merges it; a hash that is refused with its record goes."""
    rules = repository.home / "rules.json"
    rules.write_text(json.dumps({"boards": repository.rules}))
    config = {**made.CONFIG, "track": "web", "val_sha256": ""}
    source = made.source_of("web", **config)
    made.write_logs(repository.root, source, config=config, began=LATER)
    (repository.root / "train_gpt.py").write_text(source)
    words = ("--name", "Web", "--track", "web")
    assert submit(repository, *words, "--by", "<b>") == 2
    assert json.loads(rules.read_text())["boards"]["web"]["config"]["val_sha256"] == ""
    assert submit(repository, *words) == 0
    assert "whoever merges it compares it" in capsys.readouterr().out
    boards = files.boards_of(json.loads(rules.read_text()))
    assert boards["web"]["config"]["val_sha256"] == "ab" * 32
    assert "web: rules.json has no val_sha256" in refusal(repository)
    folder = next(repository.home.glob("web/*_Web"))
    edit(folder / "README.md", re.escape(made.render.WHY), made.WHY)
    proposed = Repository(repository.root, boards)
    assert main(["table"], proposed) == 0 and refusal(proposed) == ""


def test_older_gates_judge_the_records_that_rules_name(repository, monkeypatch):
    """And no other: their logs lack what today's say."""
    for path in repository.home.glob(f"{TRACK}/*/*/*.txt"):
        edit(path, r"^gates:\w+ .*eot:\d+ places:1 (.*) control:\S+", rf"gates:{'0' * 64} \1")
        edit(path, r"^untrained.*\n", "")
    made.rewrite(repository)
    names = [folder_of(repository, name).name for name in ("First", "Faster")]
    monkeypatch.setitem(files.RULES["older_gates"], "0" * 64, names)
    assert refusal(repository) == ""
    monkeypatch.setitem(files.RULES["older_gates"], "0" * 64, names[:1])
    found = refusal(repository)
    assert re.search("_Faster/logs/.* gates have the sha256 0000", found), found


# ----- pages, and files that are not what they seem


def test_pages_must_be_current(repository):
    readme = repository.home / "README.md"
    first = repository.root / "README.md"
    hint = "is not current; run `python -m records table`"
    for page, name in ((readme, "records/README.md"), (first, "README.md")):
        edit(page, r"(?<=/\) \| )\d+\.\d(?= \|)", "1.0", count=1)
        assert refusal(repository) == f"{name}: {hint}"
        assert main(["table"], made.fresh(repository)) == 0
        assert refusal(repository) == ""
    edit(readme, f"<!-- records/{TRACK} -->", "")
    assert "README.md: <!-- records/" in refusal(repository)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def link(path):
    path.symlink_to(path.rename(path.parents[4] / "secret"))


HOSTILE = {
    "huge": (b"x" * (2**22 + 1), "is larger than 4,194,304 bytes"),
    "binary": (b"\xff\xfe\x00" * 100, "codec can't decode byte"),
    "escapes": (b"a\n\x1b[2Jb\n", r"line 2 holds the control character '\\x1b'"),
    "direction": ("x = 1  # \u202e1 = x\n".encode(), r"'\\u202e'"),
    "pipe": (pipe, "no regular file"),
    "link": (link, "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_logs_are_refused(repository, name):
    attack, reason = HOSTILE[name]
    path = logs_in(folder_of(repository, "First"))[1]
    if isinstance(attack, bytes):
        path.write_bytes(attack)
    else:
        attack(path)
    found = refusal(repository)
    assert re.search(rf"/logs/{path.name}: .*{reason}", found), found


def test_what_python_and_macos_leave_is_ignored(repository, pristine):
    folder = folder_of(repository, "First")
    for place in (repository.home, folder.parent, folder, folder / "logs"):
        (place / "._log.txt").write_bytes(b"Mac OS X\0")
        (place / "__pycache__").mkdir()
        (place / "__pycache__" / "train_gpt.pyc").write_bytes(b"\0")
    assert refusal(repository) == ""
    assert refusal(Repository(pristine.root, pristine.rules, repository.root)) == ""
