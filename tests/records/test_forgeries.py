"""Forged records: `verify` refuses each one in one line that names the file and the reason. What
edits do is a row of forgeries.toml; what takes more is a function of the repository."""

import math
import re
import shutil
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import records_helpers as made
from records import files, stats
from records.__main__ import main
from records_helpers import LATER, TRACK, edit, folder_of, forced, logs_in, pairs, refusal

NAMES = {  # that stand in forgeries.toml for what depends on the day, say
    "SEED_2": str(stats.seed_of(made.sha_of(made.source_of("first")), 1, 2)),
    "SEED_3": str(stats.seed_of(made.sha_of(made.source_of("second")), 1, 3)),
    "SOON": f"{datetime.now(UTC) + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}",
    "OLDER": next(reversed(files.RULES["older_gates"])),
    "ZERO": "\u200b",
    "REASONS": made.WHY,
    "PLACEHOLDER": made.render.WHY,
    "YESTERDAY": f"{made.YESTERDAY:%Y-%m-%dT%H:%M:%SZ}",
    "EARLY": f"{made.YESTERDAY - timedelta(days=1):%Y-%m-%dT%H:%M:%SZ}",
    "TRACK": TRACK,
    "TITLE": TRACK.title(),
    "TODAY": f"{datetime.now(UTC):%Y-%m-%d}",
    "TOMORROW": f"{datetime.now(UTC) + timedelta(days=2):%Y-%m-%d}",
    "DEEP": "[" * 999 + "]" * 999,
    "NINES_4301": "9" * 4301,
    "NINES_4299": "9" * 4299,
}


def named(page):
    """The text of a page, with the values of NAMES, and MANY(...) said 300,000 times."""
    text = Path(__file__).with_name(page).read_text()
    for name, value in NAMES.items():
        text = text.replace(name, value)
    return re.sub(r"MANY\((.+?)\)", lambda found: 300_000 * found[1], text)


EDITS = tomllib.loads(named("forgeries.toml"))


def paths_at(repository, where):
    """The files that an edit is made in: one, a whole folder, or the n-th logs of both sides."""
    name, part, *number = where.split("/")
    folder = folder_of(repository, name)
    if (folder / part).is_file():
        return [folder / part]
    sides = [logs_in(folder, side) for side in ("logs", "baseline") if part in (side, "*")]
    return [side[int(number[0])] for side in sides] if number else sum(sides, [])


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_refused(repository, name):
    where, old, new, reason = EDITS[name]
    paths = paths_at(repository, where)
    for path in paths:
        for words in zip(old.split(" && "), new.split(" && "), strict=True):
            edit(path, *words)
    if paths[0].suffix == ".txt":
        made.rewrite(repository)
    assert re.search(reason, refusal(repository)), refusal(repository)


def test_honest_records_pass(repository):
    """Also when a forger's functions have written it, so that a forgery is refused for its own
    sake; and whole logs, as records were kept at first."""
    assert refusal(repository) == ""
    forced(repository, "Third", pairs(repository))
    made.rewrite(repository)
    assert main(["table"], made.fresh(repository)) == 0
    assert refusal(repository) == ""
    for path in logs_in(folder_of(repository, "Faster")):
        path.write_text(made.source_of("second") + path.read_text())
    assert refusal(repository) == ""
    assert not list(repository.root.rglob("executed"))


HONEST = tomllib.loads(Path(__file__).with_name("honest.toml").read_text())


@pytest.mark.parametrize("name", HONEST)
def test_honest_ideas_pass(repository, name):
    where, old, new = HONEST[name]
    for path in paths_at(repository, where):
        for words in zip(old.split(" && "), new.split(" && "), strict=True):
            edit(path, *words)
    made.rewrite(repository)
    assert main(["table"], made.fresh(repository)) == 0
    assert refusal(repository) == ""


def test_a_batch_that_grows_sixfold_late_passes(repository):
    """At seven tenths of the steps, say; the clock of the last logged loss stays."""
    for path in logs_in(folder_of(repository, "First")):
        unit = made.stored(path).train_time_ms / (42 + 6 * 18)
        for step in range(10, 60, 10):
            at = round(unit * (min(step, 42) + 6 * max(0, step - 42)))
            words = rf"\1train_time:{at}ms step_avg:{at / step:.2f}ms"
            edit(path, rf"^(step:{step}/.*)train_time:.*", words)
    assert refusal(repository) == ""


# ----- what takes more than edits: functions of the repository and more words


def remade(repository, name, part, halves, more, keeps_speed=False, seconds=0):
    """Logs of a record with half the times, larger losses, or some seconds less, and all that must
    agree with them."""
    for path in logs_in(folder_of(repository, name), part):
        run = made.stored(path)
        place = f"{run.batch}:{run.counter}/{run.declared}:{run.start}"
        time_ms = run.train_time_ms // (1 + halves) - 1000 * seconds
        result = {"loss": run.val_loss + more, "time_ms": time_ms, "started": run.started}
        result |= {"speed": run.speed} if keeps_speed else {}
        path.write_text(made.log_text(run.run, run.source, run.seed, place, **result))


def with_script(repository, is_rehashed):
    """A script before a thin log, which is not the folder's."""
    path = logs_in(folder_of(repository, "First"))[1]
    source = made.source_of("first")
    changed = source.replace("open(", "OPEN(", 1)
    code = made.sha_of(changed) if is_rehashed else made.sha_of(source)
    path.write_text(changed + path.read_text().replace(made.sha_of(source), code))


