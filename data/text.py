"""Turn text files into token shards that any llm.c-style loader reads.

    python data/text.py                                   # the offline corpus, into data/python/
    python data/text.py --corpus cpp                      # a second domain, into data/cpp/
    python data/text.py ~/notes book.txt --out data/mine  # your own text
    python data/text.py DIR --suffix .h --out data/cpp    # only files with these endings

Without PATH the corpus is one that every install already holds: the Python sources of the torch
package, as bytes. Nothing is downloaded, and for the pinned torch it is the same bit for bit
everywhere. `cpp` are the C++ headers beside them, less what torch's build generated.

A shard is a header of 256 little-endian int32 (magic 20240520, version 1, number of tokens, then
zeros) and uint16 tokens. Each document starts with the end-of-text id: 256 or, for gpt2, 50256.
`manifest.json` beside the shards describes them. It holds no dates and no absolute paths, so its
sha256 names the corpus on every machine.

Contents: documents -> split -> tokens -> shards -> corpus -> command line.
Exit status: 0 done, 1 disk full, 2 something in the call to correct; stderr says what.
"""

import argparse
import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib.metadata
import importlib.util
import json
import operator
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
SHARD_TOKENS = 100_000_000  # the field's shard size: 200 MB, small enough to move and to hold
VOCAB_SIZE = {"bytes": 257, "gpt2": 50257}  # the end-of-text id is the last one of each
VAL_PERCENT = 5.0


class Offline(NamedTuple):
    """A corpus out of the installed torch."""

    what: str
    folder: str  # inside the package
    suffixes: tuple
    exclude: set  # names as bytes, folders with a slash at their end
    sha256: dict  # of the files that the pinned torch gives


# The corpora of the pinned torch. Its CPU and CUDA wheels hold the same Python sources. The
# headers' sums are those of the CPU wheel.
RECORD_TORCH = "2.13.0"
RECORD_SHA256 = {
    "manifest.json": "2b2614da039308c254c03bf8b61d385408d72e0f3d6c6a3695e599c89cb83d25",
    "python_train_000000.bin": "b994b2f2d73229e3b714a8daf67c723018c92a306c06e88474c53ac70e1873bf",
    "python_val_000000.bin": "399cd09f8e8b8d1ef7c69b0efd70bcc645becc8ec3c29ed5525f9c122352aa91",
}
CPP_SHA256 = {
    "manifest.json": "532a8c6864bc92a8899598896ebfa9348051fc42094918089dce08694190e700",
    "cpp_train_000000.bin": "0d7f0226ec69a58a6e373a0683a4b14ad2443f7826bbf913b72293e3e422a245",
    "cpp_val_000000.bin": "44057eec07fd5e14c002b08488728b0404afa8bdf3c2b584d3d7ef14c33c199f",
}
# This file names the build, so it is the one file that differs between the wheels.
BUILD_FILES = {b"version.py"}
# Torch's build generated these 17 MB, near copies of each other.
GENERATED_HEADERS = {
    b"ATen/ops/",
    b"ATen/RedispatchFunctions.h",
    b"ATen/RegistrationDeclarations.h",
    b"ATen/VmapGeneratedPlumbing.h",
}
HEADER_SUFFIXES = (".h", ".hpp", ".cuh")
OFFLINE = {
    "python": Offline("Python sources", "", (".py",), BUILD_FILES, RECORD_SHA256),
    "cpp": Offline("C++ headers", "include", HEADER_SUFFIXES, GENERATED_HEADERS, CPP_SHA256),
}


class DataError(Exception):
    """What the caller has to change. The message is one line: value, constraint, remedy."""


# ----- documents


class Document(NamedTuple):
    """A file of text."""

    name: bytes  # relative to its root, with forward slashes: the same wherever the root lies
    path: Path
    sha256: bytes = b""  # of its content, once that was read


def find_files(roots, suffixes=(), exclude=()):
    """List the files under the roots (files or folders) as Documents, sorted by name.

    suffixes: endings to keep, all when empty. exclude: names, as bytes, to leave out; one that
    ends in a slash is a folder.
    Hidden files and folders are left out, and links to folders are not followed.
    Raises DataError for a missing root, OSError for a folder that cannot be listed."""
    found = []
    for root in roots:
        if not root.exists():
            raise DataError(f"{root}: no such file or folder; PATH has to name existing text")
        if root.is_file():
            found.append(Document(os.fsencode(root.name), root))
        else:
            found += files_below(root)
    endings = tuple(suffixes) or ("",)
    excluded_folders = tuple(name for name in exclude if name.endswith(b"/"))
    kept = []
    for file in found:
        is_excluded = file.name in exclude or file.name.startswith(excluded_folders)
        if file.path.name.endswith(endings) and not is_excluded:
            kept.append(file)
    return sorted(kept, key=operator.attrgetter("name"))


