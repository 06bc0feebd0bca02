"""data/text.py: format, determinism, split, atomicity and messages.

The script runs as a command wherever the command line, a kill or the disk is what matters; its
functions are called directly otherwise."""

import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "data" / "text.py"


def load_script():
    spec = importlib.util.spec_from_file_location("data_text", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


text = load_script()


def command(*arguments, **options):
    """Run the script as a command. Returns what subprocess.run does."""
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        text=True,
        timeout=60,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


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
    names = list(contents)
    if backwards:
        names.reverse()
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[name])
    return contents


def build(source, out, *words):
    """Build a corpus with the script's main(). Returns its manifest."""
    assert text.main([str(source), "--out", str(out), *words]) == 0
    return read_manifest(out)


def read_manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def count_documents(manifest):
    """The number of documents in all shards."""
    return sum(shard["documents"] for shard in manifest["shards"])


def reference_split(contents, percent):
    """What the documentation promises, one token at a time: {split: list of tokens}, and names."""
    unique = {}
    for name in sorted(contents, key=os.fsencode):
        unique.setdefault(contents[name], name)
    draw = {name: hashlib.sha256(name.encode()).hexdigest() for name in unique.values()}
    tokens = {"train": [], "val": []}
    names = {"train": [], "val": []}
    for name in sorted(draw, key=draw.get):
        split = "train"
        if int(draw[name][:16], 16) / 2**64 < percent / 100:
            split = "val"
        names[split].append(name)
        tokens[split].append(256)
        for byte in contents[name]:
            tokens[split].append(byte)
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


def hashes(folder):
    """{name: sha256} of the files in a folder."""
    files = read_folder(folder).items()
    return {name: hashlib.sha256(content).hexdigest() for name, content in files}


def one_line(result, status, *words):
    """The call failed with this status and said so in exactly one line with these words in it."""
    assert result.returncode == status, (result.returncode, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], lines[0]


# ----- content


def test_shards_equal_a_slow_reference(tmp_path):
    tree = tmp_path / "tree"
    mine = tmp_path / "mine"
    expected = make_tree(tree)
    result = command(tree, "--suffix", ".py", "--val-percent", "20", "--out", mine)
    assert result.returncode == 0, result.stderr
    for name in (".hidden.py", ".git/x.py", "notes.txt", "empty.py", "latin.py", "nul.py"):
        del expected[name]
    tokens, names = reference_split(expected, 20)
    assert len(names["val"]) > 5 and len(names["train"]) > 30
    shards = ["mine_train_000000.bin", "mine_val_000000.bin"]
    assert sorted(read_folder(mine)) == ["manifest.json", *shards]
    manifest = read_manifest(mine)
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
    seen = []
    documents = []
    for shard in manifest["shards"]:
        tokens = read_shard(out / shard["file"])
        assert tokens[0] == 256 and len(tokens) <= 100
        assert shard["documents"] == tokens.count(256)
        documents.append(tokens.count(256))
        seen += [token for token in tokens if token != 256]
    expected = []
    for i, length in enumerate(lengths):
        expected += [65 + i] * length
    assert sorted(seen) == expected
    assert len(documents) > 5 and sum(documents) == len(lengths) + 2 + 1  # 250 in three, 100 in two
    train = [shard["file"] for shard in manifest["shards"] if shard["split"] == "train"]
    assert train == [f"c_train_{i:06d}.bin" for i in range(len(documents) - 1)]


def test_gpt2_tokens_come_from_tiktoken(tmp_path, monkeypatch):
    import tiktoken

    make_tree(tmp_path / "tree", documents=10)
    # the real vocabulary needs the network, so this one stands in: bytes, and "XYZ" as token 1000
    ranks = {bytes([i]): i for i in range(256)} | {b"XY": 999, b"XYZ": 1000}
    encoding = tiktoken.Encoding(
        "test", pat_str=r"[^\n]+|\n", mergeable_ranks=ranks, special_tokens={}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)
    (tmp_path / "tree" / "merge.py").write_text("XYZ<|endoftext|>")
    out = tmp_path / "g"
    manifest = build(tmp_path / "tree", out, "--tokenizer", "gpt2")
    assert (manifest["tokenizer"], manifest["vocab_size"]) == ("gpt2", 50257)
    tokens = []
    for shard in manifest["shards"]:
        tokens += read_shard(out / shard["file"])
    assert tokens.count(50256) == count_documents(manifest)
    at = tokens.index(1000)
    # text that looks like the special token must not become a document boundary
    assert tokens[at - 1 : at + 14] == [50256, 1000, *b"<|endoftext|>"]


