"""Fields, tracks, schedules and the command line: what words become, what is refused, `--check`."""

import dataclasses
import itertools
import shlex

import numpy as np
import pytest
import torch

import ranks
import train_gpt
from helpers import arguments, python, refusal, tiny_config
from train_gpt import TRACKS, ConfigError, Layer, Stage

ENGLISH = TRACKS["english"]


def parsed(text):
    """(Config, overrides) of a command line of the track english."""
    words = ["--track", "english", *shlex.split(text)]
    config = train_gpt.config_from(train_gpt.parse_command_line(words))
    return config, train_gpt.overrides_of(config)


PARSED = [
    ("--steps=6 --steps 7", "steps", 7),
    ("--matrix-lr 1e-3", "matrix_lr", 1e-3),
    ("--run-of 12:100/100:7", "run_of", "12:100/100:7"),
    ("--compile TRUE", "compile", True),
    ("--copy-orders 2", "copy_orders", (2,)),
    ("--copy-orders '()'", "copy_orders", ()),
    ("--ngram-orders 2,3", "ngram_orders", (2, 3)),
    ("--layers \"({}, {'is_long': True})\"", "layers", (Layer(), Layer(is_long=True))),
]


@pytest.mark.parametrize("text, name, value", PARSED, ids=[row[0] for row in PARSED])
def test_words_become_values_of_their_fields(text, name, value):
    config, _ = parsed(text)
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)


def test_a_field_of_a_stage_is_an_option_for_all_stages():
    rows = "({'start': 0, 'micro_batches': 4}, {'start': 0.5, 'windows': (64, 128)})"
    config, overrides = parsed(f'--stages "{rows}" --lr-mul 0.5')
    assert config.stages == (
        Stage(micro_batches=4, lr_mul=0.5),
        Stage(start=0.5, windows=(64, 128), lr_mul=0.5),
    )
    assert overrides == {"stages": tuple(map(dataclasses.asdict, config.stages))}


def test_only_what_differs_from_the_track_is_an_override(corpus):
    assert parsed("") == (ENGLISH, {})
    neutral = {"seed": 3, "device": "cpu", "log_every": 3, "save_every": 4, "run_id": "a"}
    neutral |= {"micro_batches_a_pass": 2}
    words = shlex.join(arguments({"steps": ENGLISH.steps, "adam_lr": 0.5, **neutral}))
    config, overrides = parsed(words)
    assert overrides == {"adam_lr": 0.5}
    assert config == dataclasses.replace(ENGLISH, adam_lr=0.5, **neutral)
    words = f"--data {corpus} --val-tokens {ENGLISH.val_tokens} --steps {ENGLISH.steps}"
    changed = {"data": str(corpus), "tokenizer": "bytes", "vocab_size": 384, "eot_token": 256}
    assert parsed(words)[1] == changed


