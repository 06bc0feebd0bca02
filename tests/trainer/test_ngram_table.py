"""Chapter 4: the n-gram table on 1 to 8 ranks against slow dense references: values, bytes on the wire, whole runs, bad
input."""
import functools
import re
import shutil
import threading

import numpy as np
import pytest
import torch

import ngram_cases
import ranks
import sabotage
import train_gpt
from helpers import NO_TABLE, assert_bitwise, byte_documents, make_trainer, read, tiny_config
from ngram_cases import (ALL, CASES, COMMON, FAILING, ORDERS, RESUMED, RUNS, VARIANTS, WORLD_SIZES, draw,
                         owner_bounds)
from train_gpt import NgramTable, Runtime, group_equal, sum_groups


@pytest.fixture(scope="module")
def results_of():
    """results_of(world size): what `tables` returns on each rank."""
    @functools.cache
    def results(world_size):
        for name, case in CASES.items():  # ranks inherit what this process has drawn
            for step in range(case.steps * (world_size in case.world_sizes)):
                draw(name, world_size, step)
        return ranks.on_ranks(world_size, ngram_cases.tables)
    return results


@pytest.fixture(scope="module")
def run_of(corpus, tmp_path_factory):
    """run_of(name) of RUNS, FAILING and RESUMED: a helpers.Run; each is run once."""
    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("run")
        if name in RESUMED:
            former, world_size = RESUMED[name]
            shutil.copytree(run(former).folder, folder / "logs" / "run", ignore=shutil.ignore_patterns("checkpoint.*"))
            resumed = ranks.train(folder, {"resume": "run"}, world_size=world_size)
            resumed.folder = folder / "logs" / "run"
            return resumed
        one = {**RUNS, **FAILING}[name]
        return ranks.train(folder, {**COMMON, "data": corpus, **one.values}, world_size=one.world_size,
                           before=ngram_cases.sabotage_of(name))
    return run


# ----- groups

