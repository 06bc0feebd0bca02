"""Download FineWeb-10B as GPT-2 tokens: a validation shard and up to 103 training shards.

    python data/fineweb.py                # 9 training shards, 2 GB, into data/fineweb10B/
    python data/fineweb.py 103            # all of them, 21 GB; shards that are there are kept
    HF_ENDPOINT=https://... python data/fineweb.py    # from a mirror of the hub

The shards are those of Keller Jordan's speedrun, 100M tokens each, in llm.c's format. Every file
is checked against the sha256 that the hub states for it, and takes its final name only when right.
A call that was cut short, by kill -9 too, is continued by the next one where it stopped. Shards
that are there are checked against the manifest, and fetched again where they were damaged.
HF_TOKEN is honoured, and so is the hub's Retry-After.

The hub client gives addresses, metadata and headers. The bytes are fetched by the loop below: the
client does not check content hashes, resume after a kill or retry a refused GET.

REVISION and VAL_SHA256 are what several public reproductions of that speedrun pin. They agree with
each other, but the hub itself was not at hand when they were written down. Should it refuse them,
`--revision main` asks for its current commit, to which the manifest then holds the folder.

Contents: hub -> retries -> one file -> corpus folder -> command line.
Exit status: 0 done, 1 network, hub or disk failed, 2 something in the call to correct.
"""

import argparse
import contextlib
import email.utils
import errno
import fcntl
import functools
import hashlib
import json
import os
import random
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session, httpx, parse_ratelimit_headers
from tqdm import tqdm

REPO = "kjj0/fineweb10B-gpt2"
REVISION = "889765ea1f903759787add96995d81171b632d0c"
VAL_NAME = "fineweb_val_000000.bin"
# The validation shard decides what a loss means: at REVISION no mirror may offer another one.
VAL_SHA256 = "5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640"
TRAIN_SHARDS = 103

# llm.c's format of a shard
MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
EOT_TOKEN = 50256
VOCAB_SIZE = 50257

RETRIES = 4  # failures in a row without a new byte; waits of 1, 2, 4 and 8 s outlast a hiccup
BACKOFF_SECONDS = 1.0  # of the first pause; each further one is twice as long
LONGEST_WAIT = 60.0  # of these pauses, in seconds
PATIENCE = 330.0  # seconds of Retry-After; the hub counts requests in windows of 5 minutes
CONTENT_TRIES = 3  # whole downloads of one file whose content comes out wrong
TIMEOUT_SECONDS = 30.0  # without a byte
BLOCK_TOKENS = 1 << 20  # that are looked at in one go


class UsageError(Exception):
    """What the caller has to change. The message is one line: value, constraint, remedy."""


class FetchError(Exception):
    """What network, hub or disk did not deliver, with the remedy, in one line."""


class Temporary(Exception):
    """A failure of one request that the next one may not meet, once `wait` seconds are over."""

    def __init__(self, reason, wait=0.0):
        super().__init__(reason)
        self.wait = wait


# ----- hub


class Remote(NamedTuple):
    """A file as the hub describes it."""

    name: str
    url: str
    size: int  # bytes
    sha256: str
    commit: str


def ask(name, revision):
    """Ask the hub for size, sha256 and commit of a file. Raises FetchError when it gives none."""
    url = hf_hub_url(REPO, name, repo_type="dataset", revision=revision)
    meta = get_hf_file_metadata(url, timeout=TIMEOUT_SECONDS)
    # Large files carry their sha256 as ETag. For small ones it is a git hash, which has 40 digits.
    has_size = meta.size is not None and meta.size > 0
    has_sha256 = re.fullmatch("[0-9a-f]{64}", meta.etag or "")
    if not has_size or not has_sha256:
        raise FetchError(
            f"{url}: no size and sha256 in the answer (ETag {meta.etag}), so it "
            f"could not be checked; set HF_ENDPOINT to a complete mirror"
        )
    if not meta.commit_hash or revision not in (meta.commit_hash, "main"):
        raise FetchError(
            f"{url}: the answer is for commit {meta.commit_hash}, not {revision}; "
            f"set HF_ENDPOINT to another mirror"
        )
    is_pinned = name == VAL_NAME and meta.commit_hash == REVISION
    if is_pinned and meta.etag != VAL_SHA256:
        raise FetchError(
            f"{url}: sha256 {meta.etag[:12]}... is offered, {VAL_SHA256[:12]}... is "
            f"the validation shard's; set HF_ENDPOINT to another mirror"
        )
    return Remote(name, url, meta.size, meta.etag, meta.commit_hash)


