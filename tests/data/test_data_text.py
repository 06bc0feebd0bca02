"""data/text.py: format, determinism, split, atomicity and messages. Own text goes through the
script's main(); it runs as a command where a kill, a limit or the locale is what matters."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import signal
import struct
import subprocess
import sys

import pytest

from helpers import ROOT

SCRIPT = ROOT / "data" / "text.py"
SPEC = importlib.util.spec_from_file_location("data_text", SCRIPT)
text = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(text)


def command(*arguments, **options):
    """Run the script as a command. Returns what subprocess.run does."""
    words = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(words, text=True, timeout=60, capture_output=True, **options)


def make_tree(root, seed=0, documents=60, backwards=False):
    """Make a folder of small texts, with copies, empty, hidden and binary files among them.

    Returns {name: content}. The files are made in the order of it, or backwards."""
    rng = random.Random(seed)
    contents = {}
    for i in range(documents):
        letters = rng.choices("abc é\n", k=rng.randrange(1, 900))
        contents[f"p{i % 7}/f{i}.py"] = f"# {i}\n{''.join(letters)}".encode()
    contents |= {
        "copy/a.py": contents["p0/f0.py"],
        "p0/zzz.py": contents["p1/f1.py"],
        "empty.py": b"",
        "latin.py": b"caf\xe9",
        "nul.py": b"a\0b",
        ".hidden.py": b"hidden",
        ".git/x.py": b"git",
        "notes.txt": b"not Python",
    }
    for name in reversed(contents) if backwards else contents:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[name])
    return contents


def build(source, out, *words):
    """Build a corpus with the script's main(). Returns its manifest."""
    assert text.main([str(source), "--out", str(out), *words]) == 0
    return json.loads((out / "manifest.json").read_text())


def reference_split(contents, percent):
    """What the documentation promises, one token at a time: {split: list of tokens}, and names."""
    unique = {}
    for name in sorted(contents, key=os.fsencode):
        unique.setdefault(contents[name], name)
    draw = {name: hashlib.sha256(name.encode()).hexdigest() for name in unique.values()}
    tokens, names = {"train": [], "val": []}, {"train": [], "val": []}
    for name in sorted(draw, key=draw.get):
        split = "val" if int(draw[name][:16], 16) / 2**64 < percent / 100 else "train"
        names[split].append(name)
        tokens[split] += [256, *contents[name]]
    return tokens, names


def read_shard(path):
    """The tokens of one shard as a list, by struct instead of numpy."""
    raw = path.read_bytes()
    header = struct.unpack("<256i", raw[:1024])
    assert header[:2] == (20240520, 1) and set(header[3:]) == {0}
    assert len(raw) == 1024 + 2 * header[2]
    return list(struct.unpack(f"<{header[2]}H", raw[1024:]))