@pytest.mark.parametrize("count", [0, 1, 7, 200])
def test_group_equal_against_a_dict(count):
    ids = np.random.default_rng(count).choice([0, 1, 2, 7, 65535, 65536, 2**20, 2**31 - 1], size=count).astype(np.int32)
    expected = {}
    for position, number in enumerate(ids.tolist()):
        expected.setdefault(number, []).append(position)
    distinct, positions, offsets = group_equal(ids)
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
    distinct, positions, offsets = group_equal(ids)
    positions, offsets = torch.from_numpy(positions), torch.from_numpy(offsets)
    sums = sum_groups(values, positions, offsets, weights[positions] if weighted else None)
    assert sums.dtype == torch.float32 and sums.shape == (len(set(ids)), 5)
    torch.testing.assert_close(sums.double(), expected[distinct], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all_of_uneven_and_empty_parts(world_size, results_of):
    for rank, result in enumerate(results_of(world_size)):
        found = result["exchanges"]
        parts = [ngram_cases.sent_rows(source, rank, world_size) for source in range(world_size)]
        assert found["uneven"].tolist() == [[row] * 3 for part in parts for row in part]
        assert found["empty"].shape == (0, 5)
        abroad = [len(ngram_cases.sent_rows(rank, other, world_size)) for other in range(world_size) if other != rank]
        if world_size == 1:
            assert found["ledger"] == {}
        else:
            assert found["ledger"] == {("all_to_all", "uneven"): [sum(abroad) * 12, sum(map(bool, abroad))],
                                       ("all_to_all", "empty"): [0, 0]}


# ----- values, against the dense update of the same rule

@functools.cache
def dense(name, world_size):
    """The whole table before each step and after the last, and its moments at the end: in float64, every row updated
    with the full matrix of gradients."""
    case, config = CASES[name], tiny_config()
    start = ngram_cases.start_of(name, world_size)
    weight, second = start["weight"].double(), start["second"].double()
    history = [weight.clone()]
    for step in range(case.steps):
        grads = torch.zeros_like(weight)
        for ids, signs, token_grads in draw(name, world_size, step):
            for column in range(ORDERS):
                grads.index_add_(0, torch.from_numpy(ids[:, column]).long(),
                                 torch.from_numpy(signs[:, column:column + 1] * token_grads).double())
        lr = config.ngram_lr * ngram_cases.lr_multiplier(case, step)
        second += grads.square().mean(1)
        weight *= 1 - lr * case.decay
        weight -= lr * grads / (second + config.ngram_floor ** 2).sqrt()[:, None]
        history.append(weight.clone())
    return torch.stack(history), second


def assert_near(actual, expected, tolerance):
    """Each row (..., d) differs by at most `tolerance` of its norm; what decay has left below 1e-30 counts as zero."""
    assert actual.shape == expected.shape
    differences, sizes = (rows.norm(dim=-1) for rows in (actual.double() - expected, expected))
    assert (differences <= tolerance * sizes + 1e-30).all(), (differences / sizes).max()


def tolerance_of(name):
    return 1e-5 if CASES[name].steps > 50 else 1e-6


@pytest.mark.parametrize("world_size, name, variant", ALL)
def test_the_table_equals_the_dense_update(world_size, name, variant, results_of):
    full = results_of(world_size)[0]["cases"][name, variant]["full"]
    history, second = dense(name, world_size)
    assert_near(full["weight"] * full["scale"], history[-1], tolerance_of(name))
    assert_near(full["second"][:, None], second[:, None], tolerance_of(name))
    assert not history[-1].isclose(history[0]).all() or name == "an idle rank" and world_size == 1


@pytest.mark.parametrize("world_size, name, variant", [one for one in ALL if "folds" not in one[1]])
def test_rows_that_nobody_reads_stay_bitwise(world_size, name, variant, results_of):
    full, start = results_of(world_size)[0]["cases"][name, variant]["full"], ngram_cases.start_of(name, world_size)
    steps = range(CASES[name].steps)
    known = np.concatenate([ids.ravel() for step in steps for ids, _, _ in draw(name, world_size, step)])
    never = np.setdiff1d(np.arange(len(full["weight"])), known)
    for key in ("weight", "second"):  # decay is in the scale alone
        assert_bitwise(full[key][never], start[key][never])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replicas_are_the_same_on_all_ranks(world_size, results_of):
    first, *others = [result["cases"] for result in results_of(world_size)]
    for case, result in first.items():
        for other in others:
            assert_bitwise(other[case]["replica"], result["replica"])
            assert other[case]["full"]["scale"] == result["full"]["scale"]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rows_that_are_read_are_those_of_the_dense_table_at_that_time(world_size, results_of):
    for result in results_of(world_size):
        for (name, _), left in result["cases"].items():
            history, _ = dense(name, world_size)
            assert {number for number, _, _ in left["seen"]} == set(range(len(history) - 1))
            for number, rows, values in left["seen"]:
                assert_near(values, history[number, rows.long()], tolerance_of(name))


def test_the_cases_are_as_awkward_as_they_are_meant_to_be(results_of):
    assert [owner_bounds(CASES["shares that are empty"], 4, rank) for rank in range(4)] == [
        (0, 2), (2, 4), (4, 5), (5, 5)]
    sizes = {sum(len(ids) for ids, _, _ in draw("half as many rows", 2, step)) for step in range(7)}
    assert len(sizes) == 3
    name = "decay and folds"
    history, _ = dense(name, 2)
    rows = [{row for ids, _, _ in draw(name, 2, step) for row in ids.ravel().tolist()} for step in range(1000)]
    assert len(set().union(*rows)) > 20 and max(set().union(*rows)) < 25
    assert any(row in rows[249] & rows[499] for row in range(10, 25))  # such a row has slept through a fold
    assert not any(row >= 10 for step in range(250, 499) for row in rows[step])
    assert history[-1, 25:].abs().max() < 1e-25  # nothing is left of rows that are never read
    for variant in VARIANTS:
        if (name, variant) in results_of(2)[0]["cases"]:
            scale = results_of(2)[0]["cases"][name, variant]["full"]["scale"]
            assert NgramTable.FOLD_BELOW <= scale < 1
            without = np.prod([1 - 0.1 * ngram_cases.lr_multiplier(CASES[name], step) for step in range(1000)])
            assert scale > without * 2**60  # it has folded more than twice


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_table_in_host_memory_is_the_same_table(world_size, results_of):
    for result in results_of(world_size):
        for name in ("one step", "decay"):
            assert_bitwise(result["cases"][name, "host"], result["cases"][name, "sharded"])


def test_one_rank_has_one_table_whatever_communicates(results_of):
    cases = results_of(1)[0]["cases"]
    for name in CASES:
        one, other = ({key: cases[name, variant][key] for key in ("full", "seen", "ledger")}
                      for variant in ("replicated", "sharded"))
        assert_bitwise(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a table beside the device needs a device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_table_on_or_beside_the_device_is_the_table_on_the_cpu(variant):
    name = "decay"
    full = ngram_cases.take_steps(name, variant, Runtime("cuda"))["full"]
    history, second = dense(name, 1)
    assert_near(full["weight"] * full["scale"], history[-1], 1e-6)
    assert_near(full["second"][:, None], second[:, None], 1e-6)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_full_state_goes_from_one_way_of_communication_to_another(world_size, results_of):
    results = [result["cases"] for result in results_of(world_size)]
    for variant in VARIANTS:
        left = results[0]["decay", variant]
        assert left["reloaded"].keys() == {"replicated", "sharded"}
        for comms, full in left["reloaded"].items():
            assert_bitwise(full, left["full"], f"{variant} to {comms}")
        for other in results[1:]:  # all ranks get the whole
            assert_bitwise(other["decay", variant]["full"], left["full"])


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_warm_up_puts_a_table_back_that_folds_on_the_way(world_size, comms):
    for folds, before, after in ranks.on_ranks(world_size, ngram_cases.warm_up_before_a_fold, comms):
        assert folds == 1
        assert_bitwise(after, before)


# ----- a table that does not learn

def test_without_ngrams_the_table_is_empty_and_frozen():
    trainer = make_trainer(**NO_TABLE)
    table = trainer.table
    assert table.size() == 0 and table.weight.shape == (0, 32) and table.frozen and not table.due(3)
    assert read(trainer, byte_documents(300))[1] is None
    full = table.full_state()
    assert full["weight"].numel() == full["second"].numel() == 0
    table.load(full)


def test_a_table_without_a_learning_rate_is_read_but_never_changes(corpus):
    (alone, before, after), = ranks.on_ranks(1, ngram_cases.steps_with_a_frozen_table, corpus, "replicated")
    assert alone[2] < alone[0] - 0.1  # the rest learns
    assert_bitwise(after, before)
    for comms in ("replicated", "sharded"):
        first, second = ranks.on_ranks(2, ngram_cases.steps_with_a_frozen_table, corpus, comms)
        assert first[0] == second[0] == pytest.approx(alone, abs=1e-4)
        assert_bitwise(first[2], before)
    trainer = make_trainer(ngram_lr=0.0)
    summed = read(trainer, byte_documents(300))[1]
    assert summed.any() and not summed.requires_grad


# ----- the ledger, against an independent count

def distinct_reads(name, world_size):
    """For each step and rank, the set of rows that the rank reads."""
    return [[{row for ids, _, _ in draw(name, world_size, step)[rank::world_size] for row in ids.ravel().tolist()}
             for rank in range(world_size)] for step in range(CASES[name].steps)]


def counted(name, variant, world_size, me):
    """{collective/name: (bytes, messages)} that rank `me` should have sent, counted from sets of rows."""
    case, peers = CASES[name], [rank for rank in range(world_size) if rank != me]
    counts, row, planned = {}, 4 * case.dim, set()
    def count(key, size, messages):
        before = counts.get(key, (0, 0))
        counts[key] = before[0] + size, before[1] + messages
    def owned_by(rank, rows):
        low, high = owner_bounds(case, world_size, rank)
        return sum(low <= number < high for number in rows)
    def send(key, to_peers, size):
        count(key, sum(to_peers) * size, sum(map(bool, to_peers)))
    for step, reads in enumerate(distinct_reads(name, world_size)):
        asked = [owned_by(rank, reads[me]) for rank in peers]
        updated = [owned_by(rank, set().union(*reads)) for rank in range(world_size)]
        pattern = ngram_cases.pattern_of(case, step)
        if pattern not in planned:
            planned.add(pattern)
            count("all_to_all/ngram_indices", 4 * len(peers), len(peers))
            send("all_to_all/ngram_indices", asked, 4)
            for size in (4, max(updated) * 4) if variant == "replicated" else ():  # how many rows, and which
                count("all_gather/ngram_updated", size * len(peers), len(peers))
        send("all_to_all/ngram_table", asked, row)
        if variant == "replicated":
            count("all_gather/ngram_table", max(updated) * row * len(peers), len(peers))
        else:
            send("all_to_all/ngram_table", [owned_by(me, reads[rank]) for rank in peers], row)
    return counts if peers else {}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_ledger_is_an_independent_count(world_size, results_of):
    for rank, result in enumerate(results_of(world_size)):
        for (name, variant), left in result["cases"].items():
            ledger = {key: value for key, value in left["ledger"].items() if not key.endswith("validation")}
            assert ledger == counted(name, variant, world_size, rank), (name, variant, rank)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_own_rows_never_travel(world_size, results_of):
    for result in results_of(world_size):
        for variant in ("replicated", "sharded"):
            assert result["cases"]["own rows alone", variant]["ledger"]["all_to_all/ngram_table"] == (0, 0)


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_bytes_are_close_to_the_lower_bound(world_size, results_of):
    """Each foreign row once, however many tokens read it; for `replicated`, each updated row to all the others."""
    case = CASES["wide"]
    def sent(variant, *keys):
        ledgers = [result["cases"]["wide", variant]["ledger"] for result in results_of(world_size)]
        return sum(ledger[key][0] for ledger in ledgers for key in keys)
    def foreign(reads, rank):
        low, high = owner_bounds(case, world_size, rank)
        return sum(not low <= row < high for row in reads)
    steps = distinct_reads("wide", world_size)
    one_way = 4 * case.dim * sum(foreign(reads, rank) for step in steps for rank, reads in enumerate(step))
    spread = 4 * case.dim * (world_size - 1) * sum(len(set().union(*step)) for step in steps)
    there = "all_to_all/ngram_indices", "all_to_all/ngram_table"
    updated = "all_gather/ngram_updated", "all_gather/ngram_table"
    assert 1 <= sent("replicated", *there) / one_way < 1.1
    assert 1 <= sent("replicated", *updated) / spread < 1.1
    assert 1 <= sent("sharded", *there) / (2 * one_way) < 1.1


# ----- whole runs

@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.alone])
def test_losses_depend_on_neither_ranks_nor_communication(name, run_of):
    run, alone = run_of(name), run_of(RUNS[name].alone)
    assert run.code == 0 and run.lines[-1].startswith("status:ok "), run.stdout + run.stderr
    assert list(run.train_losses) == [1, 2, 3, 4, 5, 6] and list(run.val_losses) == [2, 4, 6]
    for losses, expected in ((run.train_losses, alone.train_losses), (run.val_losses, alone.val_losses)):
        assert losses == pytest.approx(expected, abs=1e-4)
    assert run.train_losses[6] < run.train_losses[1] - 0.3
    assert len(run.result["peak_memory_mib_by_rank"]) == RUNS[name].world_size
    table, other = (run.checkpoint()["groups"]["ngram_table"] for run in (run, alone))
    assert table["weight"].shape == other["weight"].shape and table["scale"] == other["scale"]
    torch.testing.assert_close(table["second"], other["second"], atol=1e-3, rtol=1e-2)


