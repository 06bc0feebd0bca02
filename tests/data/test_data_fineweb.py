"""data/fineweb.py against a local hub that cuts, corrupts, refuses, stalls and hangs up.

Where environment, signals or limits matter the script runs as a command with HF_ENDPOINT at the
server below; elsewhere its main() is called, which saves a second a time. Its waits are shortened,
nothing else of it is touched."""

import contextlib
import email.utils
import fcntl
import functools
import hashlib
import http.server
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import close_session, constants

SCRIPT = Path(__file__).parents[2] / "data" / "fineweb.py"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VAL = "fineweb_val_000000.bin"
SHORT_WAITS = {"BACKOFF_SECONDS": 0.01, "TIMEOUT_SECONDS": 1.0}


def load_script():
    spec = importlib.util.spec_from_file_location("data_fineweb", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(SHORT_WAITS)
    return module


fineweb = load_script()
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import fineweb\n"
    f"vars(fineweb).update({SHORT_WAITS})\n"
    f"sys.exit(fineweb.main(sys.argv[1:]))\n"
)


def train(i):
    return f"fineweb_train_{i:06d}.bin"


def make_shard(seed, tokens=200_000):
    """Bytes of a shard that starts in the middle of a document, as the real ones do."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = [20240520, 1, tokens]
    body = np.random.default_rng(seed).integers(0, 50256, size=tokens).astype("<u2")
    body[1000::1000] = 50256
    return header.tobytes() + body.tobytes()


class Hub(http.server.ThreadingHTTPServer):
    """A hub on this machine, which makes the trouble that a test asks for.

    files: {name: bytes}. trouble: {name: list of actions, one for each GET of that file}; an
    action of None, or no more actions, is an answer as it should be. head_trouble likewise.
    As on the real hub, a large file is a redirect to another host, here localhost for 127.0.0.1."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {VAL: make_shard(0)} | {train(i): make_shard(i) for i in range(1, 9)}
        self.trouble = {}
        self.head_trouble = {}
        self.refusal = {}  # headers of an answer by status alone
        self.head_changes = {}  # header names and values to answer with instead; None leaves it out
        self.requests = []  # (method, path, Range, Authorization)
        self.sent = []  # (name, action) of the answers that the client took to their end
        self.released = threading.Event()  # ends a stall

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def next_trouble(self, name):
        """The action, and its argument, with which this GET of a file is to be answered."""
        actions = self.trouble.get(name)
        if not actions:
            return None, None
        return actions.pop(0)

    def paths(self):
        """The paths of all requests, in order."""
        return [path for _, path, _, _ in self.requests]

    def ranges(self, name):
        """The Range headers of the GETs that asked for the content of a file, in order."""
        ranges = []
        for method, path, asked, _ in self.requests:
            if method == "GET" and path == f"/content/{name}":
                ranges.append(asked)
        return ranges

    def handle_error(self, request, address):
        """Say nothing: clients are killed on purpose."""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request to the Hub."""

    def log_message(self, *_):
        """Say nothing."""

    def reply(self, status, headers=(), body=b""):
        self.send_response(status)
        for name, value in dict(headers).items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def note(self):
        """Keep the request for the test. Returns the name of the file that it asks for."""
        asked = self.headers.get("Range")
        authorization = self.headers.get("Authorization")
        self.server.requests.append((self.command, self.path, asked, authorization))
        return self.path.rsplit("/", 1)[-1]

    def to_content(self, name):
        """Describe a file, and redirect to its content."""
        content = self.server.files[name]
        headers = {
            "X-Repo-Commit": COMMIT,
            "X-Linked-Size": len(content),
            "Content-Length": 0,
            "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            "ETag": '"short"',
            "Location": f"http://localhost:{self.server.server_port}/content/{name}",
        }
        self.reply(302, headers | self.server.head_changes)

    def do_HEAD(self):
        name = self.note()
        statuses = self.server.head_trouble.get(name)
        if statuses:
            self.reply(statuses.pop(0), {"Content-Length": 0} | self.server.refusal)
        elif name not in self.server.files or "/resolve/" not in self.path:
            self.reply(404, {"X-Error-Code": "EntryNotFound", "Content-Length": 0})
        else:
            self.to_content(name)

    def do_GET(self):
        name = self.note()
        if self.path.startswith("/datasets/kjj0/fineweb10B-gpt2/resolve/"):
            self.to_content(name)
            return
        action, argument = self.server.next_trouble(name)
        if action == "status":
            self.reply(argument, {"Content-Length": 0} | self.server.refusal)
        elif action == "page":
            page = b"<html>Sign in!</html>"
            self.reply(200, {"Content-Type": "text/html; charset=utf-8"}, page)
        elif action == "redirect":
            self.reply(302, {"Content-Length": 0, "Location": argument})
        elif action != "hang up":
            self.send_content(name, action, argument)

    def send_content(self, name, action, argument):
        """Send a file from the byte on that was asked for, as the action spoils it."""
        content = self.server.files[name]
        asked = self.headers.get("Range")
        start = 0
        status = 200
        headers = {}
        if asked and action != "no ranges":
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if action == "corrupt":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if action == "long":
            body += bytes(64 << 20)
        if action != "cut without length":  # else the client cannot know that there was to be more
            headers["Content-Length"] = len(body)
        if action in ("cut", "cut without length", "stall"):
            body = body[:argument]
        self.reply(status, headers, body)
        self.server.sent.append((name, action))
        if action == "stall":
            self.server.released.wait(30)


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


def environment(url, **more):
    """Variables for a command that shall know this hub, no proxy and no token."""
    variables = dict(os.environ)
    for name in os.environ:
        if name.lower().endswith("_proxy") or name.startswith("HF_"):
            del variables[name]
    variables["HF_ENDPOINT"] = url
    variables["HF_HOME"] = "/nonexistent"
    # the client's own question about its caller would be one more request in the hub's log
    variables["HF_HUB_DISABLE_TELEMETRY"] = "1"
    return variables | more


def with_revision(arguments, out, revision):
    """The words of a command line; without a revision it is the pinned one."""
    words = [*map(str, arguments), "--out", str(out)]
    if revision:
        words += ["--revision", revision]
    return words


def hear_interrupts():
    """Undo that background jobs of a shell ignore SIGINT and hand that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(url, out, *arguments, variables=None, program=PROGRAM, **options):
    """Start the script as a command. Returns the process."""
    options.setdefault("preexec_fn", hear_interrupts)
    return subprocess.Popen(
        [sys.executable, "-c", program, *with_revision(arguments, out, COMMIT)],
        text=True,
        env=environment(url, **(variables or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def run(url, out, *arguments, **options):
    """Run the script as a command. Returns returncode and err."""
    process = start(url, out, *arguments, **options)
    process.out, process.err = process.communicate(timeout=60)
    return process


def call(url, out, *arguments, revision=COMMIT):
    """Call the script's main(). Returns returncode and err, as run does."""
    err = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(err):
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            patch.delenv(name)
        close_session()  # one made earlier in this process would still use the proxy
        status = fineweb.main(with_revision(arguments, out, revision))
    return types.SimpleNamespace(returncode=status, err=err.getvalue())


def one_line(process, status, *words):
    """The call failed with this status and said so in exactly one line with these words in it."""
    assert process.returncode == status, (process.returncode, process.err)
    lines = process.err.splitlines()
    errors = [line for line in lines if not line.startswith(("fetching ", "checking "))]
    assert len(errors) == 1 and errors[0].startswith("error: "), process.err
    for word in words:
        assert word in errors[0], errors[0]


def shards_in(folder):
    """The names of the shards in a folder, which may be missing."""
    return sorted(path.name for path in folder.glob("*.bin"))


def check_folder(folder, hub, count):
    """The folder holds exactly the first `count` training shards and validation, and says so."""
    names = [train(i) for i in range(1, count + 1)] + [VAL]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", *names, "manifest.json"]
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, shard in zip(names, manifest.pop("shards"), strict=True):
        content = (folder / name).read_bytes()
        assert content == hub.files[name], name
        tokens = np.frombuffer(content, "<u2", offset=1024)
        assert shard == {
            "file": name,
            "split": name.split("_")[1],
            "tokens": len(tokens),
            "sha256": hashlib.sha256(content).hexdigest(),
            "documents": int((tokens == 50256).sum()),
        }
    assert manifest.pop("split")
    assert manifest == {
        "skipped": None,
        "source": f"kjj0/fineweb10B-gpt2 at {COMMIT}",
        "tokenizer": "gpt2",
        "vocab_size": 50257,
    }


# ----- the way it should go


def test_download_then_nothing_then_more(hub, tmp_path):
    out = tmp_path / "f"
    process = run(hub.url, out, 2)
    assert process.returncode == 0, process.err
    check_folder(out, hub, 2)
    assert len(process.err.splitlines()) == 1 and "3 shards" in process.err
    for path in hub.paths():
        assert f"/resolve/{COMMIT}/" in path or path.startswith("/content/")
    hub.requests.clear()
    assert call("http://127.0.0.1:9", out, 2).returncode == 0  # complete: needs no network
    assert call(hub.url, out, 3, "--workers", 1).returncode == 0
    assert {path.rsplit("/", 1)[-1] for path in hub.paths()} == {train(3)}
    assert call(hub.url, out, 1).returncode == 0  # the manifest still names all that is there
    check_folder(out, hub, 3)


@pytest.mark.slow
def test_the_token_reaches_the_hub_and_nobody_else(hub, tmp_path):
    assert run(hub.url, tmp_path, 1, variables={"HF_TOKEN": "hf_secret"}).returncode == 0
    assert len(hub.requests) == 2 * 3
    for _, path, _, authorization in hub.requests:
        if path.startswith("/content/"):
            assert authorization is None, path
        else:
            assert authorization == "Bearer hf_secret", path


def test_main_is_resolved_once_and_then_pinned(hub, tmp_path):
    assert call(hub.url, tmp_path / "f", 2, revision="main").returncode == 0
    check_folder(tmp_path / "f", hub, 2)
    assert sum("/resolve/main/" in path for path in hub.paths()) == 1
    process = call(hub.url, tmp_path / "f", 3, revision="f" * 40)
    one_line(process, 2, COMMIT, "f" * 40, "--revision", "--out")
    assert shards_in(tmp_path / "f") == [train(1), train(2), VAL]


# ----- trouble that passes

PASSING = {
    "cut": [("cut", 150_000), ("cut", 100_000)],
    "cut more often than retries": [("cut", 30_000)] * 9,
    "503 and 429": [("status", 503), ("status", 429), ("status", 500)],
    "hang up": [("hang up", None), ("cut", 0)],
    "corrupt": [("corrupt", None)],
    "corrupt at the end of a resumed file": [("cut", 200_000), ("corrupt", None)],
    "too long": [("long", None)],
    "no ranges": [("cut", 200_000), ("no ranges", None)],
    "range refused": [("cut", 200_000), ("status", 416)],
    "stall": [("stall", 100_000)],
    "cut without length": [("cut without length", 100_000)],
    "a page instead": [("cut", 100_000), ("page", None)],
}


def test_trouble_that_passes(hub, tmp_path):
    """One troubled shard for each kind, all in one call; the log shows that it did happen."""
    hub.files |= {train(i): make_shard(i) for i in range(1, len(PASSING) + 1)}
    hub.trouble = {train(i): list(actions) for i, actions in enumerate(PASSING.values(), 1)}
    hub.head_trouble = {VAL: [503, 502]}
    process = call(hub.url, tmp_path / "f", len(PASSING), "--workers", len(PASSING))
    assert process.returncode == 0, process.err
    check_folder(tmp_path / "f", hub, len(PASSING))
    ranges = {kind: hub.ranges(train(i)) for i, kind in enumerate(PASSING, 1)}
    assert ranges["cut"] == [None, "bytes=150000-", "bytes=250000-"]
    assert len(ranges["cut more often than retries"]) == 10
    assert ranges["cut more often than retries"][-1] == f"bytes={9 * 30_000}-"
    assert ranges["503 and 429"] == [None] * 4
    assert ranges["hang up"] == [None] * 3
    assert ranges["corrupt"] == [None] * 2
    assert ranges["corrupt at the end of a resumed file"] == [None, "bytes=200000-", None]
    assert ranges["too long"] == [None] * 2
    assert "long" not in [action for _, action in hub.sent]  # its end was not waited for
    assert ranges["no ranges"] == [None, "bytes=200000-"]
    assert ranges["range refused"] == [None, "bytes=200000-", None]
    assert ranges["stall"] == ranges["cut without length"] == [None, "bytes=100000-"]
    # what was there is still there
    assert ranges["a page instead"] == [None, "bytes=100000-", "bytes=100000-"]


def in_an_hour():
    """The time in an hour, as Retry-After says it."""
    return email.utils.formatdate(time.time() + 3600, usegmt=True)


RATE_LIMIT_POLICY = '"fixed window";"resolvers";q=5;w=300'


@pytest.mark.parametrize(
    "headers, low, high",
    [
        ({"Retry-After": "7"}, 7, 7),
        ({"Retry-After": in_an_hour()}, 1800, 3600),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0, 0),
        ({"Retry-After": "soon"}, 0, 0),
        ({}, 0, 0),
        ({"Retry-After": "-5"}, 0, 0),
        ({"Retry-After": "9" * 400}, 0, 0),
        ({"Retry-After": "Mon, 1 Jan 99999"}, 0, 0),
        ({"RateLimit": '"resolvers";r=0;t=42', "RateLimit-Policy": RATE_LIMIT_POLICY}, 42, 42),
        ({"RateLimit": '"resolvers";r=3;t=42'}, 0, 0),
    ],
)
def test_how_long_a_refusal_asks_to_wait(headers, low, high):
    assert low <= fineweb.asked_wait(fineweb.httpx.Headers(headers)) <= high


def test_retry_after_is_waited_for_and_an_hour_is_not(hub, tmp_path, monkeypatch):
    waits = []

    class Event(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return self.is_set()

    monkeypatch.setattr(fineweb, "threading", types.SimpleNamespace(Event=Event))
    hub.refusal = {"Retry-After": "200"}
    hub.head_trouble = {VAL: [429]}
    hub.trouble[train(1)] = [("status", 429), ("status", 503)]
    assert call(hub.url, tmp_path / "f", 1).returncode == 0
    assert waits == [200] * 3
    hub.refusal = {"Retry-After": in_an_hour()}
    hub.trouble[train(2)] = [("cut", 70_000), ("status", 429)]
    one_line(call(hub.url, tmp_path / "f", 2), 1, "status 429", "asks to wait 3", "HF_TOKEN")
    assert max(waits) <= 200
    assert received(tmp_path / "f", train(2)) == 70_000


def received(folder, name):
    """The bytes of an unfinished shard that have arrived in a folder."""
    return (folder / f"{name}.part").stat().st_size


def stalled(hub, folder, size, **options):
    """Start a download of 2 training shards whose shard 1 stalls after `size` bytes.

    Returns the process when exactly these have arrived and the others are complete."""
    hub.trouble[train(1)] = [("stall", size)]
    process = start(hub.url, folder, 2, **options)
    deadline = time.monotonic() + 30

    def is_stalled():
        others_complete = shards_in(folder) == [train(2), VAL]
        has_manifest = (folder / "manifest.json").exists()
        return others_complete and has_manifest and received(folder, train(1)) == size

    while not is_stalled():
        assert time.monotonic() < deadline and process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    return process


@pytest.mark.slow
def test_kill_then_resume_asks_for_the_rest_only(hub, tmp_path):
    out = tmp_path / "f"
    with stalled(hub, out, 1_000) as process:  # few enough to wait in a buffer, were there one
        process.send_signal(signal.SIGKILL)
    assert shards_in(out) == [train(2), VAL]
    hub.requests.clear()
    assert call(hub.url, out, 2).returncode == 0
    assert hub.ranges(train(1)) == ["bytes=1000-"]
    assert hub.ranges(train(2)) == hub.ranges(VAL) == []
    check_folder(out, hub, 2)


def test_part_of_another_content_is_not_continued(hub, tmp_path):
    out = tmp_path / "f"
    with stalled(hub, out, 123_456) as process:
        process.send_signal(signal.SIGKILL)
    hub.files[train(1)] = make_shard(99)
    hub.requests.clear()
    assert call(hub.url, out, 2).returncode == 0
    assert hub.ranges(train(1)) == [None]
    check_folder(out, hub, 2)


@pytest.mark.slow
def test_interrupt_is_one_line_and_resumes(hub, tmp_path):
    out = tmp_path / "f"
    process = stalled(hub, out, 50_000)
    process.send_signal(signal.SIGINT)
    process.out, process.err = process.communicate(timeout=30)
    one_line(process, 130, "run again")
    hub.requests.clear()
    assert call(hub.url, out, 2).returncode == 0
    assert hub.ranges(train(1)) == ["bytes=50000-"]
    check_folder(out, hub, 2)


def test_files_brought_by_another_tool_are_checked(hub, tmp_path):
    wrong = bytearray(hub.files[train(2)])
    wrong[5000] ^= 1
    (tmp_path / train(1)).write_bytes(hub.files[train(1)])
    (tmp_path / train(2)).write_bytes(wrong)
    (tmp_path / f"{train(1)}.part.json").write_text("{}")
    assert call(hub.url, tmp_path, 2).returncode == 0
    assert hub.ranges(train(1)) == [] and hub.ranges(train(2)) == [None]
    check_folder(tmp_path, hub, 2)


def damage(path):
    """Turn over one bit of a file."""
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)


def test_damaged_shards_are_fetched_again(hub, tmp_path):
    """They keep their size; also where fewer shards are asked for than are there."""
    assert call(hub.url, tmp_path, 3).returncode == 0
    damage(tmp_path / train(2))
    damage(tmp_path / VAL)
    told = "http://127.0.0.1:9", "HF_ENDPOINT", "./run.sh nano"  # a port at which nobody listens
    one_line(call("http://127.0.0.1:9", tmp_path, 3), 1, *told)  # they are not taken for sound
    hub.requests.clear()
    assert call(hub.url, tmp_path, 1).returncode == 0
    assert len(hub.ranges(VAL)) == len(hub.ranges(train(2))) == 1
    assert hub.ranges(train(1)) == hub.ranges(train(3)) == []
    check_folder(tmp_path, hub, 3)


def manifest_with(**changes):
    """The text of a manifest with one odd entry."""
    entry = {
        "file": train(1),
        "split": "train",
        "sha256": "0" * 64,
        "tokens": 200_000,
        "documents": 199,
    }
    return json.dumps({"shards": [entry | changes]})


@pytest.mark.parametrize(
    "manifest",
    [
        "[]",
        "5",
        "null",
        '"x"',
        "{}",
        "\xff",
        "[" * 100_000,
        '{"shards": 5}',
        '{"shards": [5, null, []]}',
        '{"shards": [{}]}',
        manifest_with(),
        manifest_with(file=5),
        manifest_with(file=["x"]),
        manifest_with(file="../../etc/passwd"),
        manifest_with(file="\0"),
        manifest_with(tokens="many"),
        manifest_with(tokens=None),
        manifest_with(tokens=1e300),
        manifest_with(sha256=None),
        manifest_with(file=train(1) + "\n"),
    ],
)
def test_odd_manifests(hub, tmp_path, manifest):
    """What they say is not relied on: every shard is looked at, and the manifest made anew."""
    (tmp_path / "manifest.json").write_text(manifest, encoding="latin-1")
    (tmp_path / train(1)).write_bytes(hub.files[train(1)])
    assert call(hub.url, tmp_path, 1).returncode == 0
    assert len(hub.ranges(VAL)) == 1 and hub.ranges(train(1)) == []
    check_folder(tmp_path, hub, 1)


def test_odd_files_in_the_folder(hub, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    one_line(call(hub.url, tmp_path / "loop", 1), 2, "loop", "--out")
    one_line(call(hub.url, tmp_path / "loop" / "f", 1), 2, "loop", "--out")
    out = tmp_path / "f"
    out.mkdir()
    (out / train(1)).symlink_to(train(1))
    (out / VAL).symlink_to("nowhere")
    os.mkfifo(out / "manifest.json")
    for name in ("manifest.json", f"{train(1)}.part.json"):
        (out / f"{name}.tmp").write_text("{")  # a kill before it took its name
    assert call(hub.url, out, 1).returncode == 0
    check_folder(out, hub, 1)
    assert not any(path.is_symlink() for path in out.iterdir())


NAMES = [b"two\nlines", b"caf\xe9", "caf\u00e9".encode(), b"esc\x1b[2J", "\u202eevil".encode()]
LOCALES = {
    "utf8": ({"PYTHONUTF8": "1"}, "utf-8"),
    "ascii locale": ({"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}, "ascii"),
    "ascii": ({"PYTHONIOENCODING": "ascii"}, "ascii"),
}


@pytest.mark.slow
@pytest.mark.parametrize("locale", LOCALES)
def test_names_that_a_terminal_cannot_show(hub, tmp_path, locale):
    """What main() prints is one printable line, whatever the folder is called.

    All folders are taken in one process."""
    variables, encoding = LOCALES[locale]
    program = PROGRAM.replace(
        "sys.exit(fineweb.main(sys.argv[1:]))",
        f"for out in sys.argv[1:]: fineweb.main(['1', '--revision', '{COMMIT}', '--out', out])",
    )
    outs = [os.fsencode(tmp_path) + b"/" + name for name in NAMES] * 2
    outs += [os.fsencode(tmp_path) + b"/file/" + name for name in NAMES]
    (tmp_path / "file").write_text("x")
    done = subprocess.run(
        [sys.executable, "-c", program, *outs],
        env=environment(hub.url, **variables),
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode(encoding).split("\n")
    told = done.stderr.decode(encoding).split("\n")
    assert len(shown) == 2 * len(NAMES) + 1
    for line in shown + told:
        assert line.isprintable(), line
    first_words = [line.split()[0] for line in told if line]
    expected = []
    for word in ("fetching", "checking", "error:"):
        expected += [word] * len(NAMES)
    assert first_words == expected


# ----- trouble that stays


def test_wrong_content_for_ever(hub, tmp_path):
    out = tmp_path / "f"
    hub.trouble[train(1)] = [("corrupt", None)] * 50
    one_line(call(hub.url, out, 1), 1, train(1), "wrong sha256", "HF_ENDPOINT")
    assert train(1) not in shards_in(out) and not list(out.glob(f"{train(1)}*"))
    assert hub.ranges(train(1)) == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "action",
    [
        ("status", 503),
        ("hang up", None),
        ("cut", 0),
        ("page", None),
        ("redirect", f"/content/{train(1)}"),
        ("redirect", "file:///etc/passwd"),
        ("redirect", "http://nowhere.invalid/"),
        ("redirect", "http://[::1"),
    ],
)
def test_giving_up(hub, tmp_path, action):
    out = tmp_path / "f"
    hub.trouble[train(1)] = [("cut", 70_000)] + [action] * 150
    one_line(call(hub.url, out, 1), 1, "gave up after 5 attempts", "HF_ENDPOINT", "./run.sh nano")
    assert train(1) not in shards_in(out)
    hub.trouble.clear()
    assert call(hub.url, out, 1).returncode == 0
    assert hub.ranges(train(1))[-1] == "bytes=70000-"  # what had arrived was worth keeping
    check_folder(out, hub, 1)


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "http://127.0.0.1:x",
        "ftp://127.0.0.1",
        "http://[",
        "http://127.0.0.1\nx",
        "http://\x1b[2J",
        "",
    ],
)
def test_endpoint_that_is_no_address(tmp_path, url):
    one_line(call(url, tmp_path / "f", 1), 1, "HF_ENDPOINT")


def test_a_token_that_is_no_header(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_t\u00f6ken")
    process = call(hub.url, tmp_path / "f", 1)
    one_line(process, 1, "HF_TOKEN")
    assert "ken" not in process.err.replace("HF_TOKEN", "")  # it is a secret


@pytest.mark.slow
def test_offline_mode_is_named(hub, tmp_path):
    process = run(hub.url, tmp_path / "f", 1, variables={"HF_HUB_OFFLINE": "1"})
    one_line(process, 1, "HF_HUB_OFFLINE")


@pytest.mark.parametrize(
    "status, words", [(404, ["404", "--revision"]), (403, ["403", "HF_TOKEN"])]
)
def test_refusals_are_not_repeated(hub, tmp_path, status, words):
    hub.head_trouble[train(1)] = [status] * 50
    one_line(call(hub.url, tmp_path / "f", 1), 1, *words)
    assert len(hub.head_trouble[train(1)]) == 49
    hub.head_trouble.clear()
    hub.trouble[train(1)] = [("cut", 70_000)] + [("status", status)] * 50
    one_line(call(hub.url, tmp_path / "f", 1), 1, *words)
    assert hub.ranges(train(1)) == [None, "bytes=70000-"]
    assert train(1) not in shards_in(tmp_path / "f")
    assert received(tmp_path / "f", train(1)) == 70_000  # for a later call


A_LOGIN = {
    "X-Linked-Size": None,
    "X-Linked-Etag": None,
    "X-Repo-Commit": None,
    "ETag": None,
    "Location": "http://localhost:9/login.html",
}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"X-Repo-Commit": "e" * 40}, ["e" * 40, COMMIT]),
        ({"X-Repo-Commit": None}, ["commit None", "mirror"]),
        ({"X-Linked-Etag": '"0123"'}, ["no size and sha256", "0123"]),
        ({"X-Linked-Size": "many"}, ["no size and sha256"]),
        ({"X-Linked-Size": "-5"}, ["no size and sha256"]),
        (A_LOGIN, ["no size and sha256"]),
        ({"Location": "http://[::1"}, ["HF_ENDPOINT"]),
        ({"Location": "http://a:b:c"}, ["HF_ENDPOINT"]),
    ],
)
def test_metadata_that_cannot_be_trusted(hub, tmp_path, changes, words):
    hub.head_changes = changes
    one_line(call(hub.url, tmp_path / "f", 1), 1, *words)
    assert not shards_in(tmp_path / "f")