# ----- retries


def attempt(action):
    """Call action() once. Raises Temporary for a failure that may pass, FetchError for others."""
    try:
        return action()
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = f"status {status} for {error.response.request.url}"
        if not is_temporary(status):
            raise FetchError(f"{reason}; {remedy_for(status)}") from error
        raise Temporary(reason, asked_wait(error.response.headers)) from error
    except OfflineModeIsEnabled as error:
        raise FetchError("HF_HUB_OFFLINE is set; unset it, or run ./run.sh nano offline") from error
    except (httpx.InvalidURL, ValueError) as error:  # what is no address or no header
        reason = f"{constants.ENDPOINT}: {error}; check HF_ENDPOINT and HF_TOKEN"
        raise FetchError(reason) from error
    except httpx.RequestError as error:
        raise Temporary(str(error) or type(error).__name__) from error


def no_progress():
    """The progress of an action that receives no bytes."""
    return 0


def persist(action, stop, progress=no_progress):
    """Call action() until it succeeds, with longer and longer pauses after failures that may pass.

    progress() is a number that grows as bytes arrive; as long as it does, failures do not count.
    Raises FetchError when the failure is lasting, or when `stop` was set meanwhile."""
    failures = 0
    best = progress()
    while True:
        try:
            return attempt(action)
        except Temporary as error:
            failure = error
        if progress() > best:
            failures = 0
            best = progress()
        failures += 1
        if failures > RETRIES:
            raise FetchError(
                f"{constants.ENDPOINT}: gave up after {failures} attempts "
                f"({failure}); check the network and run again to resume, set "
                f"HF_ENDPOINT to a mirror, or run ./run.sh nano, which works offline"
            )
        if failure.wait > PATIENCE:
            raise FetchError(
                f"{failure}, and the hub asks to wait {failure.wait:.0f} s; run again then, or "
                f"set HF_TOKEN, with which it allows more requests"
            )
        pause = min(BACKOFF_SECONDS * 2 ** (failures - 1), LONGEST_WAIT)
        pause *= random.uniform(0.5, 1)  # keeps parallel downloads from coming back all at once
        if stop.wait(max(pause, failure.wait)):
            raise FetchError("stopped")


def asked_wait(headers):
    """Seconds that a refusal asks to wait, by Retry-After or by the hub's own header; else 0."""
    text = headers.get("Retry-After", "")
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    with contextlib.suppress(ValueError, OverflowError):
        moment = email.utils.parsedate_to_datetime(text)
        return max(0.0, moment.timestamp() - time.time())
    limit = parse_ratelimit_headers(headers)
    if limit and not limit.remaining:
        return float(limit.reset_in_seconds)
    return 0.0


def is_temporary(status):
    """Say whether a request with this HTTP status may succeed when it is made again."""
    return status in (408, 429) or status >= 500


def remedy_for(status):
    """What the caller can do about a lasting HTTP status."""
    if status in (401, 403):
        return "set HF_TOKEN to a token that may read it"
    return "check --revision, or set HF_ENDPOINT to another mirror"


# ----- one file


