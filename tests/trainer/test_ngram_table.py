"""Chapter 5: the n-gram table on 1 to 4 ranks against slow dense references: plans, values, bytes
on the wire, whole runs, bad input."""

import functools
import itertools
import re
import shutil
import threading

import ngram_cases
import numpy as np
import pytest
import sabotage
import torch
from ngram_cases import CASES, COMMON, FAILING, ORDERS, RUNS, draw, owner_bounds

import ranks
import train_gpt
from helpers import NO_TABLE, assert_bitwise, byte_documents, make_trainer, read, tiny_config
from train_gpt import ConfigError, Runtime, group_equal, plan_rows, stable_order, sum_groups

SEVERAL = [2, 3, pytest.param(4, marks=pytest.mark.slow)]
WORLD_SIZES = [1, *SEVERAL]


@pytest.fixture(scope="module")
def results_of(corpus):
    """results_of(world size): what `tables` returns on each rank."""

    @functools.cache
    def results(world_size):
        for name, case in CASES.items():  # ranks inherit what this process has drawn
            for step in range(case.steps):
                draw(name, world_size, step)
        return ranks.on_ranks(world_size, ngram_cases.tables, corpus)

    return results


@pytest.fixture(scope="module")
def run_of(corpus, tmp_path_factory):
    """run_of(name) of RUNS, FAILING and "resumed": a helpers.Run; each is run once."""

    @functools.cache
    def run(name):
        folder = tmp_path_factory.mktemp("run")
        if name == "resumed":  # two ranks go on from step 4
            without = shutil.ignore_patterns("checkpoint.*")
            shutil.copytree(run("2 ranks").folder, folder / "logs" / "run", ignore=without)
            resumed = ranks.train(folder, {"resume": "run"}, world_size=2)
            resumed.folder = folder / "logs" / "run"
            return resumed
        one = {**RUNS, **FAILING}[name]
        values = {**COMMON, "data": corpus, **one.values}
        before = sabotage.spoil_second_rank if name == "wrong" else None
        return ranks.train(folder, values, world_size=one.world_size, before=before)

    return run


# ----- groups


@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_group_equal_against_a_dict(count):
    some = [0, 1, 2, 7, 65535, 65536, 2**20, 2**20 + 65536, 2**31 - 1]
    ids = np.random.default_rng(count).choice(some, size=count).astype(np.int32)
    assert np.array_equal(stable_order(ids), np.argsort(ids, kind="stable"))
    expected = {}
    for position, number in enumerate(ids.tolist()):
        expected.setdefault(number, []).append(position)
    distinct, positions, offsets = group_equal(ids)
    assert distinct.tolist() == sorted(expected)
    assert distinct.dtype == positions.dtype == offsets.dtype == np.int32
    bounds = itertools.pairwise([*offsets.tolist(), count])
    found = [positions[low:high].tolist() for low, high in bounds]
    assert dict(zip(distinct.tolist(), found, strict=True)) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_sums_of_groups_against_float64(count, weighted, dtype):
    rng = np.random.default_rng(count)
    ids = rng.integers(0, 40, size=count)
    weights = torch.from_numpy(rng.standard_normal(count)).float()
    values = torch.from_numpy(rng.standard_normal((count, 5))).to(dtype)
    expected = torch.zeros(40, 5, dtype=torch.float64)
    for value, number, weight in zip(values.double(), ids, weights.double(), strict=True):
        expected[number] += value * (weight if weighted else 1)
    distinct, *groups = group_equal(ids)
    positions, offsets = map(torch.from_numpy, groups)
    sums = sum_groups(values, positions, offsets, weights[positions] if weighted else None)
    assert sums.dtype == torch.float32 and sums.shape == (len(set(ids)), 5)
    torch.testing.assert_close(sums.double(), expected[distinct], atol=1e-5, rtol=1e-5)


# ----- the plan of one process


