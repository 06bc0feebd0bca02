"""Forgeries that an audit got past `verify`: each contradicts something that a log, a script or the
judge's own checkout shows. Each is done as carefully as the tool's own functions allow: figures,
README and leaderboard are written anew. Every one is caught with one line that names the reason."""

import contextlib
import json
import re
import shutil
from datetime import timedelta

import pytest

import records_helpers as made
from records.__main__ import main
from records.experiment import lay_out, write_figures
from records.files import CONTROL
from records.record import Repository
from records_helpers import edit

FIRST, FASTER = "First", "Faster"
LATER = made.YESTERDAY + timedelta(hours=6)  # than all runs of the two records


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two records, the second of which claims speed against the first. Not to be changed."""
    repository = made.make_repository(tmp_path_factory.mktemp("pristine"))
    made.add_first(repository)
    made.add_faster(repository)
    assert main(["table"], made.fresh(repository)) == 0
    return repository


@pytest.fixture
def repository(pristine, tmp_path):
    """A copy to tamper with."""
    shutil.copytree(pristine.root, tmp_path / "proposal")
    return Repository(tmp_path / "proposal", pristine.rules)


def folder_of(repository, name):
    return next((repository.root / "records" / "mini").glob(f"*_{name}"))


def logs_in(folder, part="logs"):
    return sorted((folder / part).iterdir())


def rewrite(repository):
    """Make all figures those that the tool writes for the logs, where it can read them."""
    again = made.fresh(repository)
    with contextlib.suppress(made.RecordError):
        for record in again.records["mini"]:
            names = {other.name: other for other in again.records["mini"]}
            write_figures(again, record, names.get(record.parent), record.result["by"])
    (repository.root / "records/mini.svg").unlink(missing_ok=True)
    main(["table"], made.fresh(repository))


def force(repository, name, source):
    """A record's folder of the runs of a script as `submit` would make it, if it let everything
    pass."""
    again = made.fresh(repository)
    folder = (again.home / "mini") / f"{folder_of(repository, FIRST).name[:10]}_{name}"
    with contextlib.suppress(made.RecordError):
        lay_out(again, folder, source, "A. Forger")
        edit(folder / "README.md", re.escape("Write here what the idea is, "), made.WHY + " ")
    return folder


def pairs(repository, word="third", before="second", tail="", began=LATER, **values):
    """Runs of another idea beside its parent's, in logs/: (its script, the logs of both sides)."""
    source = made.source_of(word) + tail
    times = {"time_ms": 40_000, "base_ms": 50_000, **values}
    logs = made.write_logs(
        repository.root / "logs", source, made.source_of(before), 8, 21, began=began, **times
    )
    return source, logs


# ----- edits of logs


def in_logs(old, new, part="logs", which=FASTER, only=None):
    """The same edit in every log of a part of a record, or in one."""

    def tamper(repository):
        for path in logs_in(folder_of(repository, which), part)[only]:
            edit(path, old, new)

    only = slice(None) if only is None else slice(only, only + 1)
    return tamper


def with_losses_of(path, run, noise):
    """Give a log in a record the losses of another run, up to an alternating noise."""
    text, sign = path.read_text(), 1
    own = made.stored(path)
    for kind in ("train", "val"):
        for old, new in zip(own.curves[kind], run.curves[kind], strict=True):
            sign = -sign
            text = text.replace(
                f"step:{old.step}/{own.steps} {kind}_loss:{old.loss:.5f}",
                f"step:{old.step}/{own.steps} {kind}_loss:{new.loss + sign * noise:.5f}",
            )
    last = re.findall(r"^step:\S+ val_loss:([0-9.]+)", text, re.MULTILINE)[-1]
    ends = re.compile(r"^((?:final|status:ok run:\S+) val_loss:)[0-9.]+", re.MULTILINE)
    path.write_text(ends.sub(rf"\g<1>{last}", text))


def same_run_again(noise):
    def tamper(repository):
        first, *others = logs_in(folder_of(repository, FIRST))
        for path in others:
            with_losses_of(path, made.stored(first), noise)

    return tamper


def whole_record_again(repository):
    """A copy of the last record with a comment, under its own seeds, names and starts."""
    source, _ = pairs(repository, "second", tail="# another idea\n")
    folder = force(repository, "Copy", source)
    for part in ("logs", "baseline"):
        others = logs_in(folder_of(repository, FASTER), part)
        for path, other in zip(logs_in(folder, part), others, strict=True):
            with_losses_of(path, made.stored(other), 1e-3)


