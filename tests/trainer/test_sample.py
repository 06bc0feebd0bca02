"""sample.py: continuations and validation losses of what runs have left."""

import numpy as np
import pytest
import torch

import sample
import train_gpt
from helpers import EOT, make_corpus, make_trainer, refusal


@pytest.fixture
def use(cli):
    """use(*words): sample.py's command line in this process."""
    return lambda *words: cli(*words, main=sample.main)


@pytest.fixture(scope="module")
def path(rich_run):
    return rich_run.folder / "checkpoint.pt"


def save(trainer, path):
    content = train_gpt.checkpoint_content(trainer, 2, train_gpt.TrainLoader.START, 0.0)
    train_gpt.save_checkpoint(path, content)
    return path


# ----- the validation loss


def test_eval_reproduces_the_final_loss(rich_run, path, use):
    run = use("--checkpoint", path, "--eval")
    loss, val_sha256 = rich_run.result["val_loss"], rich_run.result["val_sha256"]
    assert run.code == 0
    assert run.stdout == f"eval val_loss:{loss:.5f} val_tokens:1024 val_sha256:{val_sha256}\n"


def test_eval_of_a_checkpoint_on_the_way(rich_run, use):
    run = use("--checkpoint", rich_run.folder / "step_000010.pt", "--eval", "--device", "cpu")
    assert run.code == 0
    assert run.stdout.startswith(f"eval val_loss:{rich_run.val_losses[10]:.5f} ")


def test_eval_on_another_corpus_wants_validation_tokens_alone(rich_run, path, use, tmp_path):
    """A whole run would need more training tokens than this corpus has."""
    corpus = make_corpus(tmp_path / "small", train_tokens=4_000, shards=1)
    run = use("--checkpoint", path, "--eval", "--data", corpus)
    assert run.code == 0, run.stdout
    assert run.stdout.startswith(f"eval val_loss:{rich_run.result['val_loss']:.5f} ")


# ----- continuations


def greedy(checkpoint, prompt, count):
    """The most probable continuation, by the forward pass that validation takes, with the weights
    that the run's own trainer would restore."""
    content = train_gpt.load_checkpoint(checkpoint)
    config = train_gpt.config_of_checkpoint(content)
    trainer = train_gpt.Trainer(config, train_gpt.Runtime("cpu"))
    train_gpt.restore(trainer, content)
    tokens = [EOT, *prompt]
    for _ in range(count):
        low = max(0, len(tokens) - config.val_batch_tokens)
        filled = np.zeros(low + config.val_batch_tokens + 1, dtype=np.uint16)
        filled[: len(tokens)] = tokens
        _, hidden = trainer.score(content["step"], train_gpt.Text(filled, config), low)
        tokens.append(trainer.model.logits(hidden[len(tokens) - 1 - low]).argmax().item())
        if tokens[-1] == EOT:
            break
    return bytes(token for token in tokens if token != EOT).decode(errors="replace")


LONG = "zyxw!" + bytes(range(32, 127)).decode() * 4 + "zyxw"


@pytest.mark.parametrize("prompt", ["import os", "", "é", LONG])
def test_sample_continues_a_prompt(prompt, use, tmp_path):
    """With random weights, so that every token of the context counts; the last prompt is longer
    than the context, and what is copied at its end stands before that."""
    path = save(make_trainer(copy_orders=(4,), copy_reach=1000), tmp_path / "random.pt")
    run = use("--checkpoint", path, "--prompt", prompt, "--tokens", 8, "--temperature", 0)
    assert run.code == 0, run.stdout
    assert run.stdout == greedy(path, prompt.encode(), 8) + "\n"


@pytest.mark.parametrize(
    "task", [["--eval"], ["--tokens", 3], ["--tokens", 3, "--temperature", 0]], ids=str
)
def test_a_model_that_predicts_nothing_finite_is_refused(task, use, tmp_path, corpus):
    trainer = make_trainer(data=str(corpus))
    trainer.model.residual_scale.data.fill_(3e38)
    run = use("--checkpoint", save(trainer, tmp_path / "huge.pt"), *task)
    assert "finite" in refusal(run) or "nan" in refusal(run)


def test_sample_draws_by_its_seed(path, use):
    def drawn(seed):
        words = ["--prompt", "def f(", "--tokens", 12, "--temperature", 1.5, "--seed", seed]
        run = use("--checkpoint", path, *words)
        assert run.code == 0 and run.stdout.startswith("def f("), run.stdout
        return run.stdout

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in (1, 2, 3)}) > 1


def test_a_trained_model_starts_a_document(path, use):
    run = use("--checkpoint", path, "--tokens", 5, "--temperature", 0)
    assert run.code == 0 and run.stdout == greedy(path, b"", 5) + "\n"


# ----- bad input

BAD_WORDS = [
    (["--eval"], "--checkpoint"),
    (["--checkpoint", "nowhere.pt", "--eval"], "nowhere.pt"),
    (["--checkpoint", ".", "--eval"], "no such checkpoint"),
    (["--chekpoint", "x.pt", "--eval"], "--checkpoint"),
    (["--checkpoint", "x.pt", "--steps", "5"], "--steps"),
    (["--checkpoint", "x.pt", "--prompt"], "--prompt"),
    (["--checkpoint", "x.pt", "--prompt", "x", "--eval"], "--prompt"),
    (["--checkpoint", "x.pt", "--prompt", "x", "--data", "y"], "--data y"),
    (["--checkpoint", "x.pt", "--tokens", "many"], "--tokens"),
    (["--checkpoint", "x.pt", "--tokens", "0"], "--tokens 0"),
    (["--checkpoint", "x.pt", "--temperature", "-1"], "--temperature -1"),
    (["--checkpoint", "x.pt", "--temperature", "nan"], "--temperature nan"),
    (["--checkpoint", "x.pt", "--seed", "-1"], "--seed -1"),
    (["--checkpoint", "x.pt", "--device", "tpu"], "tpu"),
    (["checkpoint.pt"], "checkpoint"),
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


def test_help_tells_of_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        sample.main(["--help"])
    assert ended.value.code == 0
    assert "--temperature" in capsys.readouterr().out