def receive(remote, file, bar, stop):
    """Append what is missing to a file opened for appending. Raises Temporary on a short body."""
    have = size_of(file)
    if have == remote.size:
        return
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with get_session().stream(
        "GET", remote.url, headers=headers, follow_redirects=True, timeout=TIMEOUT_SECONDS
    ) as response:
        check_response(response, remote)
        content_range = response.headers.get("Content-Range", "")
        resumed = response.status_code == 206 and content_range.startswith(f"bytes {have}-")
        if have and not resumed:  # a server without ranges, or with another file: begin again
            have = restart(file, bar)
        if response.status_code != 200 and not resumed:
            raise Temporary(f"the hub cannot continue {remote.name}")
        for chunk in response.iter_bytes():
            if stop.is_set():
                raise FetchError("stopped")
            have += len(chunk)
            if have > remote.size:
                restart(file, bar)
                raise Temporary(f"{remote.name} came longer than its {remote.size} bytes")
            file.write(chunk)
            file.flush()  # what has arrived shall outlive a kill
            advance(bar, len(chunk))
    if have < remote.size:
        raise Temporary(f"{remote.name} ended after {have} of {remote.size} bytes")


def check_response(response, remote):
    """Raise Temporary or FetchError for an answer whose body is not to be written to the file.

    Status 416 passes: the server refuses the range only, and the file begins again."""
    status = response.status_code
    if is_temporary(status):
        raise Temporary(f"status {status} for {remote.name}", asked_wait(response.headers))
    if status not in (200, 206, 416):
        raise FetchError(f"status {status} for {remote.url}; {remedy_for(status)}")
    if response.headers.get("Content-Type", "").startswith("text/"):
        raise Temporary(
            f"{remote.name}: {response.url.host} sent a web page, of a proxy or a "
            f"login, instead of the shard"
        )


def size_of(file):
    """The bytes that an open file has on disk."""
    return os.fstat(file.fileno()).st_size


def restart(file, bar):
    """Throw away what was received. Returns the new size, 0."""
    advance(bar, -size_of(file))
    file.truncate(0)
    return 0


def advance(bar, count):
    """Move the progress bar by so many bytes."""
    with bar.get_lock():  # all threads share the bar
        bar.update(count)


def fetch(remote, folder, bar, stop):
    """Bring one shard into the folder. Returns its manifest entry.

    The bytes gather in NAME.part. NAME.part.json beside it says of which content they are a part,
    so that they are continued after a kill, and dropped when the hub meanwhile offers another.
    A file under the final name, whoever brought it, is kept when its content is right.
    Raises FetchError; then nothing stands under the final name that was not there before."""
    final = folder / remote.name
    part = folder / f"{remote.name}.part"
    note = folder / f"{remote.name}.part.json"
    if final.exists() and sha256_of(final) == remote.sha256:
        advance(bar, remote.size)
        note.unlink(missing_ok=True)  # left when a kill came between renaming and removing
        return describe(final, remote)
    with open(part, "ab") as file:
        content = {"sha256": remote.sha256}
        if read_json(note) != content or size_of(file) > remote.size:
            file.truncate(0)
            write_json(note, content)
        advance(bar, size_of(file))
        if not receive_right_content(remote, file, part, bar, stop):
            part.unlink()
            note.unlink()
            raise FetchError(
                f"{remote.name}: wrong sha256 in {CONTENT_TRIES} downloads, expected "
                f"{remote.sha256[:12]}...; set HF_ENDPOINT to another mirror"
            )
    entry = describe(part, remote)
    part.rename(final)
    note.unlink()
    return entry


def receive_right_content(remote, file, path, bar, stop):
    """Complete a file opened for appending. Returns whether its sha256 came out right."""

    def receive_rest():
        receive(remote, file, bar, stop)

    def received():
        return size_of(file)

    for _ in range(CONTENT_TRIES):
        persist(receive_rest, stop, received)
        os.fsync(file.fileno())
        if sha256_of(path) == remote.sha256:
            return True
        restart(file, bar)
    return False