def files_below(root):
    """List the files under a folder as Documents, without hidden files and folders."""

    def refuse(error):
        raise error

    found = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                relative = path.relative_to(root).as_posix()
                found.append(Document(os.fsencode(relative), path))
    return found


def keep_text(files):
    """Read every file once. Returns (documents, skipped): the distinct texts among the files, and
    how many were left out as duplicates, empty or undecodable (not UTF-8, or with NUL bytes).

    Copies go before anything is split: a training copy of a validation document is a leak."""
    documents = []
    seen = set()
    skipped = {"duplicates": 0, "empty": 0, "undecodable": 0}
    for file in files:
        content = file.path.read_bytes()
        digest = hashlib.sha256(content).digest()
        if not content:
            skipped["empty"] += 1
        elif digest in seen:
            skipped["duplicates"] += 1
        elif not is_text(content):
            skipped["undecodable"] += 1
        else:
            seen.add(digest)
            documents.append(file._replace(sha256=digest))
    return documents, skipped


def is_text(content):
    """Say whether bytes are UTF-8 without NUL bytes."""
    try:
        return "\0" not in content.decode("utf-8")
    except UnicodeDecodeError:
        return False


# ----- split


def split_documents(documents, val_percent):
    """Draw the validation documents. Returns {"train": [...], "val": [...]}.

    A document's draw is a hash of its name alone, so it stays on its side when others come or go.
    Each side is ordered by the draw, which makes every prefix of a shard a random sample of
    documents: a run that stops early, or validates on the first tokens only, does not see just
    the packages whose names start with `a`.
    The cut moves by as little as it takes to leave neither side empty. Raises DataError when there
    is only one document."""
    if len(documents) < 2:
        raise DataError(
            f"{documents[0].path}: a single document, and validation needs one of its "
            f"own; cut it into several files, e.g. with `split -C 64k`"
        )
    draw = {document: hashlib.sha256(document.name).digest() for document in documents}
    ordered = sorted(documents, key=draw.get)
    limit = val_percent / 100 * 2**64
    below = sum(int.from_bytes(draw[document][:8], "big") < limit for document in ordered)
    cut = min(max(below, 1), len(ordered) - 1)
    return {"train": ordered[cut:], "val": ordered[:cut]}


def describe_split(val_percent):
    """What a manifest says about how its validation documents were drawn."""
    return (
        f"validation: documents whose sha256 of the path relative to its root lies in the "
        f"lowest {val_percent:g} % of its range; both splits in the order of that hash; "
        f"exact duplicates dropped before the split"
    )


# ----- tokens


def encode_bytes(content):
    """Turn each byte of a document into the token of its value."""
    return np.frombuffer(content, dtype=np.uint8).astype("<u2")


def make_encoder(tokenizer):
    """Return the function from a document's bytes to its tokens, uint16 (n,), end-of-text apart.

    Raises DataError when the GPT-2 vocabulary cannot be had."""
    if tokenizer == "bytes":
        return encode_bytes
    try:
        import tiktoken

        encode = tiktoken.get_encoding("gpt2").encode_ordinary
    except Exception as error:  # requests, urllib3 and tiktoken all raise kinds of their own
        raise DataError(
            f"--tokenizer gpt2: its vocabulary is neither cached nor reachable "
            f"({type(error).__name__}); go online once, set TIKTOKEN_CACHE_DIR to a "
            f"filled cache, or use --tokenizer bytes"
        ) from error

    def encode_gpt2(content):
        return np.array(encode(content.decode("utf-8")), dtype="<u2")

    return encode_gpt2


# ----- shards