@pytest.mark.slow
def test_gpt2_without_its_vocabulary_is_one_line(tmp_path):
    make_tree(tmp_path / "tree", documents=5)
    nowhere = {
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty"),
    }
    words = ["--tokenizer", "gpt2", "--out", tmp_path / "g"]
    result = command(tmp_path / "tree", *words, env=os.environ | nowhere)
    one_line(result, 2, "--tokenizer gpt2", "TIKTOKEN_CACHE_DIR")
    assert not (tmp_path / "g").exists()


# ----- determinism and split


def test_same_bytes_from_another_place_order_and_time(tmp_path):
    first = tmp_path / "tree"
    second = tmp_path / "deep" / "er" / "tree"
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
    files = text.find_files([tmp_path / "tree"], [".py"])
    documents, _ = text.keep_text(files)
    all_sides = text.split_documents(documents, 10)
    some_sides = text.split_documents(documents[::3], 10)
    assert 20 <= len(all_sides["val"]) <= 60
    for side, drawn in some_sides.items():
        assert set(drawn) <= set(all_sides[side])
        assert drawn == [document for document in all_sides[side] if document in set(drawn)]


def test_neither_side_is_empty(tmp_path):
    for count in (2, 3, 10):
        documents = [text.Document(b"%d" % i, tmp_path) for i in range(count)]
        for percent in (1e-9, 50):
            sides = text.split_documents(documents, percent)
            assert sides["train"] and sides["val"]
            assert len(sides["train"]) + len(sides["val"]) == count


def test_no_copy_crosses_the_split(tmp_path):
    for i in range(50):
        for j in range(4):
            path = tmp_path / "tree" / f"{j}" / f"{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"document {i}\n")
    manifest = build(tmp_path / "tree", tmp_path / "c", "--val-percent", "30")
    assert manifest["skipped"]["duplicates"] == 150
    assert count_documents(manifest) == 50


def test_several_roots_and_links(tmp_path):
    make_tree(tmp_path / "tree", documents=5)
    (tmp_path / "tree" / "loop").symlink_to(tmp_path / "tree")
    (tmp_path / "tree" / "broken.py").symlink_to(tmp_path / "nothing")
    single = tmp_path / "single.py"
    single.write_text("alone")
    names = [file.name for file in text.find_files([single, tmp_path / "tree"], [".py"])]
    assert names == sorted(names) and b"single.py" in names and b"p0/f0.py" in names
    assert not any(name.startswith((b"loop", b"broken", b".")) for name in names)


# ----- the default corpus


@pytest.mark.slow
def test_default_corpus_is_the_records_one(tmp_path):
    torch_version = importlib.metadata.version("torch").split("+")[0]
    out = tmp_path / "any name"
    result = command("--out", out)
    assert result.returncode == 0, result.stderr
    found = hashes(out)
    if torch_version != text.RECORD_TORCH:
        assert "not comparable" in result.stderr
        pytest.skip(f"torch {torch_version}: the constants are for {text.RECORD_TORCH}")
    assert found == text.RECORD_SHA256
    assert "not comparable" not in result.stderr
    first = np.memmap(out / "python_val_000000.bin", "<u2", offset=1024)
    assert first[0] == 256 and first.max() == 256

    # a second call leaves everything alone, quickly
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    worked = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = command("--out", out)
    worked = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - worked
    assert worked < 5  # seconds of its processor; about 0.3
    assert result.returncode == 0 and "already" in result.stdout
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}

    # a shard cut short is noticed, and everything is built again
    with open(out / "python_val_000000.bin", "r+b") as file:
        file.truncate(5000)
    assert "written" in command("--out", out).stdout
    assert found == hashes(out)


@pytest.mark.slow
def test_the_second_domain_is_the_headers(tmp_path):
    out = tmp_path / "headers"
    result = command("--corpus", "cpp", "--out", out)
    assert result.returncode == 0 and "C++ headers of torch" in result.stdout, result.stderr
    if "not comparable" not in result.stderr:
        assert hashes(out) == text.OFFLINE["cpp"].sha256
    train = np.memmap(out / "cpp_train_000000.bin", "<u2", offset=1024)
    content = train[train < 256].astype(np.uint8).tobytes()
    assert content.count(b"#include") > 1000
    assert b"@generated by torchgen/gen.py from Operator.h" not in content
    assert "already" in command("--corpus", "cpp", "--out", out).stdout
    other = command("--out", out)  # a corpus of the other domain is not taken for this one
    assert "Python sources" in other.stdout and "written" in other.stdout