def describe(path, remote):
    """Manifest entry of a file whose sha256 was found right. Raises FetchError for no shard."""
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    is_shard = len(header) == HEADER_INTS and tuple(header[:2]) == (MAGIC, VERSION)
    if not is_shard or 4 * HEADER_INTS + 2 * int(header[2]) != remote.size:
        raise FetchError(
            f"{remote.name}: {remote.size} bytes that start with {list(header[:3])} "
            f"are no token shard; check --revision"
        )
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS)
    documents = 0
    for start in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS]
        documents += int(np.count_nonzero(block == EOT_TOKEN))
    return {
        "file": remote.name,
        "split": remote.name.split("_")[1],
        "sha256": remote.sha256,
        "tokens": len(tokens),
        "documents": documents,
    }


def sha256_of(path):
    """The sha256 of a file's content, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ----- corpus folder


def read_json(path):
    """The content of a JSON file, or None where there is none to be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.is_file():
            return json.loads(path.read_bytes())
    return None


def write_json(path, value):
    """Replace a JSON file in one step, through to the disk."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="ascii") as file:
        file.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_manifest(folder, entries, commit):
    """Describe every complete shard in the folder, with the keys of data/text.py's manifests."""
    manifest = {
        "shards": [entries[name] for name in sorted(entries)],
        "skipped": None,
        "source": source_at(commit),
        "tokenizer": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "split": "as published: shard 0 of the tokenised sample is validation, the rest training",
    }
    write_json(folder / "manifest.json", manifest)


def source_at(commit):
    """What a manifest says of the shards' origin."""
    return f"{REPO} at {commit}"


def listed_shards(folder, revision):
    """The shards that a folder's manifest lists and the folder holds: {name: manifest entry}.

    Raises UsageError when they are of another source: shards of two sources do not mix."""
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict):
        return {}
    source = manifest.get("source", source_at(revision))
    if source != source_at(revision):
        raise UsageError(
            f"{folder}: holds {source}, not revision {revision}; give --revision what "
            f"it holds, or --out another folder"
        )
    shards = manifest.get("shards")
    if not isinstance(shards, list):
        return {}
    listed = {}
    for shard in shards:
        if not isinstance(shard, dict):
            continue
        name = str(shard.get("file"))
        is_name = re.fullmatch(r"fineweb_(train|val)_[0-9]{6}\.bin", name)
        if is_name and (folder / name).is_file():
            listed[name] = shard
    return listed


def check_shards(folder, revision, pool):
    """Read every shard that the manifest lists and the folder holds.

    Returns (manifest entries by name of those that are as listed, names of the others).
    Raises UsageError when they are of another source."""
    listed = listed_shards(folder, revision)

    def is_as_listed(name):
        path = folder / name
        remote = Remote(name, "", path.stat().st_size, sha256_of(path), revision)
        try:
            return describe(path, remote) == listed[name]
        except FetchError:
            return False

    if listed:
        print(f"checking {len(listed)} shards that are in {printable(folder)}", file=sys.stderr)
    right = {}
    damaged = []
    for name, is_right in zip(listed, pool.map(is_as_listed, listed), strict=True):
        if is_right:
            right[name] = listed[name]
        else:
            damaged.append(name)
    return right, damaged


def download(train_shards, folder, revision, workers):
    """Complete the folder to the validation shard and the first `train_shards` training shards.

    Returns the manifest entries by name. Raises FetchError, UsageError or OSError; what was
    received until then is kept for the next call."""
    stop = threading.Event()
    if revision == "main":
        revision = persist(functools.partial(ask, VAL_NAME, revision), stop).commit
    train_names = [f"fineweb_train_{i:06d}.bin" for i in range(1, train_shards + 1)]
    with locked(folder), ThreadPoolExecutor(workers) as pool:
        try:
            entries, damaged = check_shards(folder, revision, pool)
            wanted = dict.fromkeys([VAL_NAME, *train_names, *damaged])  # each name once
            missing = [name for name in wanted if name not in entries]
            if missing:
                fetch_all(missing, entries, folder, revision, pool, stop)
        finally:  # after a failure the other threads end at their next chunk
            stop.set()
            pool.shutdown(cancel_futures=True)
    return entries


