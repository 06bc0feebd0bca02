"""sample.py: continuations and validation losses of what runs have left."""

import numpy as np
import pytest
import torch

import sample
import train_gpt
from helpers import EOT, content_of, make_corpus, make_trainer, refusal


@pytest.fixture
def use(cli):
    """use(*words): sample.py's command line in this process."""
    return lambda *words: cli(*words, main=sample.main)


@pytest.fixture(scope="module")
def path(rich_run):
    return rich_run.folder / "checkpoint.pt"


def test_eval_reproduces_the_losses_of_a_run(rich_run, path, use, tmp_path):
    """On the way, at its end, and with a corpus that has fewer training tokens than a run needs."""
    loss, sha = rich_run.result["val_loss"], rich_run.result["val_sha256"]
    run = use("--checkpoint", path, "--eval")
    assert run.stdout == f"eval val_loss:{loss:.5f} val_tokens:1024 val_sha256:{sha}\n"
    run = use("--checkpoint", rich_run.folder / "step_000010.pt", "--eval", "--device", "cpu")
    assert run.stdout.startswith(f"eval val_loss:{rich_run.val_losses[10]:.5f} ")
    small = make_corpus(tmp_path / "small", train_tokens=4_000, shards=1)
    run = use("--checkpoint", path, "--eval", "--data", small)
    assert run.code == 0 and run.stdout.startswith(f"eval val_loss:{loss:.5f} "), run.stdout


def greedy(checkpoint, prompt, count):
    """The most probable continuation, by the forward pass that validation takes, with the weights
    that the run's own trainer would restore."""
    content = train_gpt.load_checkpoint(checkpoint)
    config = content["config"]
    trainer = train_gpt.Trainer(config, train_gpt.Runtime("cpu"))
    train_gpt.restore(trainer, content)
    tokens = [EOT, *prompt]
    for _ in range(count):
        low = max(0, len(tokens) - config.val_batch_tokens)
        filled = np.zeros(low + config.val_batch_tokens + 1, dtype=np.uint16)
        filled[: len(tokens)] = tokens
        _, hidden = trainer.score(content["step"], train_gpt.Text(filled, EOT), low)
        tokens.append(trainer.model.logits(hidden[len(tokens) - 1 - low]).argmax().item())
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


def test_sample_draws_by_its_seed(path, use):
    def drawn(seed):
        words = ["--prompt", "def f(", "--tokens", 12, "--temperature", 1.5, "--seed", seed]
        run = use("--checkpoint", path, *words)
        assert run.code == 0 and run.stdout.startswith("def f("), run.stdout
        return run.stdout

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in (1, 2, 3)}) > 1


@pytest.mark.parametrize("task", [["--eval"], ["--tokens", 3, "--temperature", 0]], ids=str)
def test_a_model_that_predicts_nothing_finite_is_refused(task, use, tmp_path, corpus):
    trainer = make_trainer(data=str(corpus))
    trainer.model.residual_scale.data.fill_(3e38)
    content_of(trainer, 2, tmp_path)
    line = refusal(use("--checkpoint", tmp_path / "checkpoint.pt", *task))
    assert "finite" in line or "nan" in line


# ----- bad input

BAD_WORDS = [
    (["--eval"], "--checkpoint"),
    (["--checkpoint", "nowhere.pt", "--eval"], "nowhere.pt: no such checkpoint"),
    (["--checkpoint", "x.pt", "--steps", "5"], "--steps"),
    (["--checkpoint", "x.pt", "--prompt", "x", "--eval"], "--prompt"),
    (["--checkpoint", "x.pt", "--tokens", "0"], "--tokens 0"),
    (["--checkpoint", "x.pt", "--temperature", "nan"], "--temperature nan"),
    (["--checkpoint", "x.pt", "--seed", "-1"], "--seed -1"),
]


@pytest.mark.parametrize("words, hint", BAD_WORDS, ids=lambda words: " ".join(words))
def test_bad_words_end_in_one_line_and_status_2(words, hint, use, tmp_path):
    assert hint in refusal(use(*words))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--device", "cuda"], ["--eval", "--data", "gone"]], ids=str)
def test_what_a_checkpoint_cannot_be_used_on(words, path, use):
    if torch.cuda.is_available() and "cuda" in words:
        pytest.skip("CUDA is here, so asking for it is no mistake")
    assert words[-1] in refusal(use("--checkpoint", path, *words))