def test_folders_can_be_left_out(tmp_path):
    make_tree(tmp_path / "tree", documents=5)
    files = text.find_files([tmp_path / "tree"], [".py"])
    names = [file.name for file in files]
    assert b"p0/f0.py" in names
    files = text.find_files([tmp_path / "tree"], [".py"], exclude={b"p0/", b"p1"})
    left = [file.name for file in files]
    assert left == [name for name in names if not name.startswith(b"p0/")]  # p1 is no folder's name


@pytest.mark.parametrize("words", [("--corpus", "rust"), ("--corpus", "cpp", ".")])
def test_corpora_that_do_not_exist_are_refused(words):
    result = command(*words)
    assert result.returncode == 2 and "--corpus" in result.stderr and result.stderr.count("\n") == 1


def fake_torch(root, version):
    """An installation of some torch that consists of three sources."""
    (root / "torch" / "nn").mkdir(parents=True)
    for name in ("__init__", "nn/a", "nn/version", "version"):
        (root / "torch" / f"{name}.py").write_text(f"# {name}\nraise RuntimeError('imported')\n")
    (root / f"torch-{version}.dist-info").mkdir()
    (root / f"torch-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    )
    return os.environ | {"PYTHONPATH": str(root)}


@pytest.mark.slow
def test_another_torch_works_and_says_so(tmp_path):
    environment = fake_torch(tmp_path / "site", "1.99.0+cu130")
    result = command("--out", tmp_path / "c", env=environment)
    assert result.returncode == 0, result.stderr
    manifest = read_manifest(tmp_path / "c")
    assert manifest["source"] == "Python sources of torch 1.99.0"
    assert count_documents(manifest) == 3  # nn/version.py included
    notes = [line for line in result.stderr.splitlines() if "not comparable" in line]
    assert len(notes) == 1 and "1.99.0" in notes[0]
    again = command("--out", tmp_path / "c", env=environment)
    assert "already" in again.stdout and "not comparable" in again.stderr
    assert "written" in command("--out", tmp_path / "c", "--force", env=environment).stdout
    # what stands there was made from another torch than the one installed now
    environment = fake_torch(tmp_path / "newer", "1.99.1")
    assert "written" in command("--out", tmp_path / "c", env=environment).stdout


def test_changed_sources_of_the_pinned_torch_are_announced(tmp_path):
    environment = fake_torch(tmp_path / "site", text.RECORD_TORCH + "+cpu")
    result = command("--out", tmp_path / "c", env=environment)
    assert result.returncode == 0, result.stderr
    assert "not comparable" in result.stderr and "changed" in result.stderr


def test_own_text_needs_no_torch(tmp_path, monkeypatch, capsys):
    def find_nothing(name):
        return None

    make_tree(tmp_path / "tree")
    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    build(tmp_path / "tree", tmp_path / "c")
    capsys.readouterr()
    assert text.main([]) == 2
    assert "torch is not installed" in capsys.readouterr().err


# ----- nothing half-written


def leftovers(folder):
    """What unfinished builds have left in a folder."""
    return [path for path in folder.iterdir() if path.name.endswith(".partial")]


@pytest.mark.slow
def test_kill_in_the_middle_leaves_the_old_corpus(tmp_path):
    """Kill the build while a document cannot be read to its end: a named pipe holds it there."""
    out = tmp_path / "work" / "c"
    make_tree(tmp_path / "old")
    build(tmp_path / "old", out)
    before = read_folder(out)
    tree = tmp_path / "new"
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
    assert [path for path in out.parent.iterdir() if not path.name.startswith(".")] == [out]
    # the next build replaces the corpus and removes what the killed one left
    build(tree, out, "--suffix", ".py")
    assert read_folder(out) != before
    assert leftovers(out.parent) == []


def test_a_running_build_is_left_alone(tmp_path):
    make_tree(tmp_path / "tree", documents=5)
    out = tmp_path / "work" / "c"
    with text.temporary_folder(out) as mine:
        theirs = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{os.getppid()}."))
        theirs.mkdir()
    assert command(tmp_path / "tree", "--out", out).returncode == 0
    assert leftovers(out.parent) == [theirs]


@pytest.mark.slow
def test_full_disk(tmp_path):
    make_tree(tmp_path / "old")
    out = tmp_path / "work" / "c"
    make_tree(tmp_path / "tree", documents=600)

    def small_files():
        """A write beyond 64 KiB fails, as it would on a full disk."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    result = command(tmp_path / "tree", "--out", out, preexec_fn=small_files)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "free some space" in last
    assert "Traceback" not in result.stderr
    assert list(out.parent.iterdir()) == []
    build(tmp_path / "old", out)
    before = read_folder(out)
    assert command(tmp_path / "tree", "--out", out, preexec_fn=small_files).returncode == 1
    assert read_folder(out) == before and list(out.parent.iterdir()) == [out]


def test_out_that_is_no_corpus_is_not_replaced(tmp_path):
    make_tree(tmp_path / "tree", documents=5)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "diary.txt").write_text("dear diary")
    one_line(command(tmp_path / "tree", "--out", tmp_path / "home"), 2, "diary.txt", "--out")
    assert (tmp_path / "home" / "diary.txt").read_text() == "dear diary"
    (tmp_path / "file").write_text("x")
    one_line(command(tmp_path / "tree", "--out", tmp_path / "file"), 2, "not a folder")


# ----- bad input


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["missing"], ["missing", "no such file"]),
        (["tree", "--suffix", ".rs"], ["no text", ".rs", "0 files"]),
        (["binary"], ["no text", "2 of them empty", "1 not text"]),
        (["tree/p0/f0.py"], ["a single document", "f0.py", "split"]),
        (["tree", "--val-percent", "0"], ["--val-percent 0", "above 0"]),
        (["tree", "--val-percent", "51"], ["--val-percent 51", "at most 50"]),
        (["tree", "--val-percent", "nan"], ["--val-percent nan", "at most 50"]),
        (["tree", "--val-percent", "many"], ["--val-percent", "many"]),
        (["tree", "--tokenizer", "gpt3"], ["--tokenizer", "gpt3", "gpt2"]),
        (["--suffix", ".py"], ["--suffix .py", "PATH"]),
        (["tree", "--ouch"], ["--ouch", "--help"]),
        (["tree", "--out", "tree/p0/f0.py/c"], ["f0.py", "--out"]),
        (["tree", "--out", "/proc/nobody/c"], ["/proc/nobody", "--out"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, arguments, words):
    make_tree(tmp_path / "tree", documents=8)
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a").write_bytes(b"")
    (tmp_path / "binary" / "b").write_bytes(b"")
    (tmp_path / "binary" / "c").write_bytes(b"\xff\xfe\0")
    if "--out" not in arguments:
        arguments = [*arguments, "--out", "c"]
    one_line(command(*arguments, cwd=tmp_path), 2, *words)
    assert not (tmp_path / "c").exists()


def test_unreadable_files_are_not_skipped_in_silence(tmp_path, monkeypatch, capsys):
    """Root may read everything, so the refusal is simulated where the system would give it."""
    make_tree(tmp_path / "tree", documents=8)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert text.main([str(tmp_path / "tree"), "--out", str(tmp_path / "c")]) == 2
    assert "Permission denied" in capsys.readouterr().err


# ----- odd names, links, locales, other processes


@pytest.mark.parametrize(
    "name",
    [
        "my_val_notes",
        "a_train_b",
        "two\nlines",
        b"caf\xe9",
        "café",
        "[ab]*?",
        "**",
        "-x",
        "\x1b[2J",
        "_",
    ],
)
def test_names_of_shards_are_plain_whatever_the_folder_is_called(tmp_path, capsys, name):
    make_tree(tmp_path / "tree", documents=9)
    out = tmp_path / os.fsdecode(name)
    build(tmp_path / "tree", out)
    manifest = build(tmp_path / "tree", out)
    assert len(list(out.glob("*_train_*.bin"))) == len(list(out.glob("*_val_*.bin"))) == 1
    names = [shard["file"] for shard in manifest["shards"]]
    assert sorted([*names, "manifest.json"]) == sorted(read_folder(out))
    assert all(re.fullmatch("[A-Za-z0-9_.-]+", name) for name in names)
    shown, told = capsys.readouterr()
    assert len(shown.splitlines()) == len(told.splitlines()) == 2
    assert all(line.isprintable() for line in (shown + told).splitlines())


ODD_NAMES = [
    b"two\nlines.py",
    b"caf\xe9.py",
    "café.py".encode(),
    b"\x1b[2J.py",
    "\u202eevil.py".encode(),
    b"\xff\xfe",
]
LOCALES = [
    ({"PYTHONUTF8": "1"}, "utf-8"),
    ({"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}, "ascii"),
    ({"PYTHONUTF8": "1", "PYTHONIOENCODING": "ascii"}, "ascii"),
]


def odd_tree(folder):
    """Make a folder of texts with odd names, itself of an odd name. Returns its path as bytes."""
    root = os.fsencode(folder) + b"/b\xe4d\n\xc3\xbc"
    os.mkdir(root)
    for index, name in enumerate(ODD_NAMES):
        Path(os.fsdecode(root + b"/" + name)).write_text(f"# {index} ü\n")
    return root


def one_printable_line(content, encoding):
    """The output of a command is a single line that its locale can show."""
    line = content.decode(encoding)
    assert line.count("\n") == 1 and line.strip("\n").isprintable(), line


def command_in(variables, *words, **options):
    """Run the script with environment variables, and with words that may be bytes."""
    environment = os.environ | variables
    command = [sys.executable, SCRIPT, *words]
    return subprocess.run(command, capture_output=True, timeout=60, env=environment, **options)


@pytest.mark.slow
def test_odd_names_give_one_corpus_and_one_line_in_every_locale(tmp_path):
    root = odd_tree(tmp_path)
    corpora = []
    for number, (variables, encoding) in enumerate(LOCALES):
        out = os.fsencode(tmp_path) + b"/%d/\xc3\xbc" % number
        done = command_in(variables, root, "--out", out)
        assert done.returncode == 0, done.stderr
        one_printable_line(done.stdout, encoding)
        one_printable_line(done.stderr, encoding)
        corpora.append(read_folder(Path(os.fsdecode(out))))
    assert corpora[0] == corpora[1] == corpora[2]
    manifest = json.loads(corpora[0]["manifest.json"])
    assert count_documents(manifest) == len(ODD_NAMES)
    # of a byte that is no UTF-8, the source has the number
    assert manifest["source"].encode() == rb"b\xe4d" + b"\n\xc3\xbc"
    documents = text.find_files([Path(os.fsdecode(root))])
    assert [document.name for document in documents] == sorted(ODD_NAMES)


@pytest.mark.slow
def test_a_refusal_that_has_odd_names_is_one_line_in_every_locale(tmp_path):
    root = odd_tree(tmp_path)
    for name in ODD_NAMES:
        os.unlink(root + b"/" + name)
    for variables, encoding in LOCALES:
        done = command_in(variables, root, cwd=tmp_path)
        assert done.returncode == 2
        one_printable_line(done.stderr, encoding)


@pytest.mark.slow
def test_links_in_a_loop(tmp_path):
    make_tree(tmp_path / "tree", documents=5)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "tree" / "self.py").symlink_to("self.py")
    (tmp_path / "tree" / "p0" / "up").symlink_to(tmp_path / "tree")
    build(tmp_path / "tree", tmp_path / "c")
    for name in ("loop", "a"):
        one_line(command(tmp_path / name), 2, name, "no such file")
        one_line(command(tmp_path / "tree", "--out", tmp_path / name), 2, name, "--out")
        one_line(command(tmp_path / "tree", "--out", tmp_path / name / "c"), 2, name, "--out")
        one_line(command("--out", tmp_path / name), 2, name, "--out")


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"5",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"shards": 1e999999999999999999999}',
        b"9" * 5000,
    ],
)
def test_odd_manifests_of_a_default_corpus(tmp_path, manifest):
    (tmp_path / "manifest.json").write_bytes(manifest)
    assert text.existing_corpus(tmp_path, "source", "1.99.0", {"manifest.json": ""}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"file": 5},
        {"file": "\0"},
        {"file": "../c/manifest.json"},
        {"file": "missing"},
        {"tokens": "many"},
        {"tokens": -512},
        {"tokens": 10**30},
        {"tokens": None},
        {"split": None},
        {"split": "test"},
        {"sha256": "0" * 64},
        {"sha256": None},
    ],
    ids=str,
)
def test_odd_entries_of_a_default_corpus(tmp_path, changes):
    out = tmp_path / "c"
    environment = fake_torch(tmp_path / "site", "1.99.0")
    assert command("--out", out, env=environment).returncode == 0
    manifest = read_manifest(out)
    words = [out, manifest["source"], "1.99.0", {"manifest.json": ""}]
    assert text.existing_corpus(*words) == manifest
    manifest["shards"][0].update(changes)
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert text.existing_corpus(*words) is None


def test_a_damaged_shard_of_the_default_corpus_is_built_again(tmp_path):
    environment = fake_torch(tmp_path / "site", "1.99.0")
    assert command("--out", tmp_path / "c", env=environment).returncode == 0
    before = read_folder(tmp_path / "c")
    with open(tmp_path / "c" / "python_train_000000.bin", "r+b") as file:
        file.seek(1030)
        file.write(b"!")  # it keeps its size
    assert "written" in command("--out", tmp_path / "c", env=environment).stdout
    assert read_folder(tmp_path / "c") == before


@pytest.mark.slow
def test_two_builds_of_one_folder_at_once(tmp_path):
    """Both succeed, and the last one has the folder.

    One waits while the other exchanges the folder, as this test does here."""
    make_tree(tmp_path / "tree", documents=5)
    out = tmp_path / "work" / "c"
    out.parent.mkdir()
    words = [sys.executable, SCRIPT, str(tmp_path / "tree"), "--out", str(out)]
    with text.locked(out.parent):
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        builds = [subprocess.Popen(words, **streams) for _ in range(2)]
        deadline = time.monotonic() + 30
        while len(list(out.parent.glob(".c.*.partial/new/manifest.json"))) < 2:
            assert time.monotonic() < deadline and not out.exists()
            time.sleep(0.01)
        time.sleep(0.2)
        assert [build.poll() for build in builds] == [None, None] and not out.exists()
    told = [build.communicate(timeout=60)[1] for build in builds]
    assert [build.returncode for build in builds] == [0, 0], told
    assert len(read_folder(out)) == 3 and list(out.parent.iterdir()) == [out]


def test_text_that_changes_during_the_build_is_refused(tmp_path, monkeypatch, capsys):
    make_tree(tmp_path / "tree", documents=5)
    split_documents = text.split_documents

    def change(*arguments):
        (tmp_path / "tree" / "p2" / "f2.py").write_bytes(b"\xff\0")
        return split_documents(*arguments)

    monkeypatch.setattr(text, "split_documents", change)
    assert text.main([str(tmp_path / "tree"), "--out", str(tmp_path / "c")]) == 2
    assert "f2.py: changed" in capsys.readouterr().err and not (tmp_path / "c").exists()
    assert leftovers(tmp_path) == []


def test_what_does_not_fit_is_one_line(tmp_path):
    with open(tmp_path / "huge.txt", "wb") as file:
        file.truncate(1 << 40)  # of holes: it takes no disk

    def little_memory():
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    result = command(tmp_path, "--out", tmp_path / "c", preexec_fn=little_memory)
    one_line(result, 2, "memory", "split")


def test_folders_nested_deeper_than_can_be_read(tmp_path, monkeypatch, capsys):
    (tmp_path / "/".join("d" * 300)).mkdir(parents=True)  # deeper ones could not be removed again
    find_files = functools.partial(in_little_stack, text.find_files)
    with monkeypatch.context() as patch:
        patch.setattr(text, "find_files", find_files)
        assert text.main([str(tmp_path), "--out", str(tmp_path / "c")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def in_little_stack(function, *arguments):
    """Call a function that may nest 200 calls at most."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 200)
    try:
        return function(*arguments)
    finally:
        sys.setrecursionlimit(limit)


def test_leftovers_that_are_no_builds_are_let_alone(tmp_path):
    make_tree(tmp_path / "tree", documents=5)
    prefix = f".c.{platform.node()}"
    others = [tmp_path / f"{prefix}.{word}.partial" for word in ("x", "9" * 30, "")]
    for other in others:
        other.mkdir()
    result = command(tmp_path / "tree", "--out", tmp_path / "c")
    assert result.returncode == 0, result.stderr
    assert all(other.exists() for other in others)


def test_a_folder_with_a_shards_name_is_not_replaced(tmp_path):
    make_tree(tmp_path / "tree", documents=5)
    (tmp_path / "c" / "my_train_1.bin").mkdir(parents=True)
    one_line(command(tmp_path / "tree", "--out", tmp_path / "c"), 2, "my_train_1.bin", "--out")
