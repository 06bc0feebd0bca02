"""Chapters 1, 2 and 16: fields, tracks, the command line, what both refuse, `--check` and `--help`;
importing the file does nothing."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

import ranks
import train_gpt
from helpers import TRAINER, arguments, environment, refusal, tiny_config
from train_gpt import TRACKS, Config, ConfigError, Stage

TRACK_NAMES = ["nano", "mini", "fineweb"]  # other scripts add theirs
STAGE_FIELDS = [field for field in dataclasses.fields(Stage) if field.name != "start"]
FIELDS = [field for field in dataclasses.fields(Config) if field.name != "rules"] + STAGE_FIELDS
LAYERS = [field.name for field in FIELDS if field.name.endswith("_layers") and field.type is tuple]
CASES = dict(ids=lambda case: case if isinstance(case, str) else "")


def parsed(text, track="nano"):
    """(Config, overrides) of a command line of a track."""
    return train_gpt.config_from(
        train_gpt.parse_command_line(["--track", track, *shlex.split(text)])
    )


# ----- help


@pytest.mark.slow
def test_help_lists_every_field_in_a_process_of_its_own(tmp_path):
    done = subprocess.run(
        [sys.executable, TRAINER, "--help"],
        cwd=tmp_path,
        env={**environment(), "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stderr == "" and not list(tmp_path.iterdir())
    assert all(track in done.stdout for track in TRACK_NAMES)
    said = " ".join(done.stdout.split())
    for field in FIELDS:
        option, help_text = f"--{field.name.replace('_', '-')}", field.metadata["help"]
        assert said.count(f" {option} {help_text} ") == 1 and len(help_text) > 10, option


@pytest.mark.parametrize("words", [["-h"], ["--track", "fineweb", "--help"]], ids=" ".join)
def test_help_is_no_run(words, cli):
    run = cli(*words)
    assert run.code == 0 and "status:" not in run.stdout and "--micro-batch-tokens" in run.stdout


# ----- from words to values

PARSED = [
    ("--steps 7", "steps", 7),
    ("--steps=7", "steps", 7),
    ("--steps 6 --steps 7", "steps", 7),
    ("--seed -1", "seed", -1),
    ("--matrix-lr 0.5", "matrix_lr", 0.5),
    ("--matrix-lr 1e-3", "matrix_lr", 1e-3),
    ("--matrix-decay 0", "matrix_decay", 0.0),
    ("--data some/where", "data", "some/where"),
    ("--run-id a=b", "run_id", "a=b"),
    ("--run-of 12:100/100:7", "run_of", "12:100/100:7"),
    *((f"--compile {word}", "compile", False) for word in ("false", "False", "0")),
    *((f"--compile {word}", "compile", True) for word in ("true", "TRUE", "1")),
    ("--num-layers 3 --long-layers 2", "long_layers", (2,)),
    ("--num-layers 3 --long-layers '(0, 2)'", "long_layers", (0, 2)),
    ("--long-layers '()'", "long_layers", ()),
    ("--num-layers 3 --shifted-layers 0,1", "shifted_layers", (0, 1)),
    ("--num-layers 3 --skips '((0, 1), (0, 2))'", "skips", ((0, 1), (0, 2))),
    ("--num-layers 3 --skips '((0, 2),)'", "skips", ((0, 2),)),
    ("--windows '(16, 48)' --val-windows '(16, 80)'", "val_windows", (16, 80)),
    ("--ngram-orders 2,3", "ngram_orders", (2, 3)),
    ("--val-windows '(16, 32)'", "val_windows", (16, 32)),
]


@pytest.mark.parametrize("text, name, value", PARSED, **CASES)
def test_words_become_values_of_their_fields(text, name, value):
    config, _ = parsed(text)
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)


OF_STAGES = {
    "micro_batches": ("5", 5),
    "document_cap": ("64", 64),
    "windows": ("(64, 192)", (64, 192)),
    "lr_mul": ("0.5", 0.5),
    "mtp_weights": ("1, 0.5, 0.1", (1, 0.5, 0.1)),
    "softmax_rows": ("256", 256),
}


@pytest.mark.parametrize("track", TRACK_NAMES)
@pytest.mark.parametrize("field", STAGE_FIELDS, ids=lambda field: field.name)
def test_a_field_of_a_stage_is_an_option_for_all_stages(field, track):
    text, value = OF_STAGES[field.name]
    config, overrides = parsed(f"--{field.name.replace('_', '-')} '{text}'", track)
    own = TRACKS[track].stages
    assert [getattr(stage, field.name) for stage in config.stages] == [value] * len(own)
    kept = {field.name: getattr(own[0], field.name)}
    assert dataclasses.replace(config.stages[0], **kept) == own[0]
    assert list(overrides) == ["stages"]


@pytest.mark.parametrize("track", TRACK_NAMES)
def test_rows_of_stages_take_what_they_lack_from_the_tracks_first_row(track):
    first = TRACKS[track].stages[0]
    rows = "({'start': 0, 'micro_batches': 4}, {'start': 0.5, 'windows': (64, 128)})"
    config, overrides = parsed(f'--stages "{rows}" --lr-mul 0.5', track)
    assert config.stages == (
        dataclasses.replace(first, micro_batches=4, lr_mul=0.5),
        dataclasses.replace(first, start=0.5, windows=(64, 128), lr_mul=0.5),
    )
    assert overrides == {"stages": tuple(map(dataclasses.asdict, config.stages))}


def test_one_row_of_stages_needs_no_comma():
    config, _ = parsed("--stages \"{'document_cap': 64}\"")
    assert [stage.document_cap for stage in config.stages] == [64]


def test_only_what_differs_from_the_track_is_an_override():
    nano = TRACKS["nano"]
    assert parsed("") == (nano, {})
    neutral = "--seed 3 --device cpu --workers 2 --log-every 3 --save-every 4 --run-id a"
    config, overrides = parsed(f"--steps {nano.steps} --adam-lr 0.5 --document-cap 512 {neutral}")
    assert overrides == {"adam_lr": 0.5}
    neutral = {"device": "cpu", "workers": 2, "log_every": 3, "save_every": 4, "run_id": "a"}
    assert config == dataclasses.replace(nano, adam_lr=0.5, seed=3, **neutral)


def test_a_field_of_another_scripts_track_is_refused():
    """It is an option wherever that script is imported, for all tracks."""
    with pytest.raises(ConfigError, match="track nano has no init_from"):
        train_gpt.config_from({"track": "nano", "init_from": "mine"})


def test_the_validation_hash_is_of_the_tracks_own_tokens():
    assert parsed("--steps 3")[0].val_sha256 == TRACKS["nano"].val_sha256
    assert parsed("--val-tokens 1024")[0].val_sha256 == ""
    config, overrides = parsed("--data mine --val-sha256 ab")
    assert config.val_sha256 == "ab" and overrides == {"data": "mine"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dtype_that_the_track_leaves_to_the_machine_is_no_override(dtype):
    assert parsed(f"--dtype {dtype}")[1] == {}
    assert parsed(f"--dtype {dtype}", "fineweb")[1] == (
        {} if dtype == "bfloat16" else {"dtype": dtype}
    )


@pytest.mark.parametrize("fast", ["float32", "bfloat16"])
def test_dtype_auto_is_the_fast_one_in_the_log_too(fast, tiny, cli, monkeypatch):
    def rate(device, dtype, size):
        return 2.0 if dtype == getattr(torch, fast) else 1.0

    monkeypatch.setattr(train_gpt, "matmul_rate", rate)
    run = cli(**{**tiny, "steps": 1, "dtype": "auto", "run_id": "auto"})
    assert run.code == 0 and run.result["config"]["dtype"] == fast
    assert run.checkpoint()["model"]["mlp"].dtype == getattr(torch, fast)
    assert f'"dtype": "{fast}"' in (run.folder / "log.txt").read_text()
    assert "steps" in run.result["overrides"] and "dtype" not in run.result["overrides"]


@pytest.mark.parametrize(
    "has_cuda, has_shards, track, reason",
    [
        (False, True, "nano", "torch sees no CUDA device"),
        (True, False, "nano", "no shards in data/fineweb10B"),
        (True, True, "fineweb", "are present"),
    ],
)
def test_the_default_track(has_cuda, has_shards, track, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    if has_shards:
        (tmp_path / "data/fineweb10B").mkdir(parents=True)
        (tmp_path / "data/fineweb10B/fineweb_train_000001.bin").write_bytes(b"")
    name, why = train_gpt.default_track()
    assert name == track and reason in why
    assert train_gpt.config_from({})[0] == TRACKS[track]


def test_the_default_track_is_announced(tiny, cli, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    values = {name: value for name, value in tiny.items() if name != "track"}
    run = cli("--check", **values)
    assert run.lines[0] == "track nano by default: torch sees no CUDA device"
    assert not cli("--check", **tiny).stdout.startswith("track")


@pytest.mark.parametrize("track", TRACK_NAMES)
def test_a_track_carries_its_own_name(track):
    assert TRACKS[track].track == track


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().steps = 5


@pytest.mark.parametrize(
    "tokenizer, eot, vocabulary", [("bytes", 256, 257), ("gpt2", 50256, 50304)]
)
def test_vocabulary_holds_the_end_of_text_id(tokenizer, eot, vocabulary):
    config = tiny_config(tokenizer=tokenizer)
    assert (config.eot_token, config.vocab_size) == (eot, vocabulary)


# ----- what is refused: the message holds the name, the value, and the limits or the remedy

REFUSED = [
    # words that are no options
    (
        "--micro-batch-token 256",
        "--micro-batch-token: no such key",
        "did you mean --micro-batch-tokens?",
    ),
    ("--lerning-rate 1", "--lerning-rate: no such key", "did you mean --"),
    ("--adam-rl 0.1", "did you mean --adam-lr?"),
    ("--ngram_host true", "--ngram_host: no such key"),  # gone, as the next three
    ("--passes 2", "no such key"),
    ("--grad-comms bfloat16", "no such key"),
    ("--keep 3", "no such key"),
    ("--track ''", "--track : no such track"),
    ("--track fineweeb", "no such track; did you mean fineweb?", "nano, mini, fineweb"),
    ("--steps", "--steps", "expected one argument"),
    ("steps 5", "steps: no such key", "--key value"),
    ("5", "5: no such key"),
    # values of another type
    ("--steps ten", "--steps", "'ten'", "int"),
    ("--steps 1e3", "--steps", "'1e3'", "int"),
    ("--adam-lr fast", "--adam-lr", "'fast'", "float"),
    ("--compile maybe", "--compile", "maybe: expected true or false"),
    ("--windows '(64'", "--windows", "(64: expected a tuple"),
    ("--long-layers '{[]}'", "--long-layers", "{[]}: expected a tuple"),
    # limits of one field
    ("--steps 0", "steps=0", "1 to 999,999"),
    ("--steps -5", "steps=-5", "1 to 999,999"),
    ("--epochs 0", "epochs=0", "1 to 999,999"),
    ("--adam-every 0", "adam_every=0", "1 to 999,999"),
    ("--micro-batch-tokens 0", "micro_batch_tokens=0", "1 to 16,777,216"),
    ("--adam-lr 0", "adam_lr=0.0", "positive"),
    ("--adam-lr nan", "adam_lr=nan", "positive"),
    ("--adam-lr inf", "adam_lr=inf", "at most 1e30"),
    ("--matrix-decay -0.1", "matrix_decay=-0.1", "0, or positive"),
    ("--matrix-decay nan", "matrix_decay=nan", "0, or positive"),
    ("--logit-cap -1", "logit_cap=-1.0", "0.1 to 40"),
    ("--logit-cap 41", "logit_cap=41.0", "0.1 to 40"),
    ("--val-every -1", "val_every=-1", "0 to 1,000,000,000"),
    ("--cooldown 1.5", "cooldown=1.5", "from 0 to 1"),
    ("--final-lr -0.5", "final_lr=-0.5", "from 0 to 1"),
    ("--index-share 1.5", "index_share=1.5", "from 0 to 1"),
    ("--momentum-peak 1", "momentum_peak=1.0", "below 1"),
    ("--tokenizer words", "tokenizer=words", "bytes, gpt2"),
    ("--device tpu", "device=tpu", "auto, cpu, cuda"),
    ("--dtype float16", "dtype=float16", "auto, bfloat16, float32"),
    ("--attention flash", "attention=flash", "sdpa, varlen"),
    ("--model-dim 8 --head-dim 8", "model_dim=8", "12 to 65,536"),
    ("--head-dim 2", "head_dim=2", "multiple of 4"),
    ("--head-dim 0", "head_dim=0", "multiple of 4"),
    ("--ngram-orders '(1,)'", "ngram_orders=(1,)", "orders from 2 to 32"),
    ("--ngram-orders '(33,)'", "ngram_orders=(33,)", "orders from 2 to 32"),
    ("--ngram-orders '(2, 2)'", "ngram_orders=(2, 2)", "distinct"),
    ("--ngram-orders '(2, 3.0)'", "ngram_orders=(2, 3.0)", "distinct"),
    ("--copy-orders \"('a',)\"", "copy_orders=('a',)", "distinct"),
    ("--index-orders '([2],)'", "index_orders=([2],)", "distinct"),
    ("--index-bits 32", "index_bits=32", "1 to 31"),
    ("--copy-reach -1", "copy_reach=-1", "0 to 1,000,000,000"),
    *(
        (f"--{name.replace('_', '-')} '{value}'", f"{name}={value}", "distinct layers")
        for name in LAYERS
        for value in ("(-1,)", "([0],)", "(0, None)", "(0, 0)", "(0.0,)", "(True,)")
    ),
    *(
        (f"--num-layers 3 --skips '{value}'", f"skips={value}", "pairs of layers", "((3, 6),)")
        for value in ("(0, 1)", "((0,),)", "((0, 1, 2),)", "((1, 0),)", "((1, 1),)", "((-1, 0),)")
        + ("((0, 1.0),)", "((0, None),)", "((0, 1), 2)")
    ),
    ("--ngram-rows 2147483648", "ngram_rows=2147483648", "1 to 2,147,483,647"),
    ("--workers -1", "workers=-1", "0 to 1,024"),
    ("--seed -2", "seed=-2", "-1 to 9,223,372,036,854,775,807"),
    ("--seed 9223372036854775808", "seed=9223372036854775808", "-1 to"),
    ("--run-of 3/8", "run_of=3/8", "1:3/8:1"),
    ("--run-of 1:3/8:one", "run_of=1:3/8:one", "`python -m records run`"),
    *(
        (f"--run-id={name}", f"run_id={name}", "100 letters")
        for name in ("..", "../x", "/x", "a/b")
    ),
    *((f"--run-id='{name}'", "run_id=", "100 letters") for name in (".", "-x", "a b", "x" * 200)),
    ("--val-windows 64", "val_windows=(64,)", "a short and a long window"),
    # fields of a stage
    ("--micro-batches 0", "stages[0].micro_batches=0", "1 to 65,536"),
    ("--document-cap -8", "stages[0].document_cap=-8", "1 to 65,536"),
    ("--lr-mul 0", "stages[0].lr_mul=0.0", "positive"),
    ("--windows 64", "stages[0].windows=(64,)", "a short and a long window"),
    ("--windows '(64, 64.0)'", "stages[0].windows=(64, 64.0)", "a short and a long window"),
    ("--windows '(0, 64)'", "stages[0].windows=(0, 64)", "a short and a long window"),
    ("--windows '(64, 100)'", "stages[0].windows=(64, 100)", "multiples of 16"),
    ("--windows '(8, 64)'", "stages[0].windows=(8, 64)", "multiples of 16"),
    ("--val-windows '(32, 100)'", "val_windows=(32, 100)", "multiples of 16"),
    ("--mtp-weights '()'", "stages[0].mtp_weights=()", "1 to 16 weights"),
    ("--mtp-weights '(0.0, 1.0)'", "mtp_weights=(0.0, 1.0)", "the first above 0"),
    ("--mtp-weights \"(1.0, 'a')\"", "mtp_weights=(1.0, 'a')", "1 to 16 weights"),
    # rows of stages
    ("--stages '()'", "stages=()", "at least one row"),
    ("--stages 4", "stages: rows are dicts"),
    ("--stages '((0.0, 4),)'", "stages: rows are dicts"),
    ("--stages '({1: 2},)'", "stages: rows are dicts"),
    ("--stages \"({'window': 4},)\"", "stages: rows are dicts", "window"),
    ("--stages \"({'start': 0.5},)\"", "starts [0.5] must begin at 0"),
    ("--stages \"({}, {'start': 0.0})\"", "[0.0, 0.0]", "then rise"),
    ("--stages \"({}, {'start': 0.5}, {'start': 0.2})\"", "[0.0, 0.5, 0.2]", "then rise"),
    ("--stages \"({}, {'start': 1.0})\"", "stages[1].start=1.0", "below 1"),
    (
        "--stages \"({}, {'start': 0.5, 'micro_batches': '4'})\"",
        "stages[1].micro_batches=4",
        "1 to",
    ),
    (
        "--stages \"({}, {'start': 0.5, 'micro_batches': 2.0})\"",
        "stages[1].micro_batches=2.0",
        "1 to",
    ),
    # several fields
    (
        "--micro-batch-tokens 544 --windows '(32, 192)' --val-windows '(32, 96)'",
        "a window of 192 takes blocks of 64",
        "divide it",
        "micro_batch_tokens=544",
    ),
    (
        "--val-batch-tokens 1040 --windows '(16, 48)' --val-windows '(16, 96)'",
        "a window of 96 takes blocks of 32",
        "val_batch_tokens=1040",
    ),
    ("--model-dim 128 --head-dim 24", "head_dim=24", "divide model_dim=128"),
    ("--long-layers 2", "long_layers=(2,)", "0 to 0"),
    *(
        (f"--num-layers 3 --{name.replace('_', '-')} '(0, 3)'", f"{name}=(0, 3)", "0 to 2")
        for name in LAYERS
    ),
    ("--num-layers 3 --skips '((0, 1), (1, 3))'", "skips=((0, 1), (1, 3))", "0 to 2"),
    (
        "--paired-layers 0 --model-dim 128 --head-dim 128",
        "paired_layers=(0,)",
        "1 heads make no pairs",
    ),
    (
        "--paired-layers 0 --model-dim 96 --head-dim 32",
        "paired_layers=(0,)",
        "3 heads make no pairs",
    ),
    ("--softmax-rows 258", "softmax_rows=258", "at most the vocabulary's 257"),
    ("--val-tokens 1000", "val_tokens=1000", "multiple of val_batch_tokens=1024"),
    ("--save-every 4 --adam-every 3", "save_every=4", "multiple of adam_every=3"),
    ("--resume auto", "resume=auto", "--run-id"),
]


@pytest.mark.parametrize("text, parts", [(row[0], row[1:]) for row in REFUSED], **CASES)
def test_refusals_hold_value_and_limits(text, parts):
    with pytest.raises(ConfigError) as refused:
        parsed(text)
    message = str(refused.value)
    assert all(part in message for part in parts), message
    assert isinstance(refused.value, ValueError) and message.isprintable()


@pytest.mark.parametrize(
    "text, hint",
    [
        ("--adam-rl 1", "--adam-lr"),
        ("--track nano --check --stepz 5", "--steps"),
        ("--track nano --steps 0", "steps=0"),
        ("--track nano --data nowhere", "nowhere"),
        ("--resume never", "no checkpoint under logs/never"),
        ("sample --prompt x", "sample: no such key"),
    ],
    **CASES,
)
def test_a_refusal_is_one_line_and_status_2_and_nothing_is_written(text, hint, cli, tmp_path):
    run = cli(*shlex.split(text))
    assert hint in refusal(run) and run.stderr == "" and not list(tmp_path.iterdir())


def test_ranks_agree_on_what_is_drawn_and_measured(tiny, tmp_path):
    """Each rank is fast in another type, and draws a seed and a name of its own."""

    def before():
        own = [torch.float32, torch.bfloat16][int(os.environ["RANK"])]
        train_gpt.matmul_rate = lambda device, dtype, size: 2.0 if dtype == own else 1.0

    values = {**tiny, "steps": 1, "seed": -1, "dtype": "auto"}
    run = ranks.train(tmp_path, values, world_size=2, before=before)
    assert run.code == 0, run.stdout + run.stderr
    (folder,) = (tmp_path / "logs").iterdir()
    assert f"run:{folder.name} " in run.stdout and (folder / "result.json").exists()


# ----- schedules of whole runs: what follows from them, against a plain loop over the steps


def random_schedule(rng):
    """(Steps, starts of stages): most fall between steps, or so close to one that rounding could
    show."""
    steps = int(rng.integers(1, 60))
    starts = {0.0}
    for _ in range(rng.integers(4)):
        choices = [rng.random(), rng.integers(steps) / steps, 1 / 3, 0.1 * 7]
        starts.add(float(rng.choice(choices)))
    return steps, sorted(start for start in starts if start < 1)


def test_training_tokens_are_those_of_a_loop_over_the_steps():
    rng, uneven = np.random.default_rng(0), 0
    for _ in range(200):
        steps, starts = random_schedule(rng)
        rows = [(start, int(rng.integers(1, 50))) for start in starts]
        stages = [{"start": start, "micro_batches": count} for start, count in rows]
        values = {"steps": steps, "stages": stages}
        config = train_gpt.with_values(TRACKS["nano"], values)
        expected = 0
        for step in range(steps):
            count = [count for start, count in rows if start * steps <= step][-1]
            assert train_gpt.stage_at(config, step).micro_batches == count
            expected += count
        assert train_gpt.training_tokens(config) == config.micro_batch_tokens * expected
        uneven += any(start * steps % 1 for start in starts)
    assert 50 < uneven < 200


@pytest.mark.parametrize("adam_every", [1, 2, 3, 7])
@pytest.mark.parametrize("steps", [1, 4, 10, 21])
def test_the_head_is_untied_where_a_cycle_of_adam_begins(steps, adam_every):
    """Counted step by step: at the first beginning of a cycle that is no earlier than the nearest
    step says."""
    for untie_at in (0.0, 0.01, 0.25, 1 / 3, 0.5, 0.9, 1.0):
        config = tiny_config(steps=steps, untie_at=untie_at, adam_every=adam_every)
        asked, untied = round(untie_at * steps), 0
        while untied < asked:
            untied += adam_every
        assert train_gpt.untie_step(config) == untied
        for step in range(steps):
            is_tied = 0 < asked and step < untied
            assert train_gpt.training_phase(config, step).is_tied == is_tied
            # What a step has left behind is what it was trained as.
            assert train_gpt.is_tied_before(config, step + 1) == is_tied
        assert train_gpt.is_tied_before(config, 0) == (untied > 0)


# ----- a check that stops before the first step


def test_check_passes_on_a_good_configuration(cli, tiny, tmp_path):
    run = cli("--check", **tiny)
    assert run.code == 0 and run.stderr == "" and run.lines[-1] == "check:ok"
    for word in ("device: ", "back ends: ", "corpus: ", "parameters: ", "memory ", "disk "):
        assert sum(line.startswith(word) for line in run.lines) == 1, word
    needed = tiny["steps"] * tiny["micro_batches"] * tiny["micro_batch_tokens"]
    assert f" {needed:,};" in run.stdout
    sizes = re.search(
        r"^parameters: small ([\d,]+), embeddings ([\d,]+), ngram_table ([\d,]+), "
        r"matrices ([\d,]+)$",
        run.stdout,
        re.M,
    )
    model = train_gpt.GPT(tiny_config(), "sdpa")
    counted = [int(size.replace(",", "")) for size in sizes.groups()]
    weights = sum(param.numel() for param in model.parameters())
    assert counted[2] == 1000 * 32 and sum(counted) == counted[2] + weights
    banks = model.query_key, model.value_output, model.mlp
    assert counted[3] == sum(bank.numel() for bank in banks)
    assert not list(tmp_path.iterdir())  # it only looks


def test_check_of_a_run_that_exists_leaves_it_alone(cli, tiny, tmp_path):
    folder = tmp_path / "logs" / "mine"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("precious")
    run = cli("--check", **{**tiny, "run_id": "mine"})
    assert run.code == 0 and run.lines[-1] == "check:ok"
    assert (folder / "log.txt").read_text() == "precious" and len(list(folder.iterdir())) == 1


def test_check_of_a_resumption_only_looks(cli, rich_run, tmp_path):
    folder, left_out = tmp_path / "logs" / "rich", shutil.ignore_patterns("checkpoint.*")
    shutil.copytree(rich_run.folder, folder, ignore=left_out)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run = cli("--check", "--resume", "rich")
    assert run.code == 0 and run.lines[-1] == "check:ok"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_check_calls_what_another_script_prepares_and_takes_no_step(tiny, cli, monkeypatch):
    def main(words):
        return train_gpt.main(words, lambda config: prepared.append)

    prepared = []
    monkeypatch.setattr(train_gpt, "warm_up", lambda trainer: pytest.fail("a check trains"))
    run = cli("--check", **tiny, main=main)
    assert run.code == 0 and run.lines[-1] == "check:ok"
    assert len(prepared) == 1 and prepared[0].config.seed == 1


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")


@pytest.mark.parametrize("words", [[], ["--check"]], ids=str)
@pytest.mark.parametrize(
    "changes, hint",
    [
        ({"data": "nowhere"}, "nowhere"),
        ({"steps": 100_000}, "--steps"),
        ({"matrix_update": "moun"}, "matrix_update=moun: must be one of muon, soap"),
        pytest.param({"device": "cuda"}, "--device cpu", marks=NO_CUDA),
        pytest.param({"attention": "varlen"}, "--attention sdpa", marks=NO_CUDA),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_before_it_starts(changes, hint, words, cli, tiny, tmp_path):
    run = cli(*words, **{**tiny, **changes})
    assert hint in refusal(run) and not list(tmp_path.iterdir())


# ----- the file


@pytest.mark.slow
def test_importing_the_file_has_no_side_effects(tmp_path):
    script = """
import os, signal, sys, threading
import numpy, torch, torch.distributed
torch.manual_seed(5)
def state():
    return (torch.get_rng_state().tolist(), signal.getsignal(signal.SIGTERM),
            threading.active_count(), torch.get_float32_matmul_precision(),
            torch.get_default_dtype(), dict(os.environ), os.getcwd())
before = state()
import train_gpt
assert before == state()
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert "matplotlib" not in sys.modules and "tiktoken" not in sys.modules
"""
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**environment(), **launched, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout == done.stderr == "", done.stderr
    assert not list(tmp_path.iterdir())


def test_words_of_a_configuration_are_read_back(rich):
    """What the tests and other scripts build their commands with."""
    config, _ = train_gpt.config_from(train_gpt.parse_command_line(arguments(rich)))
    assert config == train_gpt.with_values(TRACKS["nano"], {**rich, "val_sha256": ""})
