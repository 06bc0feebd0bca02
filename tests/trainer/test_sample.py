"""sample.py: continuations and validation losses of what runs have left."""

import base64
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import continual
import sample
import train_gpt
from helpers import EOT, content_of, make_corpus, make_trainer, refusal, tiny_config, with_manifest


@pytest.fixture
def use(cli):
    """use(*words): sample.py's command line in this process."""
    return lambda *words: cli(*words, main=sample.main)


@pytest.fixture(scope="module")
def path(rich_run):
    return rich_run.folder / "checkpoint.pt"


def test_eval_reproduces_the_losses_of_a_run(rich_run, path, use, tmp_path, monkeypatch):
    """By its id, folder or file; on the way and at its end. A corpus with less text to validate on,
    or to train on, is scored as far as it goes."""
    loss, sha = float(rich_run.result["val_loss"]), rich_run.result["val_sha256"]
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine").symlink_to(rich_run.folder)
    make_corpus(tmp_path / "small", train_tokens=4_000, val_tokens=600, shards=1)
    for name in (path, "mine", "logs/mine", "~/logs/mine", "~/logs/mine/checkpoint.pt"):
        run = use("--checkpoint", name, "--eval")
        assert run.stdout == f"eval val_loss:{loss:.5f} val_tokens:1024 val_sha256:{sha}\n"
    run = use("--checkpoint", rich_run.folder / "step_000010.pt", "--eval", "--device", "cpu")
    assert run.stdout.startswith(f"eval val_loss:{rich_run.val_losses[10]:.5f} ")
    assert " val_tokens:512 " in use("--checkpoint", "mine", "--eval", "--data", "~/small").stdout
    none = make_corpus(tmp_path / "none", val_tokens=100)
    assert "add text" in refusal(use("--checkpoint", "mine", "--eval", "--data", none))


def test_a_corpus_that_was_built_again_is_refused_unless_it_is_named(rich_run, use, tmp_path):
    """As is one that has been moved; what is named is scored, whatever it is."""
    corpus = make_corpus(tmp_path / "corpus")
    content = rich_run.checkpoint()
    content["config"]["data"] = str(corpus)
    train_gpt.save_checkpoint(tmp_path / "checkpoint.pt", content)
    words = ["--checkpoint", tmp_path / "checkpoint.pt", "--eval"]
    honest = use(*words)
    assert honest.code == 0, honest.stdout
    make_corpus(corpus, val_tokens=5_000)
    line = refusal(use(*words))
    assert f"{corpus}: the corpus is not the one that the run has read" in line and "--data" in line
    assert use(*words, "--data", corpus).stdout == honest.stdout  # its first tokens are the same
    corpus.rename(tmp_path / "moved")
    assert str(corpus) in refusal(use(*words))
    assert use(*words, "--data", tmp_path / "moved").code == 0


