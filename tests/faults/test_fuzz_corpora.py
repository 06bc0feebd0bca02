"""Shards and manifests, as the trainer reads them, and as the two builders look at what is
there."""

import importlib.util
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import strategies as st

import fuzzing
import helpers
import train_gpt
from train_gpt import ConfigError

ROOT = Path(train_gpt.__file__).parent
COMMIT = "0" * 40


def script(name):
    spec = importlib.util.spec_from_file_location(f"fuzzed_{name}", ROOT / "data" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fineweb, text = script("fineweb"), script("text")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The files of a sound corpus, by name."""
    folder = tmp_path_factory.mktemp("sound")
    shards = []
    for split, count in (("train", 2), ("val", 1)):
        for number in range(count):
            name = f"fineweb_{split}_{number:06d}.bin"
            path = helpers.write_shard(folder / name, helpers.byte_documents(1500, seed=number))
            remote = fineweb.Remote(name, "", path.stat().st_size, fineweb.sha256_of(path), COMMIT)
            shards.append({**fineweb.describe(path, remote), "split": split})
    manifest = {
        "shards": shards,
        "source": fineweb.source_at(COMMIT),
        "tokenizer": "bytes",
        "vocab_size": 257,
        "split": text.describe_split(5.0),
        "skipped": None,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return fuzzing.Files({path.name: path.read_bytes() for path in folder.iterdir()})


def trainer(folder):
    """Exit status of a run's start on the corpus, as far as its data."""
    try:
        train_gpt.open_corpus(helpers.tiny_config(data=str(folder), steps=2, val_tokens=512))
        return 0
    except (ConfigError, OSError) as error:
        print(f"status:error {error}")
        return 2


def download(folder):
    """Of data/fineweb.py, as far as what is there."""

    def check():
        with ThreadPoolExecutor(1) as pool:
            return fineweb.check_shards(folder, COMMIT, pool)

    return builder(check, (fineweb.UsageError, fineweb.FetchError, OSError), fineweb)


def build(folder):
    """Of data/text.py, as far as what is there."""
    source = fineweb.source_at(COMMIT)

    def check():
        text.existing_corpus(folder, source, "1.99.0", {"manifest.json": ""})
        text.check_out(folder)

    return builder(check, (text.DataError, OSError), text)


def builder(check, refusals, module):
    try:
        check()
        return 0
    except refusals as error:
        print(module.printable(f"error: {error}"))
        return 2


READERS = {"trainer": trainer, "download": download, "build": build}


@pytest.fixture(scope="module")
def outcome_of(sound, tmp_path_factory):
    """outcome_of((reader, changes)): what a reader makes of the corpus with changes [(file, action,
    argument), ...]."""
    folder = tmp_path_factory.mktemp("corpora") / "corpus"

    def outcome(example):
        reader, changes = example
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in sound.items():
            (folder / name).write_bytes(content)
        for name, action, argument in changes:
            fuzzing.change(folder / name, action, argument)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fineweb, "print", lambda *_, **__: None, raising=False)  # progress
            return fuzzing.observe(lambda: READERS[reader](folder))

    return outcome


@st.composite
def manifests(draw, content):
    """A manifest of which a part is something else, or missing, or twice there."""
    value = json.loads(content)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(fuzzing.paths_in(value))
        path = draw(st.sampled_from(paths))
        odd = draw(st.one_of(st.just(fuzzing.DROP), fuzzing.ODD_JSON))
        value = fuzzing.replaced(value, path, lambda _, odd=odd: odd)
        value = {} if value is fuzzing.DROP else value
    return json.dumps(value).encode()


@st.composite
def headers(draw, content):
    """A shard with another number in its header, or other tokens."""
    numbers = list(memoryview(content)[:1024].cast("i"))
    numbers[draw(st.sampled_from([0, 1, 2, 2, 2, 3, 255]))] = draw(
        st.one_of(
            st.integers(-(2**31), 2**31 - 1), st.sampled_from([0, 1, -1, 1499, 1501, 2**31 - 1])
        )
    )
    body = draw(
        st.one_of(
            st.just(content[1024:]),
            st.binary(max_size=50),
            st.sampled_from([b"", b"\xff\xff" * 1500]),
        )
    )
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers) + body


@st.composite
def corpora(draw, sound):
    """A reader and the changes of the corpus that it reads."""
    reader, changes = draw(st.sampled_from(["trainer", "trainer", "download", "build"])), []
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(["manifest.json", "manifest.json", *sound]))
        action = draw(
            st.sampled_from(
                ["bytes"] * 12 + ["gone", "link", "folder"] + ["pipe"] * (reader != "trainer")
            )
        )
        argument = b""
        if action == "bytes":
            like = manifests if name == "manifest.json" else headers
            argument = draw(st.one_of(like(sound[name]), fuzzing.changed_bytes(sound[name])))
        elif action == "link":
            argument = draw(st.sampled_from([name, "nowhere", "/dev/null", "."]))
        changes.append((name, action, argument))
    return reader, changes


MANIFEST, TRAIN, VAL = "manifest.json", "fineweb_train_000000.bin", "fineweb_val_000000.bin"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "changes",
    [
        [],
        [(MANIFEST, "bytes", b"[" * 100_000)],
        [(MANIFEST, "bytes", b"5")],
        [(MANIFEST, "bytes", b"9" * 5000)],
        [(MANIFEST, "bytes", b'{"shards": [{"file": [], "sha256": 1}]}')],
        [(MANIFEST, "bytes", b"\xff")],
        [(MANIFEST, "folder", None)],
        [(MANIFEST, "link", MANIFEST)],
        [(TRAIN, "folder", None)],
        [(TRAIN, "link", TRAIN)],
        [(VAL, "bytes", b"")],
        [(VAL, "gone", None)],
        [(TRAIN, "bytes", b"\0" * 1024)],
    ],
    ids=lambda changes: " ".join(ascii(it)[:25] for it in (changes or [[]])[0]),
)
def test_a_corpus_that_was_hard(reader, changes, outcome_of):
    outcome = outcome_of((reader, changes))
    assert not outcome.problem, outcome.problem
    assert outcome.status == 0 or changes, outcome.out


@pytest.mark.parametrize("name", [MANIFEST, TRAIN])
@pytest.mark.parametrize("reader", ["trainer", "download", "build"])
def test_a_pipe_is_not_waited_for(reader, name, outcome_of, monkeypatch):
    monkeypatch.setattr(fuzzing, "STUCK", 3)
    outcome = outcome_of((reader, [(name, "pipe", None)]))
    assert not outcome.problem, outcome.problem


@pytest.mark.slow
def test_corpora(sound, outcome_of):
    fuzzing.hold(corpora(sound), outcome_of, 250)


@fuzzing.in_parts
def test_many_corpora(part, sound, outcome_of):
    fuzzing.survey(
        "shards and manifests, by trainer and builders", part, corpora(sound), outcome_of, 5_000
    )
