"""Chapter 1: fields, parsing, refusals; importing the file does nothing."""
import ast
import dataclasses
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import train_gpt
from helpers import TRAINER, environment, refusal, tiny_config
from train_gpt import Config, ConfigError, TRACKS, config_from

FIELDS = dataclasses.fields(Config)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_field_has_help_and_is_listed(field, cli):
    assert len(field.metadata["help"]) > 10
    line, = (line for line in cli("--help").lines if line.strip().startswith(f"--{field.name.replace('_', '-')} "))
    assert field.metadata["help"] in line
    assert ("schedule: " in line) == field.metadata["schedule"]
    assert line.endswith(f"[{getattr(TRACKS['nano'], field.name)}]")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--track", "fineweb", "--help"]])
def test_help_ends_with_status_0_and_names_the_tracks(words, cli):
    run = cli(*words)
    assert run.code == 0
    assert all(track in run.stdout for track in TRACKS)


@pytest.mark.parametrize("key, text, value", [
    ("steps", "7", 7),
    ("seed", "-1", -1),
    ("matrix_lr", "0.5", 0.5),
    ("matrix_lr", "1e-3", 1e-3),
    ("matrix_decay", "0", 0.0),
    ("data", "some/where", "some/where"),
    ("compile", "false", False),
    ("compile", "False", False),
    ("compile", "0", False),
    ("compile", "true", True),
    ("compile", "1", True),
    ("long_layers", "2", (2,)),
    ("long_layers", "(0, 2)", (0, 2)),
    ("long_layers", "()", ()),
    ("ngram_orders", "()", ()),
    ("ngram_orders", "2,3", (2, 3)),
    ("momentum", "(0.8, 0.9)", (0.8, 0.9)),
    ("micro_batches", "6", ((0.0, 6),)),
    ("micro_batches", "((0.0, 2), (0.5, 4))", ((0.0, 2), (0.5, 4))),
    ("document_cap", "64", ((0.0, 64),)),
    ("windows", "(64, 256)", ((0.0, (64, 256)),)),
    ("windows", "((0, (64, 128)), (0.5, (128, 256)))", ((0, (64, 128)), (0.5, (128, 256)))),
    ("mtp_weights", "(1.0, 0.5)", ((0.0, (1.0, 0.5)),)),
])
def test_overrides_are_parsed_by_the_type_of_their_field(key, text, value):
    config, _ = config_from({"num_layers": "3", key: text})
    assert getattr(config, key) == value
    assert type(getattr(config, key)) is type(value)


def test_only_values_that_differ_from_the_track_are_overrides():
    nano = TRACKS["nano"]
    config, overrides = config_from({"steps": str(nano.steps), "adam_lr": "0.5", "seed": "3"})
    assert overrides == {"adam_lr": 0.5, "seed": 3}
    assert config == dataclasses.replace(nano, adam_lr=0.5, seed=3)
    config, overrides = config_from({"track": "fineweb"})
    assert config == TRACKS["fineweb"] and overrides == {}


def test_keys_take_dashes_or_underscores_a_space_or_an_equals_sign():
    texts = train_gpt.parse_arguments(["--adam-lr", "1", "--matrix_lr=2", "--run-id=a=b", "--seed", "-1"])
    assert texts == {"adam_lr": "1", "matrix_lr": "2", "run_id": "a=b", "seed": "-1"}


@pytest.mark.parametrize("track", TRACKS)
def test_a_track_carries_its_own_name(track):
    assert TRACKS[track].track == track


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().steps = 5


@pytest.mark.parametrize("run_of", ["", "1:3/8:1", "12:100/100:7"])
def test_a_runs_place_in_a_record_is_kept(run_of):
    assert tiny_config(run_of=run_of).run_of == run_of


@pytest.mark.parametrize("tokenizer, eot, vocabulary", [("bytes", 256, 257), ("gpt2", 50256, 50304)])
def test_vocabulary_holds_the_end_of_text_id(tokenizer, eot, vocabulary):
    config = tiny_config(tokenizer=tokenizer)
    assert (config.eot_token, config.vocab_size) == (eot, vocabulary)


# ----- what a Config refuses: the message must hold the name, the value and the constraint or remedy