def thinned_copies(repository):
    """Copies of one run, each of which logs at other steps."""
    first, *others = logs_in(folder_of(repository, FIRST))
    for number, path in enumerate(others):
        with_losses_of(path, made.stored(first), 0.0)
        every = (40, 60, 60)[number]
        edit(path, '"log_every": 20', f'"log_every": {every}')
        text = path.read_text()
        edit(path, r"^step:20/60 train.*\n", "")
        if every != 40:
            edit(path, r"^step:40/60 train.*\n", "")
        assert path.read_text() != text


def halved_times(repository):
    """Wall time and everything that must agree with it, but for tokens_per_s."""
    for path in logs_in(folder_of(repository, FASTER)):

        def halved(found):
            return f"{found[1]}{int(found[2]) // 2}ms"

        text = re.sub(r"((?:train|cpu)_time:)(\d+)ms", halved, path.read_text())
        text = re.sub(
            r"^step:(\d+)(.*train_time:)(\d+)ms step_avg:\S+",
            lambda found: (
                f"step:{found[1]}{found[2]}{found[3]}ms "
                f"step_avg:{int(found[3]) / int(found[1]):.2f}ms"
            ),
            text,
            flags=re.MULTILINE,
        )
        total = int(re.search(r"final .*train_time:(\d+)ms", text)[1])
        edited = re.sub(r"train_time:[0-9.]+s", f"train_time:{total / 1000:.1f}s", text)
        path.write_text(edited)


def moved_starts(**shift):
    """All runs of the pairs were started earlier."""

    def tamper(repository):
        for part in ("logs", "baseline"):
            for path in logs_in(folder_of(repository, FASTER), part):
                started = made.stored(path).started - timedelta(**shift)
                edit(path, r"started:\S+", f"started:{started:%Y-%m-%dT%H:%M:%SZ}")

    return tamper


# ----- what is merged


def last_removed(repository):
    """And an own claim against the one before it."""
    shutil.rmtree(folder_of(repository, FASTER))
    source, _ = pairs(repository, before="first", base_ms=60_000)
    force(repository, "Mine", source)


def all_removed(repository):
    for name in (FIRST, FASTER):
        shutil.rmtree(folder_of(repository, name))
    source = made.source_of("mine")
    made.write_logs(repository.root / "logs", source, began=LATER)
    home = repository.home / "mini"
    folder = home / f"{made.YESTERDAY:%Y-%m-%d}_Mine"
    lay_out(made.fresh(repository), folder, source, "A. Forger")


def records_are_a_link(repository, pristine):
    shutil.rmtree(repository.root / "records")
    (repository.root / "records").symlink_to(pristine.root / "records")


def a_track_is_a_link(repository, pristine):
    shutil.rmtree(repository.root / "records/mini")
    (repository.root / "records/mini").symlink_to(pristine.root / "records/mini")


def a_record_is_a_link(repository, pristine):
    folder = folder_of(repository, FASTER)
    shutil.rmtree(folder)
    folder.symlink_to(folder_of(pristine, FASTER))


def rival(began, **values):
    """Another claim against First, whose runs were made before those of the record that is merged,
    and which bears its day."""

    def tamper(repository):
        away = repository.root / "merged"
        folder = folder_of(repository, FASTER)
        folder.rename(away)
        source, _ = pairs(repository, "rival", "first", began=began, base_ms=60_000, **values)
        force(repository, "Earlier", source)
        away.rename(folder)

    return tamper


