"""data/fineweb.py against a hub on this machine that refuses, corrupts, stalls and is absent."""

import hashlib
import http.server
import os
import resource
import subprocess
import sys
import threading
import time

import pytest
from huggingface_hub import close_session, constants

import train_gpt
from data import fineweb

VAL = fineweb.VAL_NAME
ONE = "fineweb_train_000001.bin"
TWO = "fineweb_train_000002.bin"
FILES = {name: os.urandom(100_000) for name in (VAL, ONE, TWO)}
SHA256 = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
PIECES = [*(token.to_bytes(3).lstrip(b"\0") for token in range(50256)), b""]  # for GPT-2's
NOWHERE = "http://127.0.0.1:9"  # a port at which nobody listens


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does, or with the trouble that a test asks for."""

    def log_message(self, *_):
        """Say nothing."""

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        if self.command == "GET":
            self.server.downloads.append(name)
        actions = self.server.trouble.get((self.command, name)) or [200]
        action = actions.pop(0)
        self.send_response(503 if action == 503 else 200)
        self.send_header("X-Repo-Commit", self.server.commit)
        self.send_header("ETag", f'"{SHA256[name]}"')
        self.send_header("Content-Length", len(FILES[name]))
        self.end_headers()
        if action == "stall":
            time.sleep(30)
        if self.command == "GET" and action != 503:
            self.wfile.write(FILES[VAL if action == "corrupt" else name])  # they have one size

    do_HEAD = do_GET


@pytest.fixture
def hub():
    """A running hub, and the files that it was asked for. trouble: {(method, file): actions}, one
    for each such request."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.downloads = []
    server.trouble = {}
    server.commit = fineweb.REVISION
    threading.Thread(target=server.serve_forever, args=[0.01]).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def call(monkeypatch, capfd):
    """call(url, folder, *words): the command line in this process. Returns (status, stderr)."""
    monkeypatch.setattr(fineweb, "VAL_SHA256", SHA256[VAL])
    monkeypatch.setattr(fineweb, "PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # it makes requests, too
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("NO_PROXY", "*")
    vocabulary = fineweb.text.Tokenizer("gpt2", PIECES, None)
    monkeypatch.setattr(fineweb.text, "make_tokenizer", lambda name: vocabulary)

    def run(url, folder, *words):
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        close_session()
        code = 0
        try:
            fineweb.main([*words, "--out", str(folder)])
        except SystemExit as error:
            code = error.code
        out, err = capfd.readouterr()
        assert (f"{folder}: " in out) == (code == 0)
        return (1, f"{err}{code}\n") if isinstance(code, str) else (code, err)

    return run


def check_folder(folder, *names):
    """These shards are complete and in the manifest, and nothing else is left there."""
    assert {path.name for path in folder.iterdir()} - {".lock"} == {*names, "manifest.json"}
    manifest = train_gpt.read_manifest(folder)
    assert manifest["shards"] == {name: SHA256[name] for name in names}
    assert manifest["token_bytes"][255:257] == [1, 2]
    assert manifest["prefix_tokens"][255:258] == [255, 1, 1]
    for name in names:
        assert (folder / name).read_bytes() == FILES[name]


def check_failure(result, word):
    """The call has failed with status 1 and one line, in which this word stands."""
    status, err = result
    assert status == 1 and err.count("\n") == 1 and word in err


@pytest.mark.parametrize("content", [None, FILES[ONE][:-100], FILES[TWO]])
def test_only_what_is_absent_or_broken_is_fetched(hub, call, tmp_path, content):
    folder = tmp_path / "new" / "corpus"
    assert call(hub.url, folder, "1") == (0, "")
    check_folder(folder, ONE, VAL)
    assert call(hub.url, folder, "2") == (0, "")
    assert call(NOWHERE, folder, "2") == (0, "")  # all is there
    (folder / ONE).unlink()
    if content:
        (folder / ONE).write_bytes(content)
    assert call(hub.url, folder, "2") == (0, "")
    assert hub.downloads == [ONE, VAL, TWO, ONE]
    check_folder(folder, ONE, TWO, VAL)


def test_trouble_that_passes_and_that_stays(hub, call, tmp_path):
    hub.trouble = {("HEAD", ONE): [503], ("GET", ONE): [503], ("GET", TWO): ["corrupt"] * 9}
    check_failure(call(hub.url, tmp_path, "2"), f"{TWO}: what arrived has not the sha256")
    assert [path.name for path in tmp_path.glob("*.*n")] == [ONE]
    hub.downloads.clear()
    hub.trouble = {("GET", TWO): ["corrupt"]}
    assert call(hub.url, tmp_path, "2") == (0, "")
    assert hub.downloads == [TWO, TWO, VAL]
    check_folder(tmp_path, ONE, TWO, VAL)


@pytest.mark.parametrize("url", [NOWHERE, "nonsense", "http://127.0.0.1:x"])
def test_no_hub_is_one_line(call, tmp_path, url):
    check_failure(call(url, tmp_path, "1"), "HF_ENDPOINT")


def test_another_commit_or_validation_shard_is_refused(hub, call, tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "VAL_SHA256", "0" * 64)
    check_failure(call(hub.url, tmp_path, "1"), SHA256[VAL])
    hub.commit = "e" * 40
    check_failure(call(hub.url, tmp_path, "2"), "e" * 40)
    assert hub.downloads == [ONE]


def test_a_killed_call_is_completed_by_the_next(hub, call, tmp_path):
    hub.trouble = {("GET", TWO): ["stall"]}
    words = [sys.executable, fineweb.__file__, "2", "--out", str(tmp_path)]
    with subprocess.Popen(words, env=os.environ | {"HF_ENDPOINT": hub.url}) as process:
        while TWO not in hub.downloads and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert [path.name for path in tmp_path.glob("*.*n")] == [ONE]
    assert call(hub.url, tmp_path, "2") == (0, "")
    assert hub.downloads == [ONE, TWO, TWO, VAL]
    check_folder(tmp_path, ONE, TWO, VAL)


def test_a_full_disk_is_one_line_and_not_tried_again(hub, call, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    result = call(hub.url, tmp_path, "1")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_failure(result, "File too large")
    assert hub.downloads == [ONE]


# The client raises an ImportError, a ValueError at its import, an OSError without a name.
ODD = {"ALL_PROXY": "socks5://127.0.0.1:9", "HF_HUB_ETAG_TIMEOUT": "abc", "SSL_CERT_FILE": "/no"}


@pytest.mark.parametrize("name", ODD)
def test_odd_variables_are_named_in_one_line(name, tmp_path):
    kept = {key: text for key, text in os.environ.items() if not key.startswith("HF_")}
    words = [sys.executable, fineweb.__file__, "1", "--out", str(tmp_path)]
    environment = {**kept, "HF_ENDPOINT": NOWHERE, name: ODD[name], "NO_PROXY": ""}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and name in last and "the shards" not in last


@pytest.mark.parametrize("count, name", [("0", "new"), ("104", "new"), ("1", "file")])
def test_bad_calls_have_status_2(call, tmp_path, count, name):
    (tmp_path / "file").touch()
    status, err = call(NOWHERE, tmp_path / name, count)
    assert status == 2 and (count if name == "new" else "--out") in err
    assert not (tmp_path / "new").exists()