@pytest.mark.parametrize("has_cuda, has_shards", [(False, True), (True, False), (True, True)])
def test_the_default_track_is_fineweb_where_it_can_run(has_cuda, has_shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    if has_shards:
        (tmp_path / "data/fineweb10B").mkdir(parents=True)
        (tmp_path / "data/fineweb10B/fineweb_train_000001.bin").write_bytes(b"")
    expected = "fineweb" if has_cuda and has_shards else "english"
    assert train_gpt.config_from({}).track == expected


# What is refused; the message holds the name, the value, and the limits or the remedy.
REFUSED = [
    ("--micro-batch-token 256", "--micro-batch-token 256", "see --help"),
    ("--track nano", "--track nano: no such track; there are fineweb, english"),
    ("--steps 1e3", "--steps", "'1e3'", "int"),
    ("--compile maybe", "--compile", "maybe", "true or false"),
    ("--windows '(64'", "--windows", "(64: ", "(1, 2)"),
    ("--compile 0", "compile=0", "true or false"),
    ("--windows 64", "stages[0].windows=(64,)", "two whole numbers, as in (128, 384)"),
    ("--cooldown True", "cooldown=True", "two numbers, as in (0."),
    ("--cooldown '(0.9, 0.1)'", "cooldown=(0.9, 0.1)", "must not fall"),
    ("--copy-orders \"('a',)\"", "copy_orders=('a',)", "numbers, as in (2, 3, 5, 8)"),
    ("--adam-lr nan", "adam_lr=nan", "1e-30 to 1e+30"),
    ("--device tpu", "device='tpu'", "auto|cpu|cuda"),
    ("--run-id ../x", "run_id='../x'", "must match"),
    ("--mtp-weights '()'", "mtp_weights=()", "one or more"),
    ("--logit-cap '(0, 5)'", "logit_cap=(0", "above 0"),
    ("--softmax-rows 1023", "softmax_rows=1023", "0, or at least micro_batch_tokens=1024"),
    ("--stages '()'", "starts []", "must begin at 0"),
    ("--stages 4", "stages: rows have the fields of a Stage"),
    ("--stages \"({}, {'start': 0.5}, {'start': 0.2})\"", "[0.0, 0.5, 0.2]", "then rise"),
    ("--stages \"({}, {'start': 0.5, 'micro_batches': '4'})\"", "stages[1].micro_batches='4'"),
    ("--layers \"({'is_short': True},)\"", "layers", "is_short"),
    ("--layers \"({'attends': False, 'exclusive': True},)\"", "layers[0]", "no attention"),
    ("--layers \"({'feeds_last': True},)\"", "layers", "the last has no feeds_last"),
    ("--model-dim 128 --head-dim 24", "model_dim=128", "multiple of head_dim=24"),
    (
        "--model-dim 96 --layers \"({'paired_heads': True},)\"",
        "layers[0]: paired_heads: 3 heads make no pairs",
    ),
    ("--val-tokens 1000", "val_tokens=1000", "multiple of val_batch_tokens=4096"),
    ("--save-every 4 --adam-every 3", "save_every=4", "multiple of adam_every=3"),
    ("--resume auto", "resume=auto", "--run-id"),
    ("--resume never", "--resume never: no checkpoint in"),
    ("--data nowhere", "nowhere/manifest.json: no such file", "data/fineweb.py", "--data"),
]


@pytest.mark.parametrize("text, parts", [(row[0], row[1:]) for row in REFUSED], ids=str)
def test_a_refusal_is_one_line_with_value_and_limits_and_nothing_is_written(
    text, parts, cli, tmp_path
):
    line = refusal(cli("--track", "english", *shlex.split(text)))
    assert all(part in line for part in parts) and line.isprintable(), line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--track", "english"], ["--track=english"]])
def test_help_shows_the_values_of_the_track_that_is_named(words, capsys):
    with pytest.raises(SystemExit):
        train_gpt.parse_command_line([*words, "--help"])
    assert f"schedule [{ENGLISH.steps}]" in capsys.readouterr().out


def test_numbers_beyond_their_limits_are_refused():
    for values in (ENGLISH, Stage(), Layer()):
        for field in dataclasses.fields(values):
            low, high, unit, _ = field.metadata["limits"]
            default = field.default if isinstance(field.default, tuple) else (field.default,)
            assert (low is None) == (type(default[0]) not in (int, float)), field.name
            wrong = [] if low is None else [low - 1, 2 * high, *[low + 1] * (unit is not None)]
            for number in wrong:
                value = number if default[0] == field.default else (number,) * len(default)
                with pytest.raises(ConfigError, match=f"{field.name}=.*: must be"):
                    train_gpt.check_fields(dataclasses.replace(values, **{field.name: value}))


def test_ranks_agree_on_what_is_drawn(tiny, tmp_path):
    """Each rank draws a seed and a name of its own."""
    run = ranks.train(tmp_path, {**tiny, "steps": 1, "seed": -1}, world_size=2)
    assert run.code == 0, run.stdout + run.stderr
    (folder,) = (tmp_path / "logs").iterdir()
    assert f"run:{folder.name} " in run.stdout and (folder / "log.txt").exists()


def test_training_tokens_are_those_of_a_loop_over_the_steps():
    """Most stages start between steps, or so close to one that rounding could show."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        steps = int(rng.integers(1, 60))
        choices = [rng.random(), rng.integers(steps) / steps, 1 / 3, 0.1 * 7]
        starts = sorted({0.0, *map(float, rng.choice(choices, rng.integers(4)))})
        rows = [(start, int(rng.integers(1, 50))) for start in starts]
        stages = [{"start": start, "micro_batches": count} for start, count in rows]
        config = train_gpt.with_values(ENGLISH, {"steps": steps, "stages": stages})
        total = 0
        for step in range(steps):
            total += [count for start, count in rows if start * steps <= step][-1]
            until = train_gpt.training_tokens(config, step + 1)
            assert until == config.micro_batch_tokens * total
        assert train_gpt.training_tokens(config) == until


@pytest.mark.parametrize("adam_every", [1, 3, 7])
def test_the_head_is_untied_where_a_cycle_of_adam_begins(adam_every):
    for steps, untie_at in itertools.product((1, 4, 10, 21), (0.0, 0.01, 1 / 3, 0.5, 1.0)):
        config = tiny_config(steps=steps, untie_at=untie_at, adam_every=adam_every)
        begins = range(0, 100, adam_every)
        untied = next(step for step in begins if step >= round(untie_at * steps))
        assert train_gpt.untie_step(config) == untied


def test_check_only_looks(cli, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(train_gpt, "warm_up", lambda *_: pytest.fail("a check trains"))
    run = cli("--check", **tiny)
    assert run.code == 0 and run.lines[-1] == "check:ok"
    for word in ("run:", "data:", "backends:attention=sdpa", "size: "):
        assert run.stdout.count(word) == 1, word
    assert not list(tmp_path.iterdir())


MISSING = [
    ("train_gpt", "numpy", "run.sh"),
    ("sample", "fcntl", "WSL"),
    ("data.text", "numpy", "activate"),
    ("records.__main__", "fcntl", "WSL"),
]


@pytest.mark.slow
@pytest.mark.parametrize("program, module, remedy", MISSING)
def test_what_cannot_be_imported_is_told_in_one_line(program, module, remedy):
    """As on Windows, or where no environment is active."""
    system = "nt" if program == "sample" else "posix"  # records says WSL anywhere
    code = f"import os, sys, torch; os.name = {system!r}; sys.modules[{module!r}] = None"
    done = python("-c", f"{code}; import {program}")
    said = done.stdout + done.stderr
    assert done.returncode in (1, 2) and said.count("\n") == 1, said
    assert module in said and remedy in said