def test_the_runs_differ_from_each_other(run_of):
    """By the size of the table: else their comparisons show nothing."""
    assert COMMON["val_tokens"] // COMMON["micro_batch_tokens"] == 5  # some ranks have no last one
    assert run_of("alone").checkpoint()["groups"]["ngram_table"]["scale"] < 1
    ends = [run.train_losses[6] for run in map(run_of, RUNS) if run.result["world_size"] == 1]
    assert len(ends) == 4 and len({round(loss, 3) for loss in ends}) == 3  # the plain table is there twice


def test_a_table_in_host_memory_trains_alike(run_of):
    host, device = run_of("host"), run_of("sharded 2")
    assert (host.train_losses, host.val_losses) == (device.train_losses, device.val_losses)
    assert_bitwise(host.checkpoint()["groups"], device.checkpoint()["groups"])


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_as_the_whole_one(name, run_of):
    former, world_size = RESUMED[name]
    run, whole = run_of(name), run_of(former)
    assert run.code == 0, run.stdout + run.stderr
    assert f"resumed:run step:4/6 world_size:{world_size}" in run.lines
    if world_size == 2:
        assert run.train_losses == whole.train_losses
        for part in ("model", "groups", "loader", "rng"):
            assert_bitwise(run.checkpoint()[part], whole.checkpoint()[part], part)
    else:
        assert run.train_losses == pytest.approx(whole.train_losses, abs=1e-4)
        assert run.result["val_loss"] == pytest.approx(whole.result["val_loss"], abs=1e-4)


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_a_trained_table_is_used_by_one_process(comms, run_of):
    run = run_of(f"{comms} 2")
    content = run.checkpoint()
    trainer = train_gpt.Trainer(train_gpt.config_of_checkpoint(content), Runtime("cpu"))
    assert trainer.config.ngram_comms == comms
    train_gpt.restore(trainer, content)
    *_, val = train_gpt.open_corpus(trainer.config)
    assert trainer.evaluate(content["step"], val) == pytest.approx(run.result["val_loss"], abs=1e-6)