def test_a_vocabulary_that_is_not_the_models_is_refused(path, use, tmp_path):
    vocabulary = b"".join(b"%b %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256))
    (tmp_path / "v.tiktoken").write_bytes(vocabulary)
    sha256 = train_gpt.file_sha256(tmp_path / "v.tiktoken")
    row = {"file": "v.tiktoken", "sha256": sha256, "pattern": "."}
    manifest = {"vocab_size": 301, "eot_token": 300, "shards": [], "vocabulary": row}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert f"--data {tmp_path}" in refusal(use("--checkpoint", path, "--data", tmp_path))
    config = tiny_config(data=str(tmp_path), tokenizer="v.tiktoken")
    assert sample.tokenizer_of(config).eot_token == 256
    with pytest.raises(train_gpt.ConfigError, match="another number of pieces"):
        sample.tokenizer_of(dataclasses.replace(config, vocab_size=384, eot_token=300))
    known = train_gpt.read_manifest(tmp_path)["sha256"]
    assert sample.tokenizer_of(config, known).eot_token == 256
    with pytest.raises(train_gpt.ConfigError, match="it was built again.*name with --data"):
        sample.tokenizer_of(config, "0" * 64)
    (tmp_path / "v.tiktoken").unlink()
    with pytest.raises(train_gpt.ConfigError, match="its file is missing"):
        sample.tokenizer_of(config)


def test_a_vocabulary_is_known_by_its_content(rich_run, path, use, tmp_path):
    """Whatever its file is called, and where none is there by what is known of its tokens."""
    corpus = make_corpus(tmp_path / "c", val_tokens=1_100)
    own = {"sha256": "1" * 64, "pattern": "a"}
    content = rich_run.checkpoint()
    content["vocabulary_sha256"] = hashlib.sha256(json.dumps([*own.values()]).encode()).hexdigest()
    train_gpt.save_checkpoint(tmp_path / "own.pt", content)
    words = ["--data", corpus, "--checkpoint"]
    with_manifest(corpus, vocabulary={**own, "file": "w"}, tokenizer="w")
    assert use(*words, tmp_path / "own.pt", "--eval").code == 0
    others = [{"vocabulary": own | {name: "2" * 64}} for name in own]
    for fields in (*others, {"tokenizer": "x"}, {"token_bytes": [2] * 256 + [0]}):
        with_manifest(corpus, **fields)
        for checkpoint, task in ((path, "--eval"), (tmp_path / "own.pt", "--prompt=a")):
            line = refusal(use(*words, checkpoint, task))
            assert f"--data {corpus}: has another vocabulary" in line


def test_another_script_is_told(rich_run, path, use, tmp_path):
    content = {**rich_run.checkpoint(), "code_sha256": "5" * 64}
    train_gpt.save_checkpoint(tmp_path / "checkpoint.pt", content)
    run = use("--checkpoint", tmp_path / "checkpoint.pt", "--eval")
    told = f"trained by another train_gpt.py, code_sha256:{'5' * 64}; losses may differ"
    assert run.stderr == f"note: {tmp_path}/checkpoint.pt: {told}\n" and run.code == 0
    assert run.stdout == use("--checkpoint", path, "--eval").stdout
    assert use("--checkpoint", path, "--eval").stderr == ""


def greedy(checkpoint, prompt, count):
    """The most probable continuation, by the forward pass that validation takes, with the weights
    that the run's own trainer would restore."""
    content = train_gpt.find_checkpoint(checkpoint)
    config = content["config"]
    trainer = train_gpt.Trainer(config, train_gpt.Runtime("cpu"))
    train_gpt.restore(trainer, content)
    tokens = [EOT, *prompt]
    for _ in range(count):
        low = max(0, len(tokens) - config.val_batch_tokens)
        filled = np.zeros(low + config.val_batch_tokens + 1, dtype=np.uint16)
        filled[: len(tokens)] = tokens
        _, states = trainer.score(content["step"], filled, low)
        state = states.at([len(tokens) - 1 - low])
        tokens.append(trainer.model.logits(state).argmax().item())
        if tokens[-1] == EOT:
            break
    return bytes(token for token in tokens if token != EOT).decode(errors="replace")


LONG = "zyxw!" + bytes(range(32, 127)).decode() * 4 + "zyxw"


@pytest.mark.parametrize("prompt", ["import os", "", "é", LONG])
def test_sample_continues_a_prompt(prompt, use, tmp_path):
    """With random weights, so that every token of the context counts; the last prompt is longer
    than the context, and what is copied at its end stands before that."""
    content_of(make_trainer(copy_orders=(4,), copy_reach=1000), 2, tmp_path)
    path = tmp_path / "checkpoint.pt"
    run = use("--checkpoint", path, "--prompt", prompt, "--tokens", 8, "--temperature", 0)
    assert run.code == 0, run.stdout
    assert run.stdout == greedy(path, prompt.encode(), 8) + "\n"


def test_samples_and_top_k(path, use):
    """The seeds of several samples follow each other, and the likeliest token is the top one."""

    def drawn(*more):
        words = ["--checkpoint", path, "--tokens", 12, "--temperature", 1.5]
        return use(*words, *more).stdout

    singles = [drawn("--prompt", "def é(", "--seed", seed) for seed in (4, 5)]
    assert singles[0] != singles[1]
    expected = "".join(f"--- sample {i} of 2\n{one}" for i, one in enumerate(singles, start=1))
    assert drawn("--prompt", "def é(", "--seed", 4, "--samples", 2) == expected
    likeliest = drawn("--temperature", 0)
    assert drawn("--top-k", 1) == likeliest not in (drawn(), drawn("--top-k", 5))
    assert drawn("--temperature", 1e-300) == likeliest


def test_each_line_that_is_typed_is_a_prompt(path, use, monkeypatch):
    """By itself, as if it were --prompt; the end of the input ends all."""
    words = ["--checkpoint", path, "--tokens", 6, "--seed", 3]
    alone = [use(*words, "--prompt", text).stdout for text in ("def é(", "", "b")]
    monkeypatch.setattr("sys.stdin", io.StringIO("def é(\n\nb"))
    typed = use(*words, "--interactive")
    assert typed.code == 0 and typed.stdout == "".join(alone)
    assert "not allowed with" in refusal(use(*words, "--interactive", "--eval"))


def test_a_line_that_is_no_utf8_is_continued(path, use):
    """As its bytes, like --prompt, whatever Python is told to do with such."""
    words = ["--checkpoint", str(path), "--tokens", "2"]
    typed = subprocess.run(
        [sys.executable, sample.__file__, *words, "--interactive"],
        input=b"caf\xe9\n",
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
    )
    told = use(*words, "--prompt", "caf\udce9").stdout
    assert (typed.returncode, typed.stdout.decode()) == (0, told), typed.stderr
    assert told.startswith("caf\\udce9")


def test_text_streams_in_whole_characters(path, use, monkeypatch):
    """A byte at a time, what is shown so far is text; a cut character ends as a replacement."""
    shown = []
    tokens = [*"é😀".encode(), *"€".encode()[:2]]
    monkeypatch.setattr(sample, "continuation", lambda *arguments: iter(tokens))
    monkeypatch.setattr(sample, "show", shown.append)
    use("--checkpoint", path, "--prompt", "a")
    assert shown == ["a", "", "é", "", "", "", "😀", "", "", "\ufffd\n"]


def test_a_reader_that_is_gone_is_told_on_stderr_and_a_closed_console_ends_nothing(
    path, use, monkeypatch
):
    monkeypatch.setattr("sys.stdout", None)
    assert use("--checkpoint", path, "--tokens", 2).code == 0
    monkeypatch.setattr("sys.stdout", open("/dev/full", "w"))
    run = use("--checkpoint", path, "--tokens", 2)
    assert run.code == 2 and run.stderr.startswith("status:error [Errno 28] No space")


@pytest.mark.parametrize("task", [["--eval"], ["--tokens", 3, "--temperature", 0]], ids=str)
def test_a_model_that_predicts_nothing_finite_is_refused(task, use, tmp_path, corpus):
    trainer = make_trainer(data=str(corpus))
    trainer.model.blocks[0].output_scale.data.fill_(3e38)
    content_of(trainer, 2, tmp_path)
    line = refusal(use("--checkpoint", tmp_path / "checkpoint.pt", "--data", corpus, *task))
    assert "finite" in line or "nan" in line


@pytest.mark.parametrize("words", ["--checkpoint x.pt", "--samples 0", "--temperature inf"])
def test_bad_words_end_in_one_line_and_status_2(words, use):
    assert words in refusal(use("--checkpoint", "nowhere.pt", *words.split()))
    assert "--prompt" in refusal(use("--checkpoint", "x.pt", "--prompt", "x", "--eval"))


@pytest.mark.parametrize("script", [sample, continual])
def test_help_does_without_docstrings(script, capsys, monkeypatch):
    """As python -OO has it."""
    monkeypatch.setattr(script, "__doc__", None)
    with pytest.raises(SystemExit, match="0"):
        script.main(["--help"])
    out = capsys.readouterr().out
    assert "usage: " in out and "None\n" not in out


def test_ids_that_no_token_has_are_never_next():
    tokens = np.array([EOT, *b"to be or not to be"], np.uint16)
    logits = sample.next_token_logits(make_trainer(vocab_size=384), 4, tokens)
    assert logits.shape == (EOT + 1,)
    assert logits.exp().sum().item() == pytest.approx(1)


def test_too_little_memory_is_one_line(path, use, monkeypatch):
    """torch's own error, which only its words tell from others."""
    monkeypatch.setattr(train_gpt.Trainer, "evaluate", lambda *_: torch.empty(2**60))
    run = use("--checkpoint", path, "--eval")
    assert run.code == 1 and run.stdout.count("\n") == 1 and "Traceback" not in run.stderr
    assert run.stdout.startswith("status:oom ") and "can't allocate memory" in run.stdout