def read_folder(folder):
    """{name: content} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ----- content, split, determinism


def test_shards_equal_a_slow_reference(tmp_path):
    expected = make_tree(tmp_path / "tree")
    mine = tmp_path / "mine"
    manifest = build(tmp_path / "tree", mine, "--suffix", ".py", "--val-percent", "20")
    for name in (".hidden.py", ".git/x.py", "notes.txt", "empty.py", "latin.py", "nul.py"):
        del expected[name]
    tokens, names = reference_split(expected, 20)
    assert len(names["val"]) > 5 and len(names["train"]) > 30
    shards = ["mine_train_000000.bin", "mine_val_000000.bin"]
    assert sorted(read_folder(mine)) == ["manifest.json", *shards]
    for shard in manifest["shards"]:
        path = mine / shard["file"]
        assert read_shard(path) == tokens[shard["split"]]
        assert shard["tokens"] == len(tokens[shard["split"]])
        assert shard["documents"] == len(names[shard["split"]])
        assert shard["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["skipped"] == {"duplicates": 2, "empty": 1, "undecodable": 2}
    assert (manifest["tokenizer"], manifest["vocab_size"]) == ("bytes", 257)
    assert manifest["source"] == "tree .py"


def test_a_shard_ends_at_a_document_and_long_documents_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SHARD_TOKENS", 100)
    lengths = [60, 30, 50, 250, 99, 100, 1, 40]
    for i, length in enumerate(lengths):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * length)
    out = tmp_path / "out" / "c"
    manifest = build(tmp_path, out, "--val-percent", "1")
    seen, documents = [], 0
    for shard in manifest["shards"]:
        tokens = read_shard(out / shard["file"])
        assert tokens[0] == 256 and len(tokens) <= 100
        assert shard["documents"] == tokens.count(256)
        documents += tokens.count(256)
        seen += [token for token in tokens if token != 256]
    assert sorted(seen) == [65 + i for i, length in enumerate(lengths) for _ in range(length)]
    assert documents == len(lengths) + 2 + 1  # 250 in three, 100 in two
    train = [shard["file"] for shard in manifest["shards"] if shard["split"] == "train"]
    assert train == [f"c_train_{i:06d}.bin" for i in range(len(train))] and len(train) > 4


def test_gpt2_tokens_come_from_tiktoken(tmp_path, monkeypatch):
    import tiktoken

    make_tree(tmp_path / "tree", documents=10)
    # the real vocabulary needs the network, so this one stands in: bytes, and "XYZ" as token 1000
    ranks = {bytes([i]): i for i in range(256)} | {b"XY": 999, b"XYZ": 1000}
    pattern = r"[^\n]+|\n"
    encoding = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)
    (tmp_path / "tree" / "merge.py").write_text("XYZ<|endoftext|>")
    out = tmp_path / "g"
    manifest = build(tmp_path / "tree", out, "--tokenizer", "gpt2")
    assert (manifest["tokenizer"], manifest["vocab_size"]) == ("gpt2", 50257)
    tokens = [token for shard in manifest["shards"] for token in read_shard(out / shard["file"])]
    assert tokens.count(50256) == sum(shard["documents"] for shard in manifest["shards"])
    at = tokens.index(1000)
    # text that looks like the special token must not become a document boundary
    assert tokens[at - 1 : at + 14] == [50256, 1000, *b"<|endoftext|>"]


def test_same_bytes_from_another_place_order_and_time(tmp_path):
    first, second = tmp_path / "tree", tmp_path / "deep" / "er" / "tree"
    make_tree(first)
    make_tree(second, backwards=True)
    for path in second.rglob("*.py"):
        os.utime(path, (1, 1))
    build(first, tmp_path / "a" / "c")
    build(second, tmp_path / "b" / "c")
    assert read_folder(tmp_path / "a" / "c") == read_folder(tmp_path / "b" / "c")
    assert str(tmp_path).encode() not in (tmp_path / "a" / "c" / "manifest.json").read_bytes()
    # and the bytes do depend on the content
    (second / "p1" / "f8.py").write_text("changed")
    build(second, tmp_path / "b" / "c")
    assert read_folder(tmp_path / "a" / "c") != read_folder(tmp_path / "b" / "c")


def test_a_document_keeps_its_side_when_others_come_and_go(tmp_path):
    make_tree(tmp_path / "tree", documents=400)
    documents, _ = text.keep_text(text.find_files([tmp_path / "tree"], [".py"]))
    all_sides = text.split_documents(documents, 10)
    some_sides = text.split_documents(documents[::3], 10)
    assert 20 <= len(all_sides["val"]) <= 60
    for side, drawn in some_sides.items():
        assert drawn == [document for document in all_sides[side] if document in set(drawn)]
    for count in (2, 3, 10):  # and neither side is empty
        for percent in (1e-9, 50):
            sides = text.split_documents(documents[:count], percent)
            assert sides["train"] and sides["val"]


# ----- the offline corpora


@pytest.mark.slow
@pytest.mark.parametrize("name", ["python", "cpp"])
def test_an_offline_corpus_is_the_records_one(name, tmp_path):
    out = tmp_path / "any name"
    result = command("--corpus", name, "--out", out)
    assert result.returncode == 0, result.stderr
    hashes = {file: hashlib.sha256(raw).hexdigest() for file, raw in read_folder(out).items()}
    torch_version = importlib.metadata.version("torch").split("+")[0]
    if torch_version == text.RECORD_TORCH and (name == "python" or not result.stderr.count("note")):
        assert hashes == text.OFFLINE[name].sha256 and "not comparable" not in result.stderr
    else:
        assert "not comparable" in result.stderr
    # a second call leaves everything alone
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert "already" in command("--corpus", name, "--out", out).stdout
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    # a shard that was damaged, though it keeps its size, is noticed, and all is built again
    with open(out / f"{name}_val_000000.bin", "r+b") as file:
        file.seek(1030)
        file.write(b"!")
    assert "written" in command("--corpus", name, "--out", out).stdout
    again = {file: hashlib.sha256(raw).hexdigest() for file, raw in read_folder(out).items()}
    assert again == hashes


def fake_torch(root, version):
    """An installation of some torch that consists of three sources."""
    (root / "torch" / "nn").mkdir(parents=True)
    for name in ("__init__", "nn/a", "nn/version", "version"):
        (root / "torch" / f"{name}.py").write_text(f"# {name}\nraise RuntimeError('imported')\n")
    info = root / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return {"env": os.environ | {"PYTHONPATH": str(root)}}


def test_another_torch_works_and_says_so(tmp_path):
    out = tmp_path / "c"
    other = fake_torch(tmp_path / "site", "1.99.0+cu130")
    result = command("--out", out, **other)
    assert result.returncode == 0, result.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"] == "Python sources of torch 1.99.0"
    assert sum(shard["documents"] for shard in manifest["shards"]) == 3  # nn/version.py included
    assert result.stderr.count("not comparable") == 1 and "1.99.0" in result.stderr
    assert "written" in command("--out", out, "--force", **other).stdout
    # what stands there was made from another torch than the one installed now
    changed = fake_torch(tmp_path / "changed", text.RECORD_TORCH + "+cpu")
    result = command("--out", out, **changed)
    assert "written" in result.stdout and "its sources were changed" in result.stderr


ENTRIES = [{"file": 5}, {"file": "\0"}, {"file": "missing"}, {"tokens": -512}, {"tokens": None}]
ENTRIES += [{"split": "test"}, {"sha256": "0" * 64}]
MANIFESTS = [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b"9" * 5000]


def test_an_odd_manifest_is_no_corpus(tmp_path):
    make_tree(tmp_path / "tree")
    manifest = build(tmp_path / "tree", tmp_path / "c")
    words = [tmp_path / "c", manifest["source"], "1.99.0", {"manifest.json": ""}]
    assert text.existing_corpus(*words) == manifest
    for changes in ENTRIES:
        odd = json.loads(json.dumps(manifest))
        odd["shards"][0].update(changes)
        (tmp_path / "c" / "manifest.json").write_text(json.dumps(odd))
        assert text.existing_corpus(*words) is None, changes
    for content in MANIFESTS:
        (tmp_path / "c" / "manifest.json").write_bytes(content)
        assert text.existing_corpus(*words) is None, content[:10]


# ----- nothing half-written


def leftovers(folder):
    """What unfinished builds have left in a folder."""
    return [path for path in folder.iterdir() if path.name.endswith(".partial")]


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_the_old_corpus(tmp_path):
    """Kill the build while a document cannot be read to its end: a named pipe holds it there."""
    out, tree = tmp_path / "work" / "c", tmp_path / "new"
    make_tree(tmp_path / "old")
    build(tmp_path / "old", out)
    before = read_folder(out)
    make_tree(tree, seed=1)
    os.mkfifo(tmp_path / "pipe")
    # the second read of the last document, the one that tokenises it, is made to block
    program = (
        f"import runpy, sys, pathlib\n"
        f"original = pathlib.Path.read_bytes\n"
        f"reads = []\n"
        f"def read_bytes(path):\n"
        f"    reads.append(path)\n"
        f"    if len(reads) == {2 * 60}: open({str(tmp_path / 'pipe')!r}).read()\n"
        f"    return original(path)\n"
        f"pathlib.Path.read_bytes = read_bytes\n"
        f"sys.argv = ['text.py', {str(tree)!r}, '--suffix', '.py', '--out', {str(out)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    pipe = os.open(tmp_path / "pipe", os.O_WRONLY)  # returns once the build has reached the pipe
    assert len(leftovers(out.parent)) == 1
    process.send_signal(signal.SIGKILL)
    process.wait()
    os.close(pipe)
    assert read_folder(out) == before
    # the next build replaces the corpus and removes what the killed one left, and no running one
    with text.temporary_folder(out) as mine:
        theirs = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{os.getppid()}."))
        theirs.mkdir()
    build(tree, out, "--suffix", ".py")
    assert read_folder(out) != before and leftovers(out.parent) == [theirs]


# ----- bad input, odd names

BAD_INPUT = [
    (["missing"], ["missing", "no such file"]),
    (["tree", "--suffix", ".rs"], ["no text", ".rs", "0 files"]),
    (["binary"], ["no text", "1 of them empty", "1 not text"]),
    (["tree/p0/f0.py"], ["a single document", "f0.py", "split"]),
    (["tree", "--val-percent", "51"], ["--val-percent 51", "at most 50"]),
    (["tree", "--val-percent", "nan"], ["--val-percent nan", "at most 50"]),
    (["tree", "--tokenizer", "gpt3"], ["--tokenizer", "gpt3", "gpt2"]),
    (["--suffix", ".py"], ["--suffix .py", "PATH"]),
    (["--corpus", "rust"], ["--corpus", "rust"]),
    (["--corpus", "cpp", "tree"], ["--corpus cpp", "PATH"]),
    (["tree", "--ouch"], ["--ouch", "--help"]),
    (["tree", "--out", "tree/p0/f0.py/c"], ["f0.py", "--out"]),
    (["tree", "--out", "tree/p0/f0.py"], ["not a folder", "--out"]),
    (["tree", "--out", "home"], ["diary.txt", "--out"]),
]


@pytest.mark.parametrize("arguments, words", BAD_INPUT, ids=str)
def test_bad_input_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_tree(tmp_path / "tree", documents=8)
    for name, content in (("binary/b", b""), ("binary/c", b"\xff\0"), ("home/diary.txt", b"dear")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "c"]
    assert text.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert not (tmp_path / "c").exists() and (tmp_path / "home/diary.txt").read_text() == "dear"