def test_another_validation_shard_at_the_pinned_commit(hub, tmp_path):
    hub.head_changes = {"X-Repo-Commit": fineweb.REVISION}
    process = call(hub.url, tmp_path / "f", 1, revision=None)
    one_line(process, 1, fineweb.VAL_SHA256[:12], "validation shard")
    assert not shards_in(tmp_path / "f")


@pytest.mark.parametrize("content", [b"<html>", make_shard(1)[:-2], b"\0" * 2048])
def test_what_the_hub_offers_is_no_shard(hub, tmp_path, content):
    hub.files[train(1)] = content
    one_line(call(hub.url, tmp_path / "f", 1), 1, train(1), "no token shard")
    assert train(1) not in shards_in(tmp_path / "f")


# ----- disk, other processes, arguments


@pytest.mark.slow
def test_full_disk_is_said_before_and_during(hub, tmp_path):
    import resource

    out = tmp_path / "f"
    limits = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    process = run(hub.url, out, 1, "--workers", 1, preexec_fn=limits)
    one_line(process, 1, "File too large", "free some space")
    assert not shards_in(out)
    assert call(hub.url, out, 1).returncode == 0
    assert hub.ranges(VAL) == [None, "bytes=100000-"]  # continues with what fitted
    check_folder(out, hub, 1)
    hub.head_changes = {"X-Linked-Size": 10**17}
    one_line(call(hub.url, out, 3), 1, f"{2 * 10**17:,}", "free", "--out")
    assert len(hub.ranges(train(2))) == 0