def random_reads(count, columns, rows):
    """Row ids (count, columns) with repetitions, and their signs."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, size=(count, columns)).astype(np.int32)
    return ids, rng.choice([-1.0, 0.0, 1.0], size=(count, columns)).astype(np.float32)


@pytest.mark.parametrize("count, columns", [(60, 1), (60, 3), (60, 0), (0, 3)])
def test_plan_rows_against_a_dict(count, columns):
    rows, signs = random_reads(count, columns, 40)
    expected = {}
    for token, column in np.ndindex(count, columns):
        pair = (token, float(signs[token, column]))
        expected.setdefault(int(rows[token, column]), []).append(pair)
    plan, slots = plan_rows(rows, signs, tiny_config(), Runtime("cpu"))
    pairs = list(zip(plan.token.tolist(), plan.signs.tolist(), strict=True))
    bounds = itertools.pairwise([*plan.offsets.tolist(), len(pairs)])
    found = [pairs[low:high] for low, high in bounds]
    assert dict(zip(plan.owned.tolist(), found, strict=True)) == expected
    assert plan.owned.tolist() == plan.asked.tolist() == sorted(expected) and not plan.merge
    assert np.array_equal(slots, rows)  # the table itself is read


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1])
def test_rows_outside_the_table_are_refused(bad):
    rows, signs = random_reads(60, 3, 1000)
    rows[30] = 0, 999, 0
    plan_rows(rows, signs, tiny_config(), Runtime("cpu"))
    rows[30, 1] = bad
    with pytest.raises(ConfigError, match=r"rows leave the table's range 0 to 999; .*table_rows"):
        plan_rows(rows, signs, tiny_config(), Runtime("cpu"))


# ----- exchange between ranks


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all_of_uneven_and_empty_parts(world_size, results_of):
    for rank, result in enumerate(results_of(world_size)):
        found = result["exchanges"]
        others = [source for source in range(world_size) if source != rank]
        arrived = []
        for source in range(world_size):
            arrived += ngram_cases.sent_rows(source, rank, world_size)
        assert found["uneven"].tolist() == [[row] * 3 for row in arrived]
        assert found["empty"].shape == (0, 5)
        abroad = [len(ngram_cases.sent_rows(rank, other, world_size)) for other in others]
        expected = {
            ("all_to_all", "uneven"): [sum(abroad) * 12, sum(map(bool, abroad))],
            ("all_to_all", "empty"): [0, 0],
        }
        assert found["ledger"] == (expected if others else {})


# ----- values, against the dense update of the same rule


@functools.cache
def dense(name, world_size):
    """The whole table before each step and after the last, and its moments at the end: in float64,
    every row updated with the full matrix of gradients."""
    case, config = CASES[name], tiny_config()
    start = ngram_cases.start_of(name, world_size)
    weight, second = start["weight"].double(), start["second"].double()
    history = [weight.clone()]
    for step in range(case.steps):
        grads = torch.zeros_like(weight)
        for ids, signs, token_grads in draw(name, world_size, step):
            for column in range(ORDERS):
                signed = signs[:, column, None].astype(np.float64) * token_grads
                grads.index_add_(0, torch.from_numpy(ids[:, column]), torch.from_numpy(signed))
        lr = config.ngram_lr * ngram_cases.lr_multiplier(case, step)
        second += grads.square().mean(1)
        weight -= lr * grads / (second + config.ngram_floor**2).sqrt()[:, None]
        history.append(weight.clone())
    return torch.stack(history), second


def assert_near(actual, expected):
    """Each row (..., d) differs by at most a millionth of its norm."""
    assert actual.shape == expected.shape
    differences, sizes = (rows.norm(dim=-1) for rows in (actual.double() - expected, expected))
    assert (differences <= 1e-6 * sizes).all(), (differences / sizes).max()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_the_table_equals_the_dense_update(world_size, name, results_of):
    full = results_of(world_size)[0]["cases"][name]["full"]
    history, second = dense(name, world_size)
    assert_near(full["weight"], history[-1])
    assert_near(full["second"][:, None], second[:, None])
    is_idle = name == "an idle rank" and world_size == 1
    assert not history[-1].isclose(history[0]).all() or is_idle


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_rows_that_nobody_reads_stay_bitwise(world_size, name, results_of):
    full = results_of(world_size)[0]["cases"][name]["full"]
    start = ngram_cases.start_of(name, world_size)
    known = set()
    for step in range(CASES[name].steps):
        for ids, _, _ in draw(name, world_size, step):
            known |= set(ids.ravel().tolist())
    never = np.setdiff1d(np.arange(len(full["weight"])), list(known))
    for key in ("weight", "second"):
        assert_bitwise(full[key][never], start[key][never])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_hold_ranges_of_which_all_of_them_save_the_whole(world_size, results_of):
    results = results_of(world_size)
    for name, case in CASES.items():
        first = results[0]["cases"][name]["full"]
        for rank, result in enumerate(results):
            low, high = owner_bounds(case, world_size, rank)
            assert result["cases"][name]["held"] == (high - low, case.dim)
            assert_bitwise(result["cases"][name]["full"], first)
            assert_bitwise(result["cases"][name]["again"], first)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_rows_that_are_read_are_those_of_the_dense_table_at_that_time(world_size, results_of):
    for result in results_of(world_size):
        for name, left in result["cases"].items():
            history, _ = dense(name, world_size)
            assert {number for number, _, _ in left["seen"]} == set(range(len(history) - 1))
            for number, rows, values in left["seen"]:
                assert_near(values, history[number, rows.long()])


def test_the_cases_are_as_awkward_as_they_are_meant_to_be():
    empty = CASES["ranges that are empty"]
    bounds = [owner_bounds(empty, 4, rank) for rank in range(4)]
    assert bounds == [(0, 2), (2, 4), (4, 5), (5, 5)]
    sizes = set()
    for step in range(7):
        sizes.add(sum(len(ids) for ids, _, _ in draw("half as many rows", 2, step)))
    assert len(sizes) == 3
    reads = distinct_reads("twenty steps", 3)
    assert any(step[0] & step[1] & step[2] for step in reads)  # several ranks' sums are merged


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_table_on_a_gpu_is_the_table_on_the_cpu():
    name = "twenty steps"
    full = ngram_cases.take_steps(name, Runtime("cuda"))["full"]
    history, second = dense(name, 1)
    assert_near(full["weight"], history[-1])
    assert_near(full["second"][:, None], second[:, None])


# ----- a table that does not learn


def test_without_ngrams_the_table_is_empty_and_frozen():
    trainer = make_trainer(**NO_TABLE)
    table = trainer.table
    assert table.size() == 0 and table.weight.shape == (0, 32)
    assert table.is_frozen and not table.is_due(3)
    assert read(trainer, byte_documents(300))[1] is None
    full = table.full_state()
    assert full["weight"].numel() == full["second"].numel() == 0
    table.load(full)


def test_a_table_without_a_learning_rate_is_read_but_never_changes(results_of):
    ((alone, before, after),) = (result["frozen"] for result in results_of(1))
    assert alone[2] < alone[0] - 0.1  # the rest learns
    assert_bitwise(after, before)
    first, second = (result["frozen"] for result in results_of(2))
    assert first[0] == second[0] == pytest.approx(alone, abs=1e-4)
    assert_bitwise(first[2], before)
    trainer = make_trainer(ngram_lr=0.0)
    summed = read(trainer, byte_documents(300))[1]
    assert summed.any() and not summed.requires_grad


# ----- the ledger, against an independent count


def distinct_reads(name, world_size):
    """For each step and rank, the set of rows that the rank reads."""
    steps = []
    for step in range(CASES[name].steps):
        parts = draw(name, world_size, step)
        of_ranks = [parts[rank::world_size] for rank in range(world_size)]
        steps.append(
            [{row for ids, _, _ in own for row in ids.ravel().tolist()} for own in of_ranks]
        )
    return steps


def owned_by(case, world_size, rank, rows):
    """How many of a set of rows a rank owns."""
    low, high = owner_bounds(case, world_size, rank)
    return sum(low <= number < high for number in rows)


def counted(name, world_size, me):
    """{collective/name: (bytes, messages)} that rank `me` should have sent, from sets of rows."""
    case = CASES[name]
    peers = [rank for rank in range(world_size) if rank != me]
    sent = {"all_to_all/ngram_indices": [0, 0], "all_to_all/ngram_table": [0, 0]}

    def count(key, to_peers, size):
        sent[key][0] += sum(to_peers) * size
        sent[key][1] += sum(map(bool, to_peers))

    for reads in distinct_reads(name, world_size):
        asked = [owned_by(case, world_size, rank, reads[me]) for rank in peers]
        answered = [owned_by(case, world_size, me, reads[rank]) for rank in peers]
        count("all_to_all/ngram_indices", [1 for _ in peers], 4)  # how many rows
        count("all_to_all/ngram_indices", asked, 4)  # which ones
        count("all_to_all/ngram_table", answered, 4 * case.dim)  # their values
        count("all_to_all/ngram_table", asked, 4 * case.dim)  # their gradients
    return {key: tuple(entry) for key, entry in sent.items()} if peers else {}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_ledger_is_an_independent_count(world_size, results_of):
    for rank, result in enumerate(results_of(world_size)):
        for name, left in result["cases"].items():
            ledger = dict(left["ledger"])
            ledger.pop("all_to_all/validation", None)
            assert ledger == counted(name, world_size, rank), (name, rank)


@pytest.mark.parametrize("world_size", SEVERAL)
def test_own_rows_never_travel(world_size, results_of):
    for result in results_of(world_size):
        assert result["cases"]["own rows alone"]["ledger"]["all_to_all/ngram_table"] == (0, 0)


@pytest.mark.parametrize("world_size", SEVERAL)
def test_bytes_are_close_to_the_lower_bound(world_size, results_of):
    """Each foreign row once there and once back, however many tokens read it."""
    case = CASES["wide"]
    foreign = 0
    for step in distinct_reads("wide", world_size):
        for rank, reads in enumerate(step):
            foreign += len(reads) - owned_by(case, world_size, rank, reads)
    sent = 0
    for result in results_of(world_size):
        ledger = result["cases"]["wide"]["ledger"]
        sent += ledger["all_to_all/ngram_indices"][0] + ledger["all_to_all/ngram_table"][0]
    assert 1 <= sent / (2 * foreign * 4 * case.dim) < 1.1


# ----- whole runs


@pytest.mark.parametrize(
    "name",
    [
        "2 ranks",
        pytest.param("4 ranks", marks=pytest.mark.slow),
        pytest.param("2 ranks, no table", marks=pytest.mark.slow),
        pytest.param("2 ranks, one row", marks=pytest.mark.slow),
    ],
)
def test_losses_do_not_depend_on_ranks(name, run_of):
    run, alone = run_of(name), run_of(RUNS[name].alone)
    assert run.code == 0 and run.lines[-1].startswith("status:ok "), run.stdout + run.stderr
    assert list(run.train_losses) == [1, 2, 3, 4, 5, 6] and list(run.val_losses) == [2, 4, 6]
    assert run.train_losses == pytest.approx(alone.train_losses, abs=1e-4)
    assert run.val_losses == pytest.approx(alone.val_losses, abs=1e-4)
    assert run.train_losses[6] < run.train_losses[1] - 0.3
    assert len(run.result["peak_memory_mib_by_rank"]) == RUNS[name].world_size
    table, other = (run.checkpoint()["groups"]["ngram_table"] for run in (run, alone))
    assert table["weight"].shape == other["weight"].shape
    assert torch.equal(table["index"], other["index"])
    torch.testing.assert_close(table["second"], other["second"], atol=1e-3, rtol=1e-2)


@pytest.mark.slow
def test_the_runs_differ_from_each_other(run_of):
    """By the size of the table: else their comparisons show nothing."""
    assert COMMON["val_tokens"] // COMMON["val_batch_tokens"] == 5  # some ranks have no last one
    alone = [run_of(name) for name, run in RUNS.items() if not run.alone]
    assert len({round(run.train_losses[6], 3) for run in alone}) == 3


def test_a_resumed_run_ends_as_the_whole_one(run_of):
    run, whole = run_of("resumed"), run_of("2 ranks")
    assert run.code == 0, run.stdout + run.stderr
    assert "resumed:run step:4/6 world_size:2" in run.lines
    assert run.train_losses == whole.train_losses
    for part in ("model", "groups", "loader", "rng"):
        assert_bitwise(run.checkpoint()[part], whole.checkpoint()[part], part)


def test_a_table_that_ranks_have_trained_is_used_by_one_process(run_of):
    run = run_of("2 ranks")
    content = run.checkpoint()
    trainer = train_gpt.Trainer(train_gpt.config_of_checkpoint(content), Runtime("cpu"))
    train_gpt.restore(trainer, content)
    val = train_gpt.open_corpus(trainer.config).val
    loss = trainer.evaluate(content["step"], val)
    assert loss == pytest.approx(run.result["val_loss"], abs=1e-6)


def test_the_ledger_of_a_run_is_logged(run_of, corpus):
    """The first rank's indices and values, counted from the tokens, in the log and in
    result.json."""
    run = run_of("2 ranks")
    (line,) = (line for line in run.lines if line.startswith("comms: "))
    words = dict(re.findall(r"(\w+/[\w ]+)=(\d+\([0-9.e+]+\))", line))
    sent = run.result["sent_per_step"]  # [bytes, messages]
    assert words == {key: f"{size:.0f}({messages:g})" for key, (size, messages) in sent.items()}
    config = train_gpt.with_values(train_gpt.TRACKS["nano"], {**COMMON, "data": str(corpus)})
    found, index = train_gpt.open_corpus(config), train_gpt.TextIndex(config)
    index.read(found.indexed)
    loader = train_gpt.TrainLoader(config, found.shards, Runtime("cpu"), index)
    asked, answered = 0, 0
    for _ in range(config.steps):
        parts = loader.next_batch().micro_batches
        asked += (torch.cat([part.slots for part in parts[0::2]]).unique() >= 500).sum().item()
        answered += (torch.cat([part.slots for part in parts[1::2]]).unique() < 500).sum().item()
    loader.close()
    values, indices = (asked + answered) * 32 * 4 / 6, (asked + 6) * 4 / 6
    assert sent["all_to_all/ngram_table"] == [pytest.approx(values, abs=0.1), 2]
    assert sent["all_to_all/ngram_indices"] == [pytest.approx(indices, abs=0.1), 2]
    assert not [key for key in sent if "validation" in key]


@pytest.mark.parametrize("name", ["2 ranks", "resumed"])
def test_the_ledger_counts_the_training_steps_of_this_process(name, run_of):
    """What a bank sends in a step is neither raised by checkpoints on the way nor lowered by steps
    before a resume."""
    result = run_of(name).result
    config = result["config"]
    assert config["dtype"] == "float32" and config["save_every"]
    bank = 4 * 2 * config["num_layers"] * config["mlp_dim"] * config["model_dim"]
    assert result["sent_per_step"]["all_gather/mlp"] == [bank / 2, 1]


# ----- bad input, and failures on the way


def test_a_failure_in_the_loaders_thread_of_one_rank_is_told_in_one_line(run_of):
    run = run_of("wrong")
    assert run.code != 0
    (told,) = (line for line in run.stderr.splitlines() if "rows leave the table's range" in line)
    assert told.startswith("rank 1: status:error n-gram rows ") and "table_rows" in told
    assert run.lines[-1].startswith("status:") and "status:ok" not in run.stdout


def test_a_diverged_run_ends_while_loaders_talk_to_each_other(run_of):
    run = run_of("diverging")
    assert run.code == 1 and run.lines[-1].startswith("status:nan "), run.stdout + run.stderr
    assert 1 <= len(run.train_losses) < 40


@pytest.mark.parametrize("when", ["always", "in the loader"])
def test_a_hash_that_leaves_the_table_is_refused(when, tiny, cli, monkeypatch):
    honest = train_gpt.table_rows

    def wrong(*words):
        rows, signs = honest(*words)
        if when == "always" or threading.current_thread() is not threading.main_thread():
            rows[7, 1] = 1000
        return rows, signs

    monkeypatch.setattr(train_gpt, "table_rows", wrong)
    run = cli(**{**tiny, "run_id": "wrong"})
    assert run.code == 2
    assert re.match(r"status:error n-gram rows .*range 0 to 999; .*table_rows", run.lines[-1])
    assert not any(line.startswith("step:") for line in run.lines)
    assert "Traceback" not in run.stderr