def write_file(path, pieces):
    """Write byte pieces to a new file, through to the disk. Returns the sha256 as hex."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_split(folder, prefix, split, documents, encode, eot_token, bar):
    """Write one side of the corpus as numbered shards. Returns their manifest entries.

    Every shard starts with a document. A document longer than a shard is cut, and each piece
    counts as a document of its own."""
    writer = ShardWriter(folder, prefix, split)
    for document in documents:
        content = document.path.read_bytes()
        if hashlib.sha256(content).digest() != document.sha256:
            raise DataError(
                f"{document.path}: changed while it was read; leave the text alone "
                f"until the corpus is built"
            )
        ids = encode(content)
        for start in range(0, len(ids), SHARD_TOKENS - 1):
            piece = ids[start : start + SHARD_TOKENS - 1]
            writer.add(np.insert(piece, 0, eot_token))
        bar.update(len(content))
    writer.close_shard()
    return writer.shards


class ShardWriter:
    """Writes pieces of tokens as numbered shards, of which `shards` are the manifest entries.

    A shard is held in memory until its header is known."""

    def __init__(self, folder, prefix, split):
        self.folder = folder
        self.prefix = prefix
        self.split = split
        self.shards = []
        self.pending = []
        self.tokens = 0

    def add(self, piece):
        """Append a piece; the shard before it is closed where both together would be too long."""
        if self.tokens + len(piece) > SHARD_TOKENS:
            self.close_shard()
        self.pending.append(piece)
        self.tokens += len(piece)

    def close_shard(self):
        """Write the pending pieces as a shard, and begin the next one."""
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = [MAGIC, VERSION, self.tokens]
        name = f"{self.prefix}_{self.split}_{len(self.shards):06d}.bin"
        pieces = (array.tobytes() for array in [header, *self.pending])
        sha256 = write_file(self.folder / name, pieces)
        shard = {
            "file": name,
            "split": self.split,
            "sha256": sha256,
            "tokens": self.tokens,
            "documents": len(self.pending),
        }
        self.shards.append(shard)
        self.pending = []
        self.tokens = 0


# ----- corpus


def build_corpus(files, out, source, prefix, tokenizer="bytes", val_percent=VAL_PERCENT):
    """Build shards and manifest.json in the folder `out` from files as find_files lists them.

    source: what the manifest says about the text's origin. Returns the manifest as a dict.
    All is written to a temporary folder beside `out` and takes its place when complete: a kill or
    a full disk leaves `out` as it was. Raises DataError for no text or an `out` not to replace."""
    out = Path(os.path.realpath(out))  # where links go in circles, Path.resolve raises
    check_out(out)
    documents, skipped = keep_text(files)
    if not documents:
        raise DataError(
            f"no text in {source}: {len(files)} files, {skipped['empty']} of them "
            f"empty, {skipped['undecodable']} not text; name another PATH or --suffix"
        )
    splits = split_documents(documents, val_percent)
    encode = make_encoder(tokenizer)
    eot_token = VOCAB_SIZE[tokenizer] - 1
    with temporary_folder(out) as temporary:
        folder = temporary / "new"
        folder.mkdir()
        shards = []
        with progress_bar(out, documents) as bar:
            for split, drawn in splits.items():
                shards += write_split(folder, prefix, split, drawn, encode, eot_token, bar)
        manifest = {
            "shards": shards,
            "skipped": skipped,
            "source": source,
            "tokenizer": tokenizer,
            "split": describe_split(val_percent),
            "vocab_size": VOCAB_SIZE[tokenizer],
        }
        write_file(folder / "manifest.json", [to_json(manifest)])
        sync_folder(folder)
        with locked(out.parent):  # another build may just take its place there
            if out.exists():
                out.rename(temporary / "old")
            folder.rename(out)
        sync_folder(out.parent)
    return manifest


def progress_bar(out, documents):
    """A bar over the bytes of the documents; a line instead where stderr is no terminal."""
    size = sum(document.path.stat().st_size for document in documents)
    label = printable(out.name)
    bar = tqdm(total=size, unit="B", unit_scale=True, desc=label, disable=None)
    if bar.disable:
        what = f"{len(documents):,} documents, {size:,} bytes"
        print(f"building {printable(out)}: {what}", file=sys.stderr)
    return bar


def to_json(manifest):
    """Bytes that depend on the values only, for their sha256 identifies the corpus."""
    return (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode("ascii")


def check_out(out):
    """Refuse to replace anything but a corpus: the whole folder is going to be exchanged."""
    if os.path.lexists(out) and not out.is_dir():
        raise DataError(f"{out}: not a folder; --out names the folder of the corpus")
    corpus_file = re.compile(r"^manifest\.json$|_(train|val)_.*\.bin$", re.DOTALL)
    for path in sorted(out.glob("*")):
        if not path.is_file() or not corpus_file.search(path.name):
            raise DataError(
                f"{out}: holds {path.name}, which is no part of a corpus, and --out "
                f"replaces the whole folder; name a new one"
            )


@contextlib.contextmanager
def temporary_folder(out):
    """A new folder beside `out`, for the time of a with block.

    Its name holds machine and process: parallel builds do not meet, and what a killed build left
    on this machine is recognised and removed."""
    prefix = f".{out.name}.{platform.node()}."
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(glob.escape(prefix) + "*.partial"):
        try:
            os.kill(int(left.name.split(".")[-2]), 0)  # signal 0 only asks whether it runs
        except ProcessLookupError:
            shutil.rmtree(left)
        except (PermissionError, ValueError, OverflowError):
            pass  # it runs, under another user; or it is no build's
    folder = out.parent / f"{prefix}{os.getpid()}.partial"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked(folder):
    """Wait until no other process has this folder locked, where the file system can lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync_folder(folder):
    """Make the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


# ----- command line


def printable(text):
    """The text as one line that standard output and error can show."""
    characters = []
    for character in str(text):
        if not character.isprintable():
            character = ascii(character)[1:-1]  # without the quotes
        characters.append(character)
    encoding = sys.stdout.encoding or "ascii"
    return "".join(characters).encode(encoding, "backslashreplace").decode(encoding)


def torch_package():
    """Folder and version (less the build's `+cpu`) of torch, without the seconds of importing it.

    Raises DataError when it is not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise DataError(
            "torch is not installed, and its sources are the default corpus; install "
            "requirements.txt, or name text of your own: python data/text.py PATH"
        )
    version = importlib.metadata.version("torch").split("+")[0]
    return Path(spec.submodule_search_locations[0]), version


def existing_corpus(out, source, version, sha256):
    """The manifest of an offline corpus of this torch if `out` holds all of it, else None.

    Reads all of it: a shard that was damaged keeps its size."""
    if not (out / "manifest.json").is_file():
        return None
    try:
        content = (out / "manifest.json").read_bytes()
        manifest = json.loads(content)
        if manifest["source"] != source or manifest["split"] != describe_split(VAL_PERCENT):
            return None
        if not all(is_whole(out, shard) for shard in manifest["shards"]):
            return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    is_record = hashlib.sha256(content).hexdigest() == sha256["manifest.json"]
    if version == RECORD_TORCH and not is_record:
        return None
    return manifest


def is_whole(folder, shard):
    """Say whether the folder holds a shard as its manifest entry describes it."""
    path = folder / shard["file"]
    size = 4 * HEADER_INTS + 2 * shard["tokens"]
    if shard["split"] not in ("train", "val") or path.stat().st_size != size:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"]


def difference_from_records(manifest, version, sha256):
    """What sets an offline corpus apart from the records' one, in a few words; "" for nothing."""
    if version != RECORD_TORCH:
        return f"torch is {version}, not {RECORD_TORCH}"
    found = {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
    found["manifest.json"] = hashlib.sha256(to_json(manifest)).hexdigest()
    if found != sha256:
        return (
            f"torch is {version}, but its sources were changed, or are another build's; "
            f"reinstall it"
        )
    return ""


class Parser(argparse.ArgumentParser):
    """A parser that raises DataError instead of ending the process."""

    def error(self, message):
        raise DataError(f"{message}; see `python data/text.py --help`")


PATHS_HELP = "text files or folders (default: the Python sources of the installed torch)"
CORPUS_HELP = "without PATH: which of the installed torch's own (default: python)"
OUT_HELP = (
    "folder of the corpus, whose name becomes the shards' prefix "
    "(default: data/python or data/cpp for torch's own, data/text for any other)"
)


def parse_arguments(argv):
    """Read the command line. Raises DataError for values that do not fit."""
    parser = Parser(description="Turn text files into token shards in llm.c's format.")
    add = parser.add_argument
    add("paths", nargs="*", metavar="PATH", type=Path, help=PATHS_HELP)
    add("--corpus", choices=sorted(OFFLINE), help=CORPUS_HELP)
    add("--out", type=Path, help=OUT_HELP)
    add("--suffix", nargs="+", default=[], metavar=".py", help="endings of the files to take")
    add("--tokenizer", choices=sorted(VOCAB_SIZE), default="bytes")
    add("--val-percent", type=float, default=VAL_PERCENT, help="share of documents held out")
    add("--force", action="store_true", help="build torch's own corpus even when it is there")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.val_percent <= 50:
        parser.error(f"--val-percent {arguments.val_percent:g} must be above 0 and at most 50")
    if arguments.suffix and not arguments.paths:
        parser.error(f"--suffix {arguments.suffix[0]} selects files of a PATH; name one before it")
    if arguments.corpus and arguments.paths:
        parser.error(f"--corpus {arguments.corpus} is torch's own text; leave it out, or the PATH")
    return arguments


def base_name(path):
    """The last part of a path's real name, without links."""
    return Path(os.path.realpath(path)).name


def prefix_of(out):
    """The prefix of the shards of a folder: its name, with a dash for all that is no plain letter.

    An underscore would do, were there no folders that are called my_val_notes: shards are told
    apart by "_val_" and "_train_"."""
    return re.sub("[^A-Za-z0-9.]+", "-", base_name(out))


def build_and_report(files, out, source, prefix, arguments):
    """Build a corpus with the tokenizer and the split of the command line. Returns its manifest."""
    started = time.monotonic()
    tokenizer = arguments.tokenizer
    manifest = build_corpus(files, out, source, prefix, tokenizer, arguments.val_percent)
    report(manifest, f"written to {out} in {time.monotonic() - started:.1f} s")
    return manifest


def report(manifest, action):
    """Print the one line that says what there is now."""
    tokens = {"train": 0, "val": 0}
    for shard in manifest["shards"]:
        tokens[shard["split"]] += shard["tokens"]
    count = f"{tokens['train']:,} training and {tokens['val']:,} validation tokens"
    print(printable(f"{manifest['source']}: {count} {action}"))


def run_own_text(arguments):
    """Build a corpus from the PATHs of the command line."""
    out = arguments.out or Path(__file__).parent / "text"
    names = [base_name(path) for path in arguments.paths]
    # The same text in every locale: what it holds is bytes, and Python's reading of them varies.
    source = os.fsencode(" ".join([*names, *arguments.suffix])).decode(errors="backslashreplace")
    files = find_files(arguments.paths, arguments.suffix)
    build_and_report(files, out, source, prefix_of(out), arguments)


def run_offline(arguments):
    """Build a corpus out of the installed torch.

    With the default tokenizer and split it is kept when it is there, and stderr says what sets it
    apart from the records' corpus."""
    name = arguments.corpus or "python"
    offline = OFFLINE[name]
    root, version = torch_package()
    source = f"{offline.what} of torch {version}"
    is_default = arguments.tokenizer == "bytes" and arguments.val_percent == VAL_PERCENT
    if not is_default:
        out = arguments.out or Path(__file__).parent / "text"
        files = find_files([root / offline.folder], offline.suffixes, offline.exclude)
        build_and_report(files, out, source, prefix_of(out), arguments)
        return
    out = arguments.out or Path(__file__).parent / name
    manifest = None
    if not arguments.force:
        manifest = existing_corpus(out, source, version, offline.sha256)
    if manifest is not None:
        report(manifest, f"already in {out} (--force builds it again)")
    else:
        files = find_files([root / offline.folder], offline.suffixes, offline.exclude)
        manifest = build_and_report(files, out, source, name, arguments)
    difference = difference_from_records(manifest, version, offline.sha256)
    if difference:
        print(f"note: losses are not comparable with the records: {difference}", file=sys.stderr)


def explain(error):
    """(exit status, reason with a remedy) of a failed file operation."""
    subject = error.filename or "writing the shards"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space, or name a larger disk with --out"
        return 1, f"{subject}: {error.strerror}; {remedy}"
    return 2, f"{subject}: {error.strerror}; check PATH, --out and their permissions"


def main(argv=None):
    """Command line. Returns the exit status; what goes wrong is one line on stderr."""
    status = 2
    try:
        arguments = parse_arguments(argv)
        if arguments.paths:
            run_own_text(arguments)
        else:
            run_offline(arguments)
        return 0
    except DataError as error:
        reason = error
    except OSError as error:
        status, reason = explain(error)
    except MemoryError:
        reason = "a document does not fit in memory; cut it into several, e.g. with `split -C 64k`"
    except RecursionError:
        reason = "folders of PATH are nested too deep; name one further inside"
    except KeyboardInterrupt:
        status = 130
        reason = "interrupted; nothing was replaced"
    print(printable(f"error: {reason}"), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