def test_two_downloads_into_one_folder(hub, tmp_path):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one_line(call(hub.url, tmp_path, 1), 1, "another download", "wait")
    assert hub.requests == []
    assert call(hub.url, tmp_path, 1).returncode == 0


def test_a_download_that_ends_before_the_second_begins(hub, tmp_path, monkeypatch):
    """The second one reads the manifest only when it has the folder for itself."""
    lock = fcntl.flock

    def after_another(*arguments):
        monkeypatch.setattr(fineweb.fcntl, "flock", lock)
        assert call(hub.url, tmp_path / "f", 3).returncode == 0
        return lock(*arguments)

    monkeypatch.setattr(fineweb.fcntl, "flock", after_another)
    assert call(hub.url, tmp_path / "f", 1).returncode == 0
    check_folder(tmp_path / "f", hub, 3)


@contextlib.contextmanager
def nobody():
    """Permissions bind even where the tests run as root, who may do anything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folder_that_cannot_be_written_to(hub):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are not for other users
        out = Path(folder)
        assert call(hub.url, out, 1).returncode == 0
        (out / ".lock").unlink()
        out.chmod(0o555)
        hub.requests.clear()
        with nobody():
            assert call(hub.url, out, 1).returncode == 0  # it is complete
            one_line(call(hub.url, out, 2), 2, "Permission denied", "--out")
        assert hub.ranges(train(2)) == []
        out.chmod(0o755)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["0"], ["SHARDS 0", "between 1 and 103"]),
        (["104"], ["SHARDS 104", "between 1 and 103"]),
        (["-3"], ["SHARDS -3", "between 1 and 103"]),
        (["many"], ["SHARDS", "many"]),
        (["1", "--workers", "0"], ["--workers 0", "between 1 and 32"]),
        (["1", "--revision", "v2"], ["--revision v2", "commit hash"]),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(hub, tmp_path, arguments, words):
    out = tmp_path / "f"
    process = call(hub.url, out, *arguments, revision=None)
    one_line(process, 2, *words)
    assert hub.requests == [] and not out.exists()


def test_folder_that_cannot_be_made(hub, tmp_path):
    one_line(call(hub.url, "/proc/nobody/f", 1), 2, "/proc/nobody", "--out")
    (tmp_path / "file").write_text("x")
    one_line(call(hub.url, tmp_path / "file", 1), 2, "file", "--out")
