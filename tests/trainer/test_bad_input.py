"""What a user can get wrong: one clear line, the nearest valid name, exit status 2, nothing written."""
import subprocess
import sys

import numpy as np
import pytest
import torch

from helpers import EOT, TRAINER, environment, make_corpus, refusal, with_manifest, write_shard

BAD_WORDS = [
    (["--micro-batch-token", "256"], "micro_batch_tokens"),
    (["--lerning_rate", "1"], "--lerning_rate"),
    (["--adam_rl", "0.1"], "adam_lr"),
    (["--track", "fineweeb"], "did you mean fineweb"),
    (["--steps"], "missing"),
    (["steps", "5"], "--key value"),
    (["--", "5"], "no such key"),
    (["--steps", "ten"], "int"),
    (["--steps", "1e3"], "int"),
    (["--adam-lr", "fast"], "float"),
    (["--compile", "maybe"], "bool"),
    (["--windows", "(64"], "tuple"),
    (["--windows", "64"], "windows"),
    (["--long-layers", "('a',)"], "long_layers"),
    (["--long-layers", "{[]}"], "long_layers"),
    (["--long-layers", "([1],)"], "long_layers"),
    (["--micro-batches", "(4, 8)"], "micro_batches"),
    (["--micro-batches", "((0, 2), 5)"], "micro_batches"),
    (["--micro-batches", "((0, 2), ('a', 4))"], "micro_batches"),
    (["--micro-batches", "((0.0, 4), (0.5,))"], "micro_batches=((0.0, 4), (0.5,)): a schedule is (fraction, value)"),
    (["--micro-batches", "()"], "micro_batches"),
    (["--micro-batches", "[4]"], "micro_batches"),
    (["--ngram-orders", "(2.0,)"], "ngram_orders"),
    (["--run-of", "3/8"], "run_of=3/8"),
    (["--init-from", "mine"], "no such key"),  # of the continual track's script
    (["--mtp-weights", "('a',)"], "mtp_weights"),
    (["--momentum", "('a', 'b')"], "momentum"),
    (["--steps", "0"], "steps=0"),
    (["--head-dim", "24"], "head_dim=24"),
    (["--ngram-comms", "shards"], "replicated, sharded"),
    (["--ngram-host", "true"], "--ngram-comms sharded"),
    (["--ngram-decay", "10"], "ngram_lr=0.1"),
    (["--ngram-decay", "-1"], "ngram_decay=-1"),
    (["--adam-every", "0"], "adam_every=0"),
    (["--adam-every", "3", "--save-every", "4"], "adam_every=3"),
    (["--ngram-every", "2"], "no such key"),  # gone, as the next one
    (["--matrix-shard", "rows"], "no such key"),
    (["--ngram-orders", "(2, 2)"], "distinct, from 2 to 32"),
    (["--ngram-orders", "(1, 2)"], "distinct, from 2 to 32"),
    (["--ngram-rows", "2147483648"], "1 to 2^31 - 1"),
]


@pytest.mark.parametrize("words, hint", BAD_WORDS, ids=[" ".join(case[0]) for case in BAD_WORDS])
def test_bad_words_end_in_one_line_and_status_2(words, hint, cli, tmp_path):
    run = cli(*words)
    line = refusal(run)
    assert hint in line
    assert not list(tmp_path.iterdir())


def test_an_unknown_key_in_a_real_process(tmp_path):
    done = subprocess.run([sys.executable, str(TRAINER), "--adam_rl", "1"], cwd=tmp_path, env=environment(),
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout.startswith("status:error ") and done.stdout.count("\n") == 1
    assert "adam_lr" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words, hint", [
    (["sample", "--prompt", "x"], "sample: arguments come as --key value"),
    (["--resume", "never"], "never"),
    (["--check", "--stepz", "5"], "steps"),
    (["--check", "5"], "--key value"),
], ids=str)
def test_bad_commands_end_in_one_line_and_status_2(words, hint, cli, tmp_path):
    line = refusal(cli(*words))
    assert hint in line
    assert not list(tmp_path.iterdir())


def test_an_unknown_update_rule_is_refused(cli, tiny, tmp_path):
    line = refusal(cli(**{**tiny, "matrix_update": "moun"}))
    assert "matrix_update=moun" in line and "muon, soap" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so asking for it is no mistake")
@pytest.mark.parametrize("words", [[], ["--check"]], ids=str)
def test_asking_for_cuda_where_there_is_none(words, cli, tiny, tmp_path):
    run = cli(*words, **{**tiny, "device": "cuda"})
    line = refusal(run)
    assert "--device cpu" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the back end exists here")
def test_asking_for_an_attention_back_end_that_is_not_there(cli, tiny):
    run = cli(**{**tiny, "attention": "varlen"})
    line = refusal(run)
    assert "--attention sdpa" in line


def test_a_run_id_that_exists_is_refused(cli, tiny, tmp_path):
    folder = tmp_path / "logs" / "mine"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("precious")
    run = cli(**{**tiny, "run_id": "mine"})
    line = refusal(run)
    assert "logs/mine" in line and "--resume mine" in line and "--run-id" in line
    assert (folder / "log.txt").read_text() == "precious" and len(list(folder.iterdir())) == 1


def test_a_place_that_cannot_be_written_to_is_an_error(cli, tiny, tmp_path):
    (tmp_path / "logs").write_text("a file, not a folder")
    run = cli(**{**tiny, "run_id": "mine"})
    assert run.code in (1, 2)
    assert len(run.lines) == 1 and run.lines[0].startswith("status:error ") and "logs" in run.lines[0]


def test_a_corpus_of_very_short_documents_is_trained_on(cli, tiny, tmp_path):
    """There is always room for the bounds of as many documents as come."""
    folder = make_corpus(tmp_path / "corpus")
    write_shard(folder / "tiny_train_000000.bin", np.tile([EOT, 65, 66], 20_000))
    with_manifest(folder)
    run = cli(**{**tiny, "data": str(folder), "run_id": "short"})
    assert run.code == 0 and run.lines[-1].startswith("status:ok "), run.stdout