RIVALRY = r"_Earlier: its parent is '\S+_First'; .* chain before it, which is '\S+_Faster'"
EARLY = made.YESTERDAY + timedelta(minutes=30)
MERGED = {
    "N18 last record removed": (last_removed, r"_Faster/\S+: is not what was merged"),
    "N19 all removed": (all_removed, r"_Faster/\S+: is not what was merged"),
    "N20b losses of a merged record": (
        lambda repository: with_losses_of(
            logs_in(folder_of(repository, FIRST))[0],
            made.stored(logs_in(folder_of(repository, FASTER))[0]),
            0.02,
        ),
        r"_First/\S+: is not what was merged",
    ),
    "N20d Why of a merged record": (
        lambda repository: edit(
            folder_of(repository, FIRST) / "README.md", "It takes", "By me: it takes"
        ),
        r"_First/README.md: is not what was merged",
    ),
    "N31i records is a link": (records_are_a_link, "records: is a symbolic link"),
    "N31i a track is a link": (a_track_is_a_link, "records/mini: is a symbolic link"),
    "N31i a record is a link": (a_record_is_a_link, r"_Faster/\S+: is not what was merged"),
    "N21 a forged older rival": (
        rival(EARLY),
        RIVALRY,
    ),
    "N87 an honest older rival": (
        rival(EARLY, spread=0.0015),
        RIVALRY,
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_what_is_merged_stays(repository, pristine, capsys, name):
    tamper, reason = MERGED[name]
    words = (repository, pristine) if tamper.__code__.co_argcount == 2 else (repository,)
    tamper(*words)
    if not list(repository.root.glob("records/mini/*_Earlier")):
        rewrite_unless_link(repository)
    found = told(Repository(repository.root, pristine.rules, pristine.root), capsys)
    assert re.search(reason, found), found


def rewrite_unless_link(repository):
    folders = [repository.root / "records", *repository.root.glob("records/mini")]
    if not any(folder.is_symlink() for folder in [*folders, *folders[-1].iterdir()]):
        reasons = {path: path.read_text() for path in repository.root.glob("records/mini/*/R*")}
        rewrite(repository)
        for path, text in reasons.items():
            if "By me" in text:
                path.write_text(text)


def told(repository, capsys):
    """The line with which `verify` refuses: it names a file, and none of it reaches the terminal's
    cursor."""
    capsys.readouterr()
    assert main(["verify"], repository) == 2
    out, err = capsys.readouterr()
    assert out == "" and not CONTROL.search(err)
    assert re.fullmatch(r"records: records\S*: .*\n", err), err
    return err


@pytest.mark.parametrize("days", [2, 9800])
def test_pairs_are_younger_than_their_parent(repository, pristine, tmp_path, capsys, days):
    """N17 and N17b where the parent is merged."""
    moved_starts(days=days)(repository)
    rewrite(repository)
    shutil.copytree(
        folder_of(pristine, FIRST), tmp_path / "own/records/mini" / folder_of(pristine, FIRST).name
    )
    proposal = Repository(repository.root, pristine.rules, tmp_path / "own")
    assert "was started before the parent's record was made" in told(proposal, capsys)


def test_an_honest_record_passes_beside_merged_ones(repository, pristine, capsys):
    source, _ = pairs(repository)
    made.submitted(repository, "Third", source)
    assert main(["table"], made.fresh(repository)) == 0
    proposal = Repository(repository.root, pristine.rules, pristine.root)
    assert main(["verify"], proposal) == 0, capsys.readouterr().out
    assert [record.age[0] for record in proposal.records["mini"]] == [False, False, True]


# ----- what logs and scripts show


def scripts_that_name_dtypes(repository):
    """float32 stands in one script and bfloat16 in the other: whichever the machine is fast in
    wins."""
    for word, dtype, before in (("slow", "bfloat16", "second"), ("fast", "float32", "slow")):
        source = made.source_of(word, dtype=dtype)
        base = made.source_of(before, dtype=dtype if before == "second" else "bfloat16")
        base = made.source_of("second") if before == "second" else base
        began = LATER + timedelta(hours=8 * (word == "fast"))
        made.write_logs(
            repository.root / "logs",
            source,
            base,
            8,
            31,
            time_ms=30_000,
            base_ms=50_000,
            began=began,
        )
        code = made.sha_of(source)[:8]
        for path in repository.root.glob(f"logs/mini-{code}-*a/log.txt"):
            edit(path, '"dtype": "bfloat16"', f'"dtype": "{dtype}"', missing_ok=True)
        force(repository, word.title(), source)


def as_script(change, tail=""):
    """A new record whose script is changed."""

    def tamper(repository):
        source = change(made.source_of("third")) + tail
        logs = repository.root / "logs"
        made.write_logs(
            logs,
            source,
            made.source_of("second"),
            8,
            21,
            time_ms=40_000,
            base_ms=50_000,
            began=LATER,
        )
        force(repository, "Hidden", source)

    return tamper


def empty_script(repository):
    (folder_of(repository, FASTER) / "train_gpt.py").write_text("")


def in_batch_line_only(repository):
    """The configuration says that a run was started three times, its batch line once."""
    path = logs_in(folder_of(repository, FASTER))[2]
    edit(path, r'"run_of": "1:3/8:1"', '"run_of": "1:3/8:3"')


def in_configuration_only(repository):
    for path in logs_in(folder_of(repository, FASTER), "baseline"):
        edit(path, r'("run_of": "1:\d/8:)1"', r'\g<1>2"')


def why(text):
    """A text under a record's Why."""
    return lambda repository: edit(
        folder_of(repository, FIRST) / "README.md", r"^(## Why\n\n)", rf"\1{text}\n\n"
    )


def fineweb_first(repository):
    """A first record of a track whose validation tokens rules.json does not know."""
    config = made.config_of_mini(
        track="fineweb", tokenizer="gpt2", val_tokens=10_485_760, val_sha256="", target_loss=3.28
    )
    source = made.source_of("web", **config)
    logs = repository.root / "logs"
    for number in range(1, 5):
        run = f"fineweb-{made.sha_of(source)[:8]}-{number:02d}a"
        seed = made.stats.seed_of(made.sha_of(source), 1, number)
        text = made.log_text(
            run,
            source,
            seed,
            3.1 + number / 100,
            counter=number,
            config=config,
            started=LATER + timedelta(minutes=2 * number),
        )
        (logs / run).mkdir()
        text = text.replace("val_sha256:\n", f"val_sha256:{'ab' * 32}\n")
        (logs / run / "log.txt").write_text(text.replace(" track:mini ", " track:fineweb "))
    home = repository.home / "fineweb"
    folder = home / f"{folder_of(repository, FIRST).name[:10]}_Web"
    lay_out(made.fresh(repository), folder, source, "A. Forger")


STEP = "^step:20/60 train"
COPIED = r"has the losses of \S+, to 0.004 in every step"
DUE = "stands where .* due"
UNICODE = "\\\\u000aimport time; time.perf_counter = None"
FORGERIES = {
    "N24 a chain of dtypes": (scripts_that_name_dtypes, "dtype differs between runs"),
    "A7 copies with noise 2e-4": (same_run_again(2e-4), COPIED),
    "N89 copies with noise 3e-3": (same_run_again(3e-3), COPIED),
    "N23b a whole record with noise": (whole_record_again, f"_Copy/.*{COPIED}"),
    "N02 copies at other steps": (
        thinned_copies,
        "log_every is 40 in the config line, in the script it is 20",
    ),
    "N03 workers of the parent": (
        in_logs('"cooldown"', '"workers": 1, "cooldown"', "baseline"),
        "workers is 1 in the config line, in the script it is 'not there'",
    ),
    "N03b device and keep": (
        in_logs('"cooldown"', '"device": "cuda", "keep": 3, "cooldown"'),
        "device is 'cuda' in the config line",
    ),
    "N03c save_every": (
        in_logs('"cooldown"', '"save_every": 1, "cooldown"'),
        "save_every is 1 in the config line",
    ),
    "N06 processor time 1 ms": (in_logs(r"cpu_time:\d+", "cpu_time:1"), "cpu_time is 1; "),
    "N93 processor time 9 ms": (
        in_logs(r"cpu_time:\d+", "cpu_time:9", only=3),
        "cpu_time is 9; ",
    ),
    "N07 processor time x 50": (
        in_logs(r"cpu_time:(\d+)ms", r"cpu_time:\g<1>00ms", "baseline"),
        "cpu_time is .* can be",
    ),
    "N08 no processor time in one log": (in_logs(r" cpu_time:\d+ms", "", only=1), f"final.*{DUE}"),
    "N08b no processor time at all": (in_logs(r" cpu_time:\d+ms", ""), f"final.*{DUE}"),
    "N05 times halved": (halved_times, "tokens_per_s is .* can be"),
    "N17 two days early": (moved_starts(days=2), "the track's chain before it, which is None"),
    "N17b in 1999": (moved_starts(days=9800), "the track's chain before it, which is None"),
    "N04 the parent uncompiled": (
        in_logs("compile=inductor", "compile=off", "baseline"),
        "backends differs between runs",
    ),
    "N04b one run in float32": (
        in_logs("matmul=torch-bfloat16", "matmul=torch-float32", only=2),
        "backends differs between runs",
    ),
    "N16 another model's size": (
        in_logs("matrices=1", "matrices=9", "baseline"),
        "sizes differs between runs",
    ),
    "N16 one run's size": (
        in_logs("matrices=1", "matrices=9", only=2),
        "sizes differs between runs",
    ),
    "N61 an unknown gate that failed": (
        in_logs("unmoved:ok", "unmoved:ok sealed:FAILED"),
        "validity: sealed is 'FAILED', must be 'not there'",
    ),
    "N09 a loss at step 0": (
        in_logs(
            STEP, "step:0/60 val_loss:0.90000 train_time:0ms step_avg:0.00ms\\nstep:20/60 train"
        ),
        "5 losses are logged, 4 are due, at the steps",
    ),
    "N12 overrides behind a space": (in_logs("^data:", ' overrides:{"a": 1}\\ndata:'), DUE),
    "N12b resumed behind a space": (in_logs("^size:", " resumed:x step:9/60\\nsize:"), DUE),
    "N92 RESUMED": (in_logs(STEP, "RESUMED x\\nstep:20/60 train"), DUE),
    "N10 two times in a line": (
        in_logs(r" (train_time:\d+ms step_avg)", r" train_time:1ms \1"),
        "stands where the step line is due",
    ),
    "N11 words behind the start": (in_logs(r"(started:\S+)", r"\1 overrides:none"), DUE),
    "N90 words in the validity line": (
        in_logs(r"^(validity:.*)", r"\1 note:passed"),
        "validity: note is 'passed'",
    ),
    "N91 words in the data line": (in_logs("^data:", "data:good "), "data:good.*due"),
    "N13 another run's folder": (
        in_logs("log:logs/mi", "log:logs/mo"),
        "folder is 'moni-.*, in the first line 'mini-",
    ),
    "N60 a hidden restart": (
        in_batch_line_only,
        "run_of is '1:3/8:3' in the config line, in the lines beside it '1:3/8:1'",
    ),
    "N60b hidden restarts of the parent": (in_configuration_only, r"run_of is '1:\d/8:2'"),
    "N15 mfu and rate": (
        in_logs(r"tokens_per_s:\d+ mfu:\S+", "tokens_per_s:-5 mfu:900.0%"),
        f"final.*{DUE}",
    ),
    "N15 mfu alone": (in_logs(r"mfu:\S+", "mfu:900.0%"), "mfu is 900.0; 0 to 500"),
    "N14 too little memory": (
        in_logs("ngram_table=3", "ngram_table=1,000,000,000"),
        "peak_memory is 900; 1907 to inf",
    ),
    "N01 an empty script": (empty_script, "train_gpt.py: is empty"),
    "N50 a coding line": (
        as_script(lambda text: f"# coding: raw_unicode_escape\n# {UNICODE}\n{text}"),
        "has a coding line",
    ),
    "N58 a letter that is not ASCII": (
        as_script(lambda text: text, "ｏpen = None\n"),
        r"no Python with names in ASCII: .* line \d+",
    ),
    "N51 a module of the repository": (
        as_script(lambda text: text, "def train():\n    import data.text\n"),
        "imports data.text, whose text no log holds",
    ),
    "N69 fineweb's first record": (fineweb_first, "rules.json has no val_sha256 of fineweb yet"),
    "N23 a gate less": (in_logs(" local:ok", ""), "validity: local is 'not there', must be 'ok'"),
    "N25 a quoted table": (why(r"> | time |\n> |---|\n> | 1 s |"), "'> |' under `## Why`"),
    "N25 a quoted heading": (why("> # Figures"), "'> #' under `## Why`"),
    "N25 an underline": (why(r"Figures\n--"), "'--' under `## Why`"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_caught(repository, capsys, name):
    tamper, reason = FORGERIES[name]
    tamper(repository)
    if "N25" not in name:
        rewrite(repository)
    found = told(made.fresh(repository), capsys)
    assert re.search(reason, found), found


def test_a_careful_rewrite_of_nothing_passes(repository):
    """What the forger's functions write is what the tool writes, so that a forgery is caught for
    its own sake."""
    source, _ = pairs(repository)
    force(repository, "Third", source)
    rewrite(repository)
    assert main(["verify"], made.fresh(repository)) == 0


# ----- the first scripts, whose configuration is not read


def test_older_scripts_are_those_of_records_of_their_track():
    """So that code which is excused is no new record's: it is a record already."""
    repository = Repository.at()
    for track, rules in repository.rules.items():
        known = {made.sha_of(record.source) for record in repository.records[track]}
        assert {*rules.get("older_scripts", ())} <= known, track


def test_an_older_script_is_no_new_record_s(repository, capsys):
    """Its own record's configuration is compared with the rules alone; a copy is refused."""
    in_logs(" unmoved:ok", "", which=FIRST)(repository)
    in_logs(" unmoved:ok", "", "baseline")(repository)
    mini = repository.rules["mini"]
    older = {**mini, "older_scripts": [made.sha_of(made.source_of("first"))]}
    repository = Repository(repository.root, {**repository.rules, "mini": older})
    in_logs('"matrix_lr": 0.025', '"matrix_lr": 0.05', which=FIRST)(repository)
    assert main(["verify"], made.fresh(repository)) == 0
    in_logs('"target_loss": 0.88', '"target_loss": 1.5', which=FIRST)(repository)
    assert "target_loss is 1.5, the track's is 0.88" in told(made.fresh(repository), capsys)
    in_logs('"target_loss": 1.5', '"target_loss": 0.88', which=FIRST)(repository)
    force(repository, "Zagain", made.source_of("first"))
    in_logs(" unmoved:ok", "", which="Zagain")(repository)
    assert re.search(
        "_Zagain: train_gpt.py is the code of .*_First", told(made.fresh(repository), capsys)
    )


# ----- tracebacks and slowness


@pytest.mark.parametrize(
    "old, new, reason",
    [
        ("cooldown=0.45", f"cooldown=0x{'f' * 5000}", "Exceeds the limit"),
        ("micro_batches=8", f"micro_batches={'x' * 3000!r}", "stages is .* in the config line"),
        ("steps=60", "steps=10**30", "steps is 60 in the config line"),
        ("'mini': Config", f"{'n' * 5000!r}: Config", "the source has no track 'mini'"),
    ],
)
def test_long_numbers_and_texts_in_a_script_are_told(repository, capsys, old, new, reason):
    """N27, N27d, N28: no traceback, and no memory that grows with what a script says."""
    source = made.source_of("third")
    assert old in source
    changed = source.replace(old, new)
    pairs(repository)
    for path in (repository.root / "logs").glob(f"mini-{made.sha_of(source)[:8]}-*a/log.txt"):
        text = path.read_text().replace(source, changed)
        folder = path.parent.with_name(
            path.parent.name.replace(made.sha_of(source)[:8], made.sha_of(changed)[:8])
        )
        folder.mkdir()
        (folder / "log.txt").write_text(text)
    home = repository.home / "mini"
    folder = home / f"{folder_of(repository, FIRST).name[:10]}_Long"
    shutil.copytree(folder_of(repository, FASTER), folder)
    (folder / "train_gpt.py").write_text(changed)
    for path in logs_in(folder):
        edit(path, r"code_sha256:\w+", f"code_sha256:{made.sha_of(changed)}")
    found = told(made.fresh(repository), capsys)
    assert re.search(reason, found), found


@pytest.mark.parametrize("digits", [21, 4299, 4301])
def test_long_numbers_in_a_log_are_told(repository, capsys, digits):
    """N99: of JSON and of lines."""
    number = "9" * digits
    path, other = logs_in(folder_of(repository, FIRST))[:2]
    edit(path, '"cooldown": 0.45', f'"cooldown": {number}')
    reason = "Exceeds the limit" if digits > 4300 else "cooldown is 999"
    assert reason in told(made.fresh(repository), capsys)
    edit(path, '"cooldown": 9+', '"cooldown": 0.45')
    edit(other, r"tokens:\d+", f"tokens:{number}")
    assert "where the final line is due" in told(made.fresh(repository), capsys)


def test_a_script_has_a_size(repository, capsys):
    """N29: dense ones took seconds and gigabytes to parse."""
    path = folder_of(repository, FIRST) / "train_gpt.py"
    path.write_text(path.read_text() + "x=[" + "1," * 200_000 + "]\n")
    assert "train_gpt.py: is larger than 400,000 bytes" in told(made.fresh(repository), capsys)


def test_rules_of_another_tree_do_not_count(repository, capsys):
    """A branch is judged by the rules and the code of the checkout that the tool is called in."""
    (repository.root / "records" / "rules.json").write_text('{"alpha": 1, "tracks": {}}')
    (repository.root / "train_gpt.py").write_text("raise SystemExit('executed')\n")
    assert main(["verify", "--tree", str(repository.root)]) == 2
    assert "is not what was merged" in capsys.readouterr().err  # this repository's records
    assert not list(repository.root.rglob("executed"))


def test_reading_imports_no_code_of_the_branch():
    """Neither the trainer nor torch: `verify`, `table`, `diff`, `plot` and `report` need nothing of
    them."""
    import subprocess
    import sys

    import helpers

    names = ("torch", "train_gpt", "data")
    code = f"import sys, records.__main__\nprint([n for n in {names} if n in sys.modules])"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=helpers.ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_figures_of_a_record_are_json(repository):
    """And are read again as they were written."""
    folder = folder_of(repository, FASTER)
    result = json.loads((folder / "result.json").read_text())
    assert repository.load(folder).result == result