REFUSED = [
    ({"steps": 0}, "0", "positive"),
    ({"steps": -5}, "-5", "positive"),
    ({"epochs": 0}, "0", "positive"),
    ({"micro_batch_tokens": 0}, "0", "positive"),
    ({"adam_lr": 0.0}, "0.0", "positive"),
    ({"adam_lr": float("nan")}, "nan", "positive"),
    ({"logit_cap": -1.0}, "-1.0", "above 0"),
    ({"logit_cap": 41.0}, "41.0", "to 40"),
    ({"adam_lr": float("inf")}, "inf", "positive"),
    ({"matrix_decay": -0.1}, "-0.1", "negative"),
    ({"val_every": -1}, "-1", "negative"),
    ({"save_every": -1}, "-1", "negative"),
    ({"save_every": 5, "adam_every": 2}, "5", "multiple of adam_every=2"),
    ({"cooldown": 1.5}, "1.5", "0 to 1"),
    ({"final_lr": -0.5}, "-0.5", "0 to 1"),
    ({"untie_at": 2.0}, "2.0", "0 to 1"),
    ({"tokenizer": "words"}, "words", "bytes"),
    ({"device": "tpu"}, "tpu", "cuda"),
    ({"dtype": "float16"}, "float16", "bfloat16"),
    ({"attention": "flash"}, "flash", "sdpa"),
    ({"head_dim": 24}, "24", "divide"),
    ({"head_dim": 2}, "2", "multiple of 4"),
    ({"head_dim": 0}, "0", "multiple of 4"),
    ({"ngram_comms": "rows"}, "rows", "replicated, sharded"),
    ({"ngram_host": True}, "True", "--ngram-comms sharded (it is replicated)"),
    ({"ngram_lr": 0.5, "ngram_decay": 2.0}, "2.0", "ngram_lr=0.5"),
    ({"run_of": "3/8"}, "3/8", "1:3/8:1"),
    ({"run_of": "1:3/8:one"}, "1:3/8:one", "`python -m records run`"),
    ({"windows": ((0.0, (32, 100)),)}, "100", "multiple"),
    ({"windows": ((0.0, (0, 64)),)}, "0", "positive"),
    ({"windows": ((0.0, (48, 64)),)}, "48", "divide"),
    ({"long_layers": (2,)}, "2", "0 to 1"),
    ({"long_layers": (-1,)}, "-1", "0 to 1"),
    ({"value_embedding_layers": (7,)}, "7", "0 to 1"),
    ({"ngram_orders": (1,)}, "1", "2 to 32"),
    ({"ngram_orders": (33,)}, "33", "2 to 32"),
    ({"ngram_orders": (2, 2)}, "2, 2", "distinct"),
    ({"copy_orders": (1,)}, "1", "2 to 32"),
    ({"copy_orders": (4, 4)}, "4, 4", "distinct"),
    ({"copy_reach": -1}, "-1", "negative"),
    ({"index_orders": (33,)}, "33", "2 to 32"),
    ({"index_bits": 0}, "0", "1 to 31"),
    ({"index_bits": 32}, "32", "1 to 31"),
    ({"index_share": 1.5}, "1.5", "0 to 1"),
    ({"index_share": -0.1}, "-0.1", "0 to 1"),
    ({"workers": -1}, "-1", "negative"),
    ({"ngram_rows": 0}, "0", "1 to"),
    ({"ngram_rows": 2**31}, str(2**31), "1 to"),
    ({"val_tokens": 1000}, "1000", "1024"),
    ({"seed": -2}, "-2", "-1"),
    ({"seed": 2**63}, str(2**63), "2^63"),
    ({"micro_batches": ()}, "()", "(fraction, value)"),
    ({"micro_batches": ((0.5, 2),)}, "0.5", "from 0"),
    ({"document_cap": ((0.0, 64), (0.5, 96), (0.5, 128))}, "0.5", "rising"),
    ({"document_cap": ((0.0, 64), (1.0, 96))}, "1.0", "below 1"),
    ({"micro_batches": ((0.0, 4), (0.5,))}, "(0.5,)", "(fraction, value)"),
    ({"micro_batches": ((0.0, 4, 5),)}, "(0.0, 4, 5)", "(fraction, value)"),
    ({"micro_batches": ((0.0, 4), 5)}, "5", "(fraction, value)"),
    ({"micro_batches": (("a", 4),)}, "'a'", "(fraction, value)"),
    ({"micro_batches": ((0.0, 4), (None, 8))}, "None", "(fraction, value)"),
    ({"micro_batches": 4}, "4", "(fraction, value)"),
    ({"micro_batches": ((0.0, 0),)}, "0", "positive integers"),
    ({"micro_batches": ((0.0, -2),)}, "-2", "positive integers"),
    ({"micro_batches": ((0.0, 2.0),)}, "2.0", "positive integers"),
    ({"micro_batches": ((0.0, 2), (0.5, "4"))}, "'4'", "positive integers"),
    ({"document_cap": ((0.0, 0),)}, "0", "positive integers"),
    ({"document_cap": ((0.0, -8),)}, "-8", "positive integers"),
    ({"windows": ((0.0, 64),)}, "64", "pairs of positive integers"),
    ({"windows": ((0.0, (64,)),)}, "64", "pairs of positive integers"),
    ({"windows": ((0.0, (64, 64.0)),)}, "64.0", "pairs of positive integers"),
    ({"mtp_weights": ((0.0, 1.0),)}, "1.0", "tuples of weights"),
    ({"mtp_weights": ((0.0, ()),)}, "()", "tuples of weights"),
    ({"mtp_weights": ((0.0, (0.0, 1.0)),)}, "(0.0, 1.0)", "first above 0"),
    ({"mtp_weights": ((0.0, (1.0, "a")),)}, "'a'", "tuples of weights"),
    ({"momentum": (0.9,)}, "0.9", "two or four values"),
    ({"momentum": (0.9, 0.95, 0.1)}, "0.1", "two or four values"),
    ({"momentum": (0.9, 1.5)}, "1.5", "in [0, 1)"),
    ({"momentum": (0.85, 0.95, 0.1, 1.0)}, "1.0", "in [0, 1)"),
    ({"lr_stages": ((0.0, 1.0), (0.5, 0.0))}, "0.0", "positive"),
    ({"grad_comms": "float16"}, "float16", "float32, bfloat16"),
    ({"windows": ((0.0, (32, 64)), (1.1, (32, 64)))}, "1.1", "rising"),
    ({"micro_batches": ((0.0, 2), (1.0, 4))}, "1.0", "below 1"),
    ({"val_batch_tokens": 300}, "300", "multiple of micro_batch_tokens=256"),
    ({"val_batch_tokens": 2048}, "1024", "nearest 2048"),
    ({"long_layers": ("a",)}, "a", "0 to 1"),
    ({"long_layers": ([1],)}, "[1]", "0 to 1"),
    ({"long_layers": (0.5,)}, "0.5", "0 to 1"),
    ({"value_embedding_layers": (0, None)}, "None", "0 to 1"),
    ({"ngram_orders": (2, 3.0)}, "3.0", "distinct"),
    ({"ngram_orders": ("a",)}, "'a'", "distinct"),
    ({"matrix_decay": float("nan")}, "nan", "negative"),
    ({"model_dim": 8, "head_dim": 8}, "8", "at least 12"),
]