def fetch_all(names, entries, folder, revision, pool, stop):
    """Fetch shards side by side. Each one that is complete joins `entries` and the manifest."""
    for left in folder.glob("*.tmp"):  # of a call that was killed
        left.unlink()

    def ask_for(name):
        return persist(functools.partial(ask, name, revision), stop)

    files = list(pool.map(ask_for, names))
    check_space(folder, files)
    total = sum(remote.size for remote in files)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        if bar.disable:  # stderr is no terminal
            where = f"from {printable(constants.ENDPOINT)} to {printable(folder)}"
            print(f"fetching {len(files)} shards, {total:,} bytes, {where}", file=sys.stderr)
        jobs = [pool.submit(fetch, remote, folder, bar, stop) for remote in files]
        for job in as_completed(jobs):
            entry = job.result()
            entries[entry["file"]] = entry
            write_manifest(folder, entries, revision)


@contextlib.contextmanager
def locked(folder):
    """Keep a second process from appending to the same files, where the file system can lock.

    A folder that cannot be written to is not locked: it may be complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(folder / ".lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            reason = f"{folder}: another download into it is running; wait for that one"
            raise FetchError(reason) from error
        except OSError:
            pass
        yield


def check_space(folder, files):
    """Raise FetchError when the disk has too little room for what is still to come."""
    parts = [folder / f"{remote.name}.part" for remote in files]
    received = sum(part.stat().st_size for part in parts if part.exists())
    needed = sum(remote.size for remote in files) - received
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(
            f"{folder}: {needed:,} bytes are still to come and the disk has {free:,} "
            f"free; free some, ask for fewer shards, or name another disk with --out"
        )


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


class Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of ending the process."""

    def error(self, message):
        raise UsageError(f"{message}; see `python data/fineweb.py --help`")


def parse_arguments(argv):
    """Read the command line. Raises UsageError for a value that is out of its range."""
    parser = Parser(description="Download FineWeb-10B as GPT-2 token shards.")
    add = parser.add_argument
    shards_help = f"training shards of 100M tokens, 1 to {TRAIN_SHARDS} (default: 9)"
    add("shards", nargs="?", metavar="SHARDS", type=int, default=9, help=shards_help)
    folder = Path(__file__).parent / "fineweb10B"
    add("--out", type=Path, default=folder, help="folder of the corpus (default: data/fineweb10B)")
    add("--workers", type=int, default=4, help="files fetched at once, 1 to 32 (default: 4)")
    add("--revision", default=REVISION, help="commit of the dataset, 40 hex digits, or main")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.shards <= TRAIN_SHARDS:
        parser.error(f"SHARDS {arguments.shards} must be between 1 and {TRAIN_SHARDS}")
    if not 1 <= arguments.workers <= 32:
        parser.error(f"--workers {arguments.workers} must be between 1 and 32")
    if not re.fullmatch("[0-9a-f]{40}|main", arguments.revision):
        parser.error(f"--revision {arguments.revision} must be a full commit hash or main")
    return arguments


def run(arguments):
    """Do what the command line asks for; the result is one line on stdout."""
    entries = download(arguments.shards, arguments.out, arguments.revision, arguments.workers)
    tokens = sum(entry["tokens"] for entry in entries.values() if entry["split"] == "train")
    line = f"{arguments.out}: {len(entries)} shards complete, {tokens:,} training tokens"
    print(printable(line))


def explain(error):
    """(exit status, reason with a remedy) of a failed file operation."""
    subject = error.filename or "writing the shards"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return 1, f"{subject}: {error.strerror}; free some space and run again to resume"
    return 2, f"{subject}: {error.strerror}; check --out"


def main(argv=None):
    """Command line. Returns the exit status; what goes wrong is one line on stderr."""
    try:
        run(parse_arguments(argv))
        return 0
    except UsageError as error:
        status = 2
        reason = error
    except FetchError as error:
        status = 1
        reason = error
    except OSError as error:
        status, reason = explain(error)
    except KeyboardInterrupt:
        status = 130
        reason = "interrupted; run again to resume"
    print(printable(f"error: {reason}"), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