def with_losses_of(path, run, noise):
    """Give a log in a record the losses of another run, up to an alternating noise."""
    text = path.read_text()
    for kind, step in made.stored(path).losses:
        loss = run.losses[kind, step] + noise * (-1) ** (step // 20)
        text = re.sub(rf"(?m)^(step:{step or 60}/\S+ {kind}_loss:)\S+", rf"\g<1>{loss:.5f}", text)
    text = re.sub(r"(?m)^((?:final|status).*val_loss:)\S+", rf"\g<1>{loss:.5f}", text)
    text = re.sub("bits_per_byte:\\S+", f"bits_per_byte:{loss / math.log(2):.5f}", text)
    path.write_text(text)


def same_run_again(repository, noise):
    first, *others = logs_in(folder_of(repository, "First"))
    for path in others:
        with_losses_of(path, made.stored(first), noise)


def copies_but_for(repository, *steps):
    """Runs that share most losses, up to a noise, and not those of some steps."""
    same_run_again(repository, 2e-4)
    for number, path in enumerate(logs_in(folder_of(repository, "First"))):
        for step in steps:
            edit(path, rf"^(step:{step}/60 train_loss:)\S+", rf"\g<1>2.{number}1828")


def whole_record_again(repository):
    """A copy of the last record with a comment, under its own seeds, names and starts."""
    folder = added(repository, "Copy", "second", "another = 1\n")
    for part in ("logs", "baseline"):
        others = logs_in(folder_of(repository, "Faster"), part)
        for path, other in zip(logs_in(folder, part), others, strict=True):
            with_losses_of(path, made.stored(other), 1e-3)


def other_order(repository):
    """The starts of two runs of a pair exchanged."""
    paths = paths_at(repository, "Faster/*/1")
    starts = [re.search(r"started:\S+", path.read_text())[0] for path in paths]
    for path, old, new in zip(paths, starts, starts[::-1], strict=True):
        edit(path, old, new)


def paired_otherwise(repository):
    """The parent's first two runs exchanged."""
    one, other = logs_in(folder_of(repository, "Faster"), "baseline")[:2]
    texts = [other.read_text(), one.read_text()]
    for path, text, old, new in zip((one, other), texts, "21", "12", strict=True):
        text = text.replace(f"-0{old}b", f"-0{new}b")
        path.write_text(re.sub(rf"(1|counter):{old}/", rf"\1:{new}/", text))


def without(repository, pattern):
    for path in repository.home.glob(f"{TRACK}/*_{pattern}"):
        path.unlink()


def renamed(repository, pattern, name):
    path = sorted(repository.home.glob(f"{TRACK}/*_{pattern}"))[0]
    path.rename(path.with_name(name))


def copied(repository, pattern, name):
    path = next(repository.home.glob(pattern))
    shutil.copytree(path, path.with_name(name))


def added(repository, name, word, tail=""):
    """A new record, named like another one, or with its script, to which a tail may be added."""
    shutil.rmtree(repository.root / "logs")
    return forced(repository, name, pairs(repository, word, tail=tail))


def behind_a_link(repository):
    folder = folder_of(repository, "Faster")
    folder.symlink_to(folder.rename(repository.root / "elsewhere"))


def as_script(repository, old, new):
    """A new record, whose script is changed once."""
    source = made.source_of("third").replace(old, new, 1)
    assert new in source
    made.write_logs(repository.root, source, made.source_of("second"), 6, began=LATER)
    forced(repository, "Hidden", source)


def scripts_of_two_dtypes(repository):
    source = made.source_of("fast", dtype="float32")
    paths = made.write_logs(repository.root, source, made.source_of("second"), 6, began=LATER)
    for path in paths[:6]:
        edit(path, '"dtype": "bfloat16"', '"dtype": "float32"')
    forced(repository, "Fast", source)


def hidden_clock(repository):
    """Twelve seconds of each run of the record's pass beside its clock."""
    for part, seconds in (("logs", 12), ("baseline", 0)):
        remade(repository, "Faster", part, 0, 0, seconds=seconds)


def with_a_file(repository, name, size):
    (folder_of(repository, "First") / "logs" / name).write_bytes(b"\0" * size)


def no_pause(repository):
    """A run starts as soon as the one before it has ended."""
    paths = sorted(logs_in(folder_of(repository, "First")), key=lambda at: made.stored(at).started)
    one, other = paths[:2]
    began = made.stored(one).over
    edit(other, r"started:\S+", f"started:{began:%Y-%m-%dT%H:%M:%SZ}")


def form_that_is_slower(repository, slower):
    """A change of form whose pairs take longer than those of the last record with a gain."""
    source = made.source_of("third")
    times = {"count": 8, "time_ms": round(1.2 * slower * 50_000), "began": LATER}
    made.write_logs(repository.root, source, made.source_of("second"), **times, slower=slower)
    forced(repository, "Form", source, is_form=True)


def runs_named_alike(repository):
    """A parent's run has the name of the record's, but for the case of letters."""
    path, other = paths_at(repository, "Faster/*/1")
    name = path.stem.upper()
    other.write_text(other.read_text().replace(other.stem, name))
    other.rename(other.with_name(f"{name}.txt"))


def first_of_web(repository):
    """A first record of a track whose validation tokens its rules do not know."""
    config = {**made.CONFIG, "track": "web", "val_sha256": ""}
    source = made.source_of("web", **config)
    made.write_logs(repository.root, source, config=config, began=LATER)
    forced(repository, "Web", source, "web")


ACTS = tomllib.loads(named("acts.toml"))


@pytest.mark.parametrize("name", ACTS)
def test_acts_are_refused(repository, name):
    act, *words, reason = ACTS[name]
    globals()[act](repository, *words)
    made.rewrite(repository)
    assert re.search(reason, refusal(repository)), refusal(repository)