def test_the_ledger_of_a_run_is_logged(run_of, corpus):
    """The first rank's indices and values, counted from the tokens, in the log and in result.json."""
    run = run_of("sharded 2")
    line, = (line for line in run.lines if line.startswith("comms: "))
    words = dict(re.findall(r"(\w+/[\w ]+)=(\d+\([0-9.e+]+\))", line))
    result = run.result
    assert words == {key: f"{size:.0f}({messages:g})" for key, (size, messages) in result["sent_per_step"].items()}
    config = tiny_config(**{**COMMON, "data": str(corpus)})
    (shards, indexed, _), index = train_gpt.open_corpus(config), train_gpt.TextIndex(config)
    index.read(indexed, Runtime("cpu"))
    loader = train_gpt.TrainLoader(config, shards, Runtime("cpu"), index=index)
    batches = [loader.next() for _ in range(config.steps)]
    loader.close()
    foreign = 0, 0
    for batch in batches:
        reads = [torch.cat([micro_batch.slots.ravel() for micro_batch in batch.micro_batches[rank::2]]).unique()
                 for rank in (0, 1)]
        foreign = foreign[0] + (reads[0] >= 500).sum().item(), foreign[1] + (reads[1] < 500).sum().item()
    sent = result["sent_per_step"]  # [bytes, messages]
    assert sent["all_to_all/ngram_table"] == [pytest.approx(sum(foreign) * 32 * 4 / 6, abs=0.1), 2]
    assert sent["all_to_all/ngram_indices"] == [pytest.approx((foreign[0] + 6) * 4 / 6, abs=0.1), 2]
    assert not [key for key in sent if "validation" in key]


