"""Download FineWeb-10B as GPT-2 tokens: a validation shard and up to 103 training shards.

    python data/fineweb.py                # 9 training shards, 2 GB, into data/fineweb10B/
    python data/fineweb.py 103            # all of them, 21 GB; shards that are there are kept
    HF_ENDPOINT=https://... python data/fineweb.py    # from a mirror of the hub

The shards are those of Keller Jordan's speedrun, 100M tokens each, in llm.c's format. The hub's
client downloads them, but does not look at what has arrived. So each shard is compared here with
the sha256 that the hub states for it, and takes its final name only when it is right. The next
call fetches what is missing or damaged. HF_TOKEN is honoured.
"""

import argparse
import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from data import text

try:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import WeakFileLock
except Exception as error:  # it reads variables of the environment when it is imported
    remedy = f"it read {text.variables_of_hub()}; correct or unset the one that is meant"
    if isinstance(error, ImportError):
        remedy = "./run.sh installs what is missing into .venv"
    sys.exit(f"error: {text.ending_of(error)[1]}; {remedy}")

REPO = "kjj0/fineweb10B-gpt2"
REVISION = "889765ea1f903759787add96995d81171b632d0c"
SOURCE = f"{REPO} at {REVISION}"
FOLDER = Path(__file__).resolve().parent / "fineweb10B"
TRAIN_SHARDS = 103
VAL_NAME = "fineweb_val_000000.bin"
# The validation shard decides what a loss means: no mirror may offer another one.
VAL_SHA256 = "5b95c8e0966f0861685b307b23dc5ae42b228ef74b28cb499784ae021f201640"
PAUSES_S = (1, 2, 4)  # before a shard is tried again


def complete_corpus(folder, train_shards):
    """Bring the first training shards and validation into a folder, with a manifest.

    Raises what the hub's client does; the shards that are complete by then are kept."""
    shards = known_shards(folder)
    names = [f"fineweb_train_{i:06d}.bin" for i in range(1, train_shards + 1)]
    # Validation comes last: until it is there the corpus is incomplete, and has no manifest.
    for name in [*names, VAL_NAME]:
        if not is_right(folder / name, shards.get(name)):
            shards[name] = fetch(folder / name)
            if VAL_NAME in shards:
                write_manifest(folder, shards)


def known_shards(folder):
    """The shards that a folder's manifest lists, {file name: sha256}."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        if manifest["source"] == SOURCE:
            return {shard["file"]: shard["sha256"] for shard in manifest["shards"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass  # it is written anew, once the hub has been asked
    return {}


def write_manifest(folder, shards):
    """Replace the manifest in one step. Its keys are those of data/text.py's manifests. Raises
    DataError where the vocabulary cannot be had."""
    rows = [{"file": name, "sha256": shards[name]} for name in sorted(shards)]
    manifest = {"shards": rows, "source": SOURCE, **text.make_tokenizer("gpt2").facts()}
    temporary = folder / "manifest.json.tmp"
    temporary.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    temporary.replace(folder / "manifest.json")


def fetch(path):
    """Bring a shard to its place, in several tries. Returns its sha256."""
    for pause in PAUSES_S:
        try:
            return fetch_once(path)
        except Exception as error:  # the client's own, its transport's and many more
            if isinstance(error, (ImportError, MemoryError)) or getattr(error, "errno", None):
                raise  # this machine failed, and not the hub
            time.sleep(pause)
    return fetch_once(path)


def fetch_once(path):
    """Bring a shard to its place, whole, unless it is there as the hub has it."""
    sha256 = hub_sha256(path.name)
    if is_right(path, sha256):  # only the manifest is missing
        return sha256
    staging = path.parent / ".download"
    shutil.rmtree(staging, ignore_errors=True)  # what a failed try or a killed call has left
    # A cache of its own, since a broken copy in the user's would be taken again at each try.
    places = {"local_dir": staging, "cache_dir": staging}
    hf_hub_download(REPO, path.name, repo_type="dataset", revision=REVISION, **places)
    arrived = staging / path.name
    if not is_right(arrived, sha256):
        raise OSError(f"{path.name}: what arrived has not the sha256 that the hub states")
    arrived.replace(path)
    shutil.rmtree(staging)
    return sha256


def hub_sha256(name):
    """Ask the hub for a shard's sha256, which is the ETag of a large file."""
    url = hf_hub_url(REPO, name, repo_type="dataset", revision=REVISION)
    meta = get_hf_file_metadata(url)
    is_shard = meta.etag == VAL_SHA256 if name == VAL_NAME else len(meta.etag or "") == 64
    if meta.commit_hash != REVISION or not is_shard:
        raise OSError(f"{url}: ETag {meta.etag}, commit {meta.commit_hash}: not the shard's")
    return meta.etag


def is_right(path, sha256):
    """Say whether a file is there and has this sha256."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def main(argv=None):
    """Command line. Raises SystemExit with the exit status where something goes wrong."""
    parser = argparse.ArgumentParser(description="Download FineWeb-10B as GPT-2 token shards.")
    add = parser.add_argument
    add("shards", nargs="?", type=int, default=9, help=f"of training, 1 to {TRAIN_SHARDS} (9)")
    add("--out", type=Path, default=FOLDER, help="folder of the corpus (default: data/fineweb10B)")
    arguments = parser.parse_args(argv)
    arguments.out = arguments.out.expanduser().absolute()
    if not 1 <= arguments.shards <= TRAIN_SHARDS:
        parser.error(f"shards {arguments.shards} must be between 1 and {TRAIN_SHARDS}")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(arguments.out / ".lock"):  # a second call waits for the first
            complete_corpus(arguments.out, arguments.shards)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        parser.error(f"{error}; check --out")
    except (KeyboardInterrupt, Exception) as error:
        _, reason = text.ending_of(error)
        remedy = f"check disk, network, HF_ENDPOINT ({constants.ENDPOINT})"
        sys.exit(f"error: {reason}; {remedy} and {text.variables_of_hub()}, and run again")
    print(f"{arguments.out}: {arguments.shards} training shards and validation are complete")


if __name__ == "__main__":
    main()
