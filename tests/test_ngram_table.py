"""The n-gram table on 1 to 8 ranks against slow dense references: values, bytes on the wire, whole runs, bad input."""
import functools
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import ngram_ranks
import train_gpt
from helpers import ROOT, Run, assert_bitwise, environment, make_trainer, ranks, refusal, tiny_config
from ngram_ranks import CASES, ORDERS, RESUMED, RUNS, VARIANTS, WORLD_SIZES, cycles_of, draw, owner_bounds
from train_gpt import ConfigError, NgramTable, Runtime, group, plan_rows, sum_groups

CASES_OF_VARIANTS = [(name, variant) for name, case in CASES.items() for variant in case.variants]
SHARDED = [(name, variant) for name, variant in CASES_OF_VARIANTS if variant in ("row_sharded", "host")]


@pytest.fixture(scope="module")
def left(corpus, tmp_path_factory):
    """The folder with all that ngram_ranks.py has left."""
    folder = tmp_path_factory.mktemp("ngram")
    command = [sys.executable, str(ROOT / "tests" / "ngram_ranks.py"), str(folder), str(corpus)]
    with subprocess.Popen(command, env={**environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}, text=True,
                          stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            _, err = process.communicate(timeout=220)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    return folder


@pytest.fixture(scope="module")
def results_of(left):
    """results_of(world size): one dict a rank."""
    return functools.cache(lambda world_size: [torch.load(left / f"table{world_size}" / f"rank{rank}.pt")
                                               for rank in range(world_size)])


@pytest.fixture(scope="module")
def run_of(left):
    """run_of(name) of RUNS and RESUMED: a Run with the words of all ranks, one after the other."""
    def run(name):
        folder = left / "runs" / name
        words = ["".join(path.read_text() for path in sorted(folder.glob(f"{kind}*.txt"))) for kind in ("out", "err")]
        return Run(int((folder / "code.txt").read_text()), *words, folder / "logs" / "run")
    return run


# ----- groups

@pytest.mark.parametrize("count", [0, 1, 7, 200])
def test_group_against_a_dict(count):
    ids = np.random.default_rng(count).integers(-3, 40, size=count).astype(np.int32)
    expected = {}
    for position, number in enumerate(ids.tolist()):
        expected.setdefault(number, []).append(position)
    distinct, positions, offsets = group(ids)
    assert distinct.tolist() == sorted(expected) and distinct.dtype == positions.dtype == offsets.dtype == np.int32
    bounds = [*offsets.tolist(), count]
    found = [positions[low:high].tolist() for low, high in zip(bounds, bounds[1:])]
    assert dict(zip(distinct.tolist(), found)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_sums_of_groups_against_float64(count, weighted, dtype):
    rng = np.random.default_rng(count)
    ids, weights = rng.integers(0, 40, size=count), torch.from_numpy(rng.standard_normal(count)).float()
    values = torch.from_numpy(rng.standard_normal((count, 5))).to(dtype)
    expected = torch.zeros(40, 5, dtype=torch.float64)
    for value, number, weight in zip(values.double(), ids, weights.double()):
        expected[number] += value * (weight if weighted else 1)
    distinct, positions, offsets = group(ids)
    positions, offsets = torch.from_numpy(positions), torch.from_numpy(offsets)
    sums = sum_groups(values, positions, offsets, weights[positions] if weighted else None)
    assert sums.dtype == torch.float32 and sums.shape == (len(set(ids)), 5)
    torch.testing.assert_close(sums.double(), expected[distinct], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all_of_uneven_and_empty_parts(world_size, results_of):
    for rank, result in enumerate(results_of(world_size)):
        found = result["exchanges"]
        parts = [ngram_ranks.sent_rows(source, rank, world_size) for source in range(world_size)]
        assert found["uneven"].tolist() == [[row] * 3 for part in parts for row in part]
        assert found["empty"].shape == (0, 5)
        abroad = [len(ngram_ranks.sent_rows(rank, other, world_size)) for other in range(world_size) if other != rank]
        if world_size == 1:
            assert found["ledger"] == {}
        else:
            assert found["ledger"] == {("all_to_all", "uneven"): [sum(abroad) * 12, sum(map(bool, abroad))],
                                       ("all_to_all", "empty"): [0, 0]}


# ----- values, against the dense update of the same rule

@functools.cache
def dense(name, world_size):
    """The whole table before each cycle and after the last, and its moments at the end: in float64, every row updated
    with the full matrix of gradients."""
    case, floor = CASES[name], tiny_config().ngram_floor
    start = ngram_ranks.start_of(name, world_size)
    weight, second = start["weight"].double(), start["second"].double()
    history = [weight.clone()]
    for cycle in cycles_of(case):
        grads = torch.zeros_like(weight)
        for step in cycle:
            for ids, signs, token_grads in draw(name, world_size, step):
                for column in range(ORDERS):
                    grads.index_add_(0, torch.from_numpy(ids[:, column]).long(),
                                     torch.from_numpy(signs[:, column:column + 1] * token_grads).double())
        lr = ngram_ranks.lr_at(case, cycle[-1])
        second += grads.square().mean(1)
        weight *= 1 - lr * case.decay
        weight -= lr * grads / (second + floor ** 2).sqrt()[:, None]
        history.append(weight.clone())
    return history, second


def assert_near(actual, expected, tolerance):
    """Each row differs by at most `tolerance` of its norm."""
    assert actual.shape == expected.shape
    differences, sizes = (rows[:, None].flatten(1).norm(dim=1) for rows in (actual.double() - expected, expected))
    assert (differences <= tolerance * sizes).all(), (differences / sizes).max()


def tolerance_of(name):
    return 1e-5 if CASES[name].steps > 50 else 1e-6


@pytest.mark.parametrize("name, variant", CASES_OF_VARIANTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_table_equals_the_dense_update(world_size, name, variant, results_of):
    full = results_of(world_size)[0]["cases"][name][variant]["full"]
    history, second = dense(name, world_size)
    assert_near(full["weight"] * full["scale"], history[-1], tolerance_of(name))
    assert_near(full["second"], second, tolerance_of(name))
    read = np.unique(np.concatenate([ids.ravel() for step in range(CASES[name].steps)
                                     for ids, _, _ in draw(name, world_size, step)]))
    never = np.setdiff1d(np.arange(len(second)), read)
    start = ngram_ranks.start_of(name, world_size)
    for key in ("weight", "second"):  # rows that nobody reads do not change, but for the scale
        assert_bitwise(full[key][never], start[key][never])
    assert not len(read) or (history[-1] - history[0]).abs().max() > 0.05


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replicas_are_the_same_on_all_ranks(world_size, results_of):
    first, *others = [result["cases"] for result in results_of(world_size)]
    for name, variant in CASES_OF_VARIANTS:
        for other in others:
            assert_bitwise(other[name][variant]["replica"], first[name][variant]["replica"])
            assert other[name][variant]["full"]["scale"] == first[name][variant]["full"]["scale"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_pulled_rows_are_those_of_the_dense_table_at_that_time(world_size, results_of):
    for result in results_of(world_size):
        for name, variant in SHARDED:
            pulled, (history, _) = result["cases"][name][variant]["pulled"], dense(name, world_size)
            assert {number for number, _, _ in pulled} == set(range(len(history) - 1))
            for number, rows, values in pulled:
                assert_near(values, history[number][rows], tolerance_of(name))


def test_the_cases_are_as_awkward_as_they_are_meant_to_be():
    assert [owner_bounds(CASES["shares that are empty"], 4, rank) for rank in range(4)] == [
        (0, 2), (2, 4), (4, 5), (5, 5)]
    rested = {row for step in range(50, 150) for ids, _, _ in draw("decay", 2, step) for row in ids.ravel()}
    before, after = ({row for step in steps for ids, _, _ in draw("decay", 2, step) for row in ids.ravel()}
                     for steps in (range(50), range(150, 200)))
    assert len((before & after) - rested) > 20 and max(before | after) < 55  # some rest for 100 steps, some for ever
    sizes = {sum(len(ids) for ids, _, _ in draw("three steps a cycle", 2, step)) for step in range(7)}
    assert len(sizes) == 3


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_table_in_host_memory_is_the_same_table(world_size, results_of):
    for result in results_of(world_size):
        for name in ("one step", "two steps a cycle"):
            variants = result["cases"][name]
            assert_bitwise(variants["host"], variants["row_sharded"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a table beside the device needs a device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_table_on_or_beside_the_device_is_the_table_on_the_cpu(variant):
    name = "two steps a cycle"
    full = ngram_ranks.take_steps(name, variant, Runtime("cuda"))["full"]
    history, second = dense(name, 1)
    assert_near(full["weight"] * full["scale"], history[-1], 1e-6)
    assert_near(full["second"], second, 1e-6)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_full_state_goes_from_one_way_of_communication_to_another(world_size, results_of):
    results = [result["cases"]["two steps a cycle"] for result in results_of(world_size)]
    for variant, result in results[0].items():
        for comms, full in result["reloaded"].items():
            assert_bitwise(full, result["full"], f"{variant} to {comms}")
    if world_size > 1:  # only the first rank holds the whole of a table that is shared out
        assert results[1]["row_sharded"]["full"]["weight"] is None


# ----- the ledger, against an independent count

def distinct_reads(name, world_size):
    """For each cycle and rank, the set of rows that the rank reads."""
    return [[{row for step in cycle for ids, _, _ in draw(name, world_size, step)[rank::world_size]
              for row in ids.ravel().tolist()} for rank in range(world_size)] for cycle in cycles_of(CASES[name])]


def counted(name, variant, world_size, me):
    """{collective/name: (bytes, messages)} that rank `me` should have sent, counted from sets of rows."""
    case, peers = CASES[name], [rank for rank in range(world_size) if rank != me]
    counts, row = {}, 4 * case.dim
    def count(key, size, messages):
        before = counts.get(key, (0, 0))
        counts[key] = before[0] + size, before[1] + messages
    def owned_by(rank, rows):
        low, high = owner_bounds(case, world_size, rank)
        return sum(low <= number < high for number in rows)
    def send(key, to_peers, size):
        count(key, sum(to_peers) * size, sum(map(bool, to_peers)))
    for cycle, reads in zip(cycles_of(case), distinct_reads(name, world_size)):
        if variant == "tokens":
            tokens = sum(len(ids) for step in cycle for ids, _, _ in draw(name, world_size, step)[me::world_size])
            count("all_gather/ngram_table", tokens * row * len(peers), len(peers))
            continue
        asked = [owned_by(rank, reads[me]) for rank in peers]
        count("all_to_all/ngram_indices", 4 * len(peers), len(peers))
        send("all_to_all/ngram_indices", asked, 4)
        send("all_to_all/ngram_table", asked, row)
        if variant == "rows":
            updated = [owned_by(rank, set().union(*reads)) for rank in range(world_size)]
            count("all_to_all/ngram_updated", 4 * len(peers), len(peers))
            send("all_to_all/ngram_updated", [updated[me]] * len(peers), 4)
            count("all_gather/ngram_table", max(updated) * row * len(peers), len(peers))
        else:
            send("all_to_all/ngram_table", [owned_by(me, reads[rank]) for rank in peers], row)
    return counts if peers else {}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_ledger_is_an_independent_count(world_size, results_of):
    for rank, result in enumerate(results_of(world_size)):
        for name, variant in CASES_OF_VARIANTS:
            ledger = {key: value for key, value in result["cases"][name][variant]["ledger"].items()
                      if not key.endswith("validation")}
            assert ledger == counted(name, variant, world_size, rank), (name, variant, rank)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_own_rows_never_travel(world_size, results_of):
    for result in results_of(world_size):
        for variant in ("rows", "row_sharded"):
            assert result["cases"]["own rows alone"][variant]["ledger"]["all_to_all/ngram_table"] == (0, 0)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_bytes_are_close_to_the_lower_bound(world_size, results_of):
    """Each foreign row once, however many tokens read it; for `rows`, each updated row to all the others."""
    case = CASES["wide"]
    def sent(variant, *keys):
        ledgers = [result["cases"]["wide"][variant]["ledger"] for result in results_of(world_size)]
        return sum(ledger[key][0] for ledger in ledgers for key in keys)
    def foreign(reads, rank):
        low, high = owner_bounds(case, world_size, rank)
        return sum(not low <= row < high for row in reads)
    cycles = distinct_reads("wide", world_size)
    one_way = 4 * case.dim * sum(foreign(reads, rank) for cycle in cycles for rank, reads in enumerate(cycle))
    spread = 4 * case.dim * (world_size - 1) * sum(len(set().union(*cycle)) for cycle in cycles)
    there = "all_to_all/ngram_indices", "all_to_all/ngram_table"
    updated = "all_to_all/ngram_updated", "all_gather/ngram_table"
    assert 1 <= sent("rows", *there) / one_way < 1.1
    assert 1 <= sent("rows", *updated) / spread < 1.1
    assert 1 <= sent("row_sharded", *there) / (2 * one_way) < 1.1


# ----- whole runs

WORKING = [name for name in RUNS if "," not in name and name != "few rows"]


@pytest.mark.parametrize("name", WORKING)
def test_losses_depend_on_neither_ranks_nor_communication(name, run_of):
    run = run_of(name)
    assert run.code == 0 and run.lines[-1].startswith("status:ok "), run.stdout + run.stderr
    alone = run_of(f"tokens {RUNS[name][1]['ngram_every']} 1")
    assert list(run.train_losses) == [1, 2, 3, 4, 5, 6] and list(run.val_losses) == [2, 4, 6]
    for losses, expected in ((run.train_losses, alone.train_losses), (run.val_losses, alone.val_losses)):
        assert losses == pytest.approx(expected, abs=1e-4)
    assert run.train_losses[6] < run.train_losses[1] - 0.3
    assert len(run.result["peak_memory_mib_by_rank"]) == RUNS[name][0]
    table, other = run.checkpoint()["ngram_table"], alone.checkpoint()["ngram_table"]
    assert table["weight"].shape == (1000, 32) and table["scale"] == other["scale"] < 1
    torch.testing.assert_close(table["second"], other["second"], atol=1e-3, rtol=1e-2)


def test_the_cycles_length_matters(run_of):
    assert run_of("tokens 1 1").train_losses[6] != pytest.approx(run_of("tokens 4 1").train_losses[6], abs=1e-3)


def test_a_table_in_host_memory_trains_alike(run_of):
    host, device = run_of("host"), run_of("row_sharded 4 2")
    assert (host.train_losses, host.val_losses) == (device.train_losses, device.val_losses)
    assert_bitwise(host.checkpoint()["ngram_table"], device.checkpoint()["ngram_table"])


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_as_the_whole_one(name, run_of):
    former, world_size = RESUMED[name]
    run, whole = run_of(name), run_of(former)
    assert run.code == 0, run.stdout + run.stderr
    assert f"resumed:run step:4/6 world_size:{world_size}" in run.lines
    if world_size == 2:
        assert run.train_losses == whole.train_losses
        for part in ("model", "optimizer", "ngram_table", "loader", "rng"):
            assert_bitwise(run.checkpoint()[part], whole.checkpoint()[part], part)
    else:
        assert run.train_losses == pytest.approx(whole.train_losses, abs=1e-4)
        assert run.result["val_loss"] == pytest.approx(whole.result["val_loss"], abs=1e-4)


@pytest.mark.parametrize("comms", ["rows", "row_sharded"])
def test_a_trained_table_is_used_by_one_process(comms, run_of, cli, monkeypatch):
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    trained = run_of(f"{comms} 4 2")
    evaluated = cli("eval", "--checkpoint", trained.folder / "checkpoint.pt")
    assert evaluated.code == 0, evaluated.stdout
    found = float(re.match(r"eval val_loss:(\S+) ", evaluated.stdout)[1])
    assert found == pytest.approx(trained.result["val_loss"], abs=1e-4)
    sampled = cli("sample", "--checkpoint", trained.folder / "checkpoint.pt", "--prompt", "def f(", "--tokens", 3)
    assert sampled.code == 0 and sampled.stdout.startswith("def f("), sampled.stdout


def test_the_ledger_of_a_run_is_logged(run_of, corpus):
    """The first rank's indices and values, counted from the tokens, in the log and in result.json."""
    run = run_of("row_sharded 4 2")
    line, = (line for line in run.lines if line.startswith("comms: "))
    words = dict(re.findall(r"(\w+/[\w ]+)=(\d+\([0-9.e+]+\))", line))
    result = run.result
    assert words == {key: f"{size:.0f}({result['sent_messages_per_step'][key]:g})"
                     for key, size in result["sent_bytes_per_step"].items()}
    config = tiny_config(**{**ngram_ranks.COMMON, "data": str(corpus), "ngram_every": 4})
    loader = train_gpt.TrainLoader(config, train_gpt.open_corpus(config)[0], ranks(1)[0])
    batches = [loader.next() for _ in range(config.steps)]
    loader.close()
    foreign = 0, 0
    for first in (0, 4):
        reads = [torch.cat([micro_batch.rows.ravel() for batch in batches[first:first + 4]
                            for micro_batch in batch.micro_batches[rank::2]]).unique() for rank in (0, 1)]
        foreign = foreign[0] + (reads[0] >= 500).sum().item(), foreign[1] + (reads[1] < 500).sum().item()
    sent, messages = result["sent_bytes_per_step"], result["sent_messages_per_step"]
    assert sent["all_to_all/ngram_table"] == pytest.approx(sum(foreign) * 32 * 4 / 6, abs=0.1)
    assert sent["all_to_all/ngram_indices"] == pytest.approx((foreign[0] + 2) * 4 / 6, abs=0.1)
    assert messages["all_to_all/ngram_table"] == messages["all_to_all/ngram_indices"] == 0.7  # two a cycle
    assert not [key for key in sent if "validation" in key]


def test_the_ledger_counts_the_training_steps_of_this_process(run_of):
    """What a bank sends in a step is neither raised by checkpoints on the way nor lowered by the steps before a resume."""
    pairs = [names for names in RESUMED.items() if names[1][1] == 2]
    assert pairs
    for resumed, (former, _) in pairs:
        for result in (run_of(resumed).result, run_of(former).result):
            config = result["config"]
            assert config["dtype"] == "float32" and config["save_every"]
            bank = 4 * 2 * config["num_layers"] * config["mlp_dim"] * config["model_dim"]
            assert result["sent_bytes_per_step"]["all_gather/mlp"] == bank / 2
            assert result["sent_messages_per_step"]["all_gather/mlp"] == 1


# ----- bad input, and failures on the way

@pytest.mark.parametrize("comms", ["rows", "row_sharded"])
def test_a_failure_in_the_loaders_thread_of_one_rank_is_told_in_one_line(comms, run_of):
    run = run_of(f"{comms}, wrong")
    assert run.code != 0
    told, = (line for line in run.stderr.splitlines() if str(ngram_ranks.WRONG_ROW) in line)
    assert told.startswith("rank 1: error n-gram rows ") and "--ngram-rows" in told
    assert run.lines[-1].startswith("status:") and "status:ok" not in run.stdout


@pytest.mark.parametrize("comms", ["rows", "row_sharded"])
def test_a_diverged_run_ends_while_loaders_talk_to_each_other(comms, run_of):
    run = run_of(f"{comms}, diverging")
    assert run.code == 1 and run.lines[-1].startswith("status:nan "), run.stdout + run.stderr
    assert 1 <= len(run.train_losses) < 40


@pytest.mark.parametrize("comms", ["tokens", "rows", "row_sharded"])
@pytest.mark.parametrize("when", ["always", "in the loader"])
def test_a_hash_that_leaves_the_table_is_refused(when, comms, tiny, cli, monkeypatch):
    honest = train_gpt.ngram_rows

    def wrong(*words):
        rows, signs = honest(*words)
        if when == "always" or threading.current_thread() is not threading.main_thread():
            rows[7, 1] = 1000
        return rows, signs

    monkeypatch.setattr(train_gpt, "ngram_rows", wrong)
    run = cli(**{**tiny, "run_id": "wrong", "ngram_comms": comms})
    assert run.code == 2
    assert re.match(r"status:error n-gram rows \d+ to 1000: .*0 to 999.*--ngram-rows", run.lines[-1])
    assert not any(line.startswith("step:") for line in run.lines) and "Traceback" not in run.stderr


def test_fewer_rows_than_ranks_are_refused(run_of):
    run = run_of("few rows")
    line = refusal(run)
    assert "ngram_rows=3" in line and "world size 4" in line and "--ngram-rows" in line
    assert not run.folder.parent.exists()


@pytest.fixture
def memory(monkeypatch):
    """memory(n): n bytes are free everywhere."""
    return lambda free: monkeypatch.setattr(train_gpt, "available_memory", lambda device: free)


@pytest.mark.parametrize("world_size, changes, rows", [
    (1, {}, 1000), (4, {"ngram_comms": "tokens"}, 1000), (4, {"ngram_comms": "row_sharded"}, 250),
    (4, {"ngram_comms": "row_sharded", "ngram_host": True}, 250)], ids=str)
def test_a_table_that_just_fits_is_made(world_size, changes, rows, memory):
    runtime = Runtime("cpu")
    runtime.world_size = world_size
    needed = 4 * rows * 33
    memory(needed)
    assert NgramTable(tiny_config(**changes), runtime).weight.shape == (rows, 32)
    memory(needed - 1)
    with pytest.raises(ConfigError, match=rf"ngram_rows=1,000.* {rows:,} rows .*--ngram-rows"):
        NgramTable(tiny_config(**changes), runtime)


def test_ranks_share_the_memory_of_their_host(memory, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    memory(3 * 4 * 1000 * 33)
    NgramTable(tiny_config(), Runtime("cpu"))
    memory(3 * 4 * 1000 * 33 - 3)
    with pytest.raises(ConfigError, match="ngram_rows"):
        NgramTable(tiny_config(), Runtime("cpu"))


@pytest.mark.parametrize("words", [[], ["--ngram-comms", "row_sharded", "--ngram-host", "true"]], ids=str)
def test_a_table_that_does_not_fit_ends_the_run_before_it_starts(words, memory, tiny, cli, tmp_path):
    memory(100_000)
    line = refusal(cli(*words, **tiny))
    assert "ngram_rows=1,000" in line and "--ngram-rows" in line
    assert not (tmp_path / "logs").exists()


def test_the_estimate_counts_the_rows_of_one_rank():
    sharded, replicated = (tiny_config(ngram_rows=100_000, ngram_comms=comms) for comms in ("row_sharded", "rows"))
    estimates = [train_gpt.memory_estimate(config, 4) for config in (sharded, replicated)]
    assert estimates[1] - estimates[0] == 75_000 * 33 * 4
    assert train_gpt.memory_estimate(sharded) == estimates[1]