def test_the_ledger_counts_the_training_steps_of_this_process(run_of):
    """What a bank sends in a step is neither raised by checkpoints on the way nor lowered by steps before a resume."""
    pairs = [names for names in RESUMED.items() if names[1][1] == 2]
    assert pairs
    for resumed, (former, _) in pairs:
        for result in (run_of(resumed).result, run_of(former).result):
            config = result["config"]
            assert config["dtype"] == "float32" and config["save_every"]
            bank = 4 * 2 * config["num_layers"] * config["mlp_dim"] * config["model_dim"]
            assert result["sent_per_step"]["all_gather/mlp"] == [bank / 2, 1]


# ----- bad input, and failures on the way

@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_a_failure_in_the_loaders_thread_of_one_rank_is_told_in_one_line(comms, run_of):
    run = run_of(f"{comms}, wrong")
    assert run.code != 0
    told, = (line for line in run.stderr.splitlines() if str(sabotage.WRONG_ROW) in line)
    assert told.startswith("rank 1: status:error n-gram rows ") and "--ngram-rows" in told
    assert run.lines[-1].startswith("status:") and "status:ok" not in run.stdout


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_a_diverged_run_ends_while_loaders_talk_to_each_other(comms, run_of):
    run = run_of(f"{comms}, diverging")
    assert run.code == 1 and run.lines[-1].startswith("status:nan "), run.stdout + run.stderr
    assert 1 <= len(run.train_losses) < 40


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
@pytest.mark.parametrize("when", ["always", "in the loader"])
def test_a_hash_that_leaves_the_table_is_refused(when, comms, tiny, cli, monkeypatch):
    honest = train_gpt.table_rows

    def wrong(*words):
        rows, signs = honest(*words)
        if when == "always" or threading.current_thread() is not threading.main_thread():
            rows[7, 1] = 1000
        return rows, signs

    monkeypatch.setattr(train_gpt, "table_rows", wrong)
    run = cli(**{**tiny, "run_id": "wrong", "ngram_comms": comms})
    assert run.code == 2
    assert re.match(r"status:error n-gram rows \d+ to 1000: .*0 to 999.*--ngram-rows", run.lines[-1])
    assert not any(line.startswith("step:") for line in run.lines) and "Traceback" not in run.stderr