@pytest.mark.parametrize("changes, value, remedy", REFUSED, ids=[str(case[0]) for case in REFUSED])
def test_out_of_range_values_are_refused(changes, value, remedy):
    with pytest.raises(ConfigError) as refusal:
        tiny_config(**changes)
    message = str(refusal.value)
    assert isinstance(refusal.value, ValueError)
    assert any(name in message for name in changes)
    assert value in message
    assert remedy in message
    assert "\n" not in message


def test_val_tokens_names_the_nearest_multiple():
    with pytest.raises(ConfigError, match="nearest 768"):
        tiny_config(val_tokens=800)


# ----- schedules of whole runs: what follows from them, against a plain loop over the steps

def random_schedule(rng, value_of):
    """Pairs of rising fractions, most of which fall between steps or so close to one that rounding could show."""
    steps = int(rng.integers(1, 60))
    starts = [0.0, *(rng.choice([rng.random(), rng.integers(steps) / steps, 1 / 3, 0.1 * 7])
                     for _ in range(rng.integers(4)))]
    return steps, tuple((start, value_of(rng)) for start in sorted({float(start) for start in starts if start < 1}))


def test_training_tokens_are_those_of_a_loop_over_the_steps():
    rng, uneven = np.random.default_rng(0), 0
    for _ in range(400):
        steps, schedule = random_schedule(rng, lambda rng: int(rng.integers(1, 50)))
        config = tiny_config(steps=steps, micro_batches=schedule)
        expected = 0
        for step in range(steps):
            expected_now = [count for start, count in schedule if start * steps <= step][-1]
            expected += expected_now
            assert train_gpt.at_step(schedule, step, config) == expected_now
        assert train_gpt.training_tokens(config) == 256 * expected
        uneven += any(start * steps % 1 for start, _ in schedule)
    assert 100 < uneven < 400


@pytest.mark.parametrize("adam_every", [1, 2, 3, 7])
@pytest.mark.parametrize("untie_at", [0.0, 0.01, 0.25, 1 / 3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("steps", [1, 4, 10, 21])
def test_the_head_is_untied_where_a_cycle_of_adam_begins(steps, untie_at, adam_every):
    """Counted step by step: at the first beginning of a cycle that is no earlier than the nearest step says."""
    config = tiny_config(steps=steps, untie_at=untie_at, adam_every=adam_every)
    asked, untied = round(untie_at * steps), 0
    while untied < asked:
        untied += adam_every
    assert train_gpt.untie_step(config) == untied
    for step in range(steps):
        tied = 0 < asked and step < untied
        assert train_gpt.phase_at(config, step).tied == tied
        # What a step has left behind is what it was trained as.
        assert train_gpt.is_tied_before(config, step + 1) == tied
    assert train_gpt.is_tied_before(config, 0) == (untied > 0)


# ----- a check that stops before the first step

def test_check_passes_on_a_good_configuration(cli, tiny, tmp_path):
    run = cli("--check", **tiny)
    assert run.code == 0 and run.stderr == ""
    assert run.lines[-1] == "check:ok"
    for word in ("device:", "backends:", "corpus:", "parameters:", "memory:", "disk"):
        assert sum(line.startswith(word) for line in run.lines) == 1, word
    needed = tiny["steps"] * tiny["micro_batches"][0][1] * tiny["micro_batch_tokens"]
    assert f" {needed:,};" in run.stdout
    sizes = re.search(r"^parameters: small ([\d,]+), embeddings ([\d,]+), ngram_table ([\d,]+), matrices ([\d,]+)$",
                      run.stdout, re.M)
    model = train_gpt.GPT(tiny_config(), "sdpa")
    counted = [int(size.replace(",", "")) for size in sizes.groups()]
    assert counted[2] == 1000 * 32 and sum(counted) == counted[2] + sum(param.numel() for param in model.parameters())
    assert counted[3] == model.attention.numel() + model.mlp.numel()
    assert not list(tmp_path.iterdir())  # it only looks


def test_check_of_a_run_that_exists_leaves_it_alone(cli, tiny, tmp_path):
    folder = tmp_path / "logs" / "mine"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("precious")
    run = cli("--check", **{**tiny, "run_id": "mine"})
    assert run.code == 0 and run.lines[-1] == "check:ok"
    assert (folder / "log.txt").read_text() == "precious" and len(list(folder.iterdir())) == 1


def test_check_of_a_resumption_only_looks(cli, rich_run, tmp_path):
    shutil.copytree(rich_run.folder, tmp_path / "logs" / "rich", ignore=shutil.ignore_patterns("checkpoint.*"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "logs" / "rich").iterdir()}
    run = cli("--check", "--resume", "rich")
    assert run.code == 0 and run.lines[-1] == "check:ok"
    assert {path.name: path.read_bytes() for path in (tmp_path / "logs" / "rich").iterdir()} == before


def test_check_calls_the_hook_of_another_script_and_takes_no_step(tiny, cli, monkeypatch):
    called = []
    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: pytest.fail("a check must not train"))
    run = cli("--check", **tiny, main=lambda words: train_gpt.main(words, lambda config: called.append))
    assert run.code == 0 and run.lines[-1] == "check:ok"
    assert len(called) == 1 and called[0].config.seed == 1


@pytest.mark.parametrize("changes, hint", [
    ({"data": "nowhere"}, "nowhere"),
    ({"steps": 100_000}, "--steps"),
    ({"ngram_rows": 2**31 - 1, "model_dim": 8192}, "memory"),
    ({"attention": "varlen"}, "sdpa"),
    ({"matrix_update": "moun"}, "muon, soap"),
])
def test_check_refuses_what_cannot_run(changes, hint, cli, tiny, tmp_path):
    run = cli("--check", **{**tiny, **changes})
    assert hint in refusal(run)
    assert not list(tmp_path.iterdir())


# ----- the file

def test_the_file_keeps_to_its_form():
    """At most 2,000 lines of 120 characters, and 350 of kernels; functions of 60, one blank line between definitions."""
    source = TRAINER.read_text()
    kernels = re.search(r'^# 11\. Kernels =+\n.*?(?=^if __name__ == "__main__":)', source, re.DOTALL | re.MULTILINE)[0]
    assert source.count("\n") - kernels.count("\n") <= 2000 and kernels.count("\n") <= 350
    assert max(map(len, source.splitlines())) <= 120
    assert "\n\n\n" not in source and "\n\n    def " not in source and not re.search(r"[ \t]\n", source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name

def test_importing_the_file_has_no_side_effects(tmp_path):
    script = """
import os, signal, sys, threading
import numpy, torch, torch.distributed
torch.manual_seed(5)
before = (torch.get_rng_state().tolist(), signal.getsignal(signal.SIGTERM), threading.active_count(),
          torch.get_float32_matmul_precision(), torch.get_default_dtype(), dict(os.environ), os.getcwd())
import train_gpt
after = (torch.get_rng_state().tolist(), signal.getsignal(signal.SIGTERM), threading.active_count(),
         torch.get_float32_matmul_precision(), torch.get_default_dtype(), dict(os.environ), os.getcwd())
assert before == after
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert "matplotlib" not in sys.modules and "tiktoken" not in sys.modules
"""
    env = {**environment(), "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
           "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""
    assert not list(tmp_path.iterdir())
