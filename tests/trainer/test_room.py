"""Chapter 9: a run that would not fit into memory or onto the disk is refused before anything is allocated."""
import os
import re
from types import SimpleNamespace

import pytest
import torch

import ranks
import train_gpt
from helpers import NO_TABLE, refusal, tiny_config
from train_gpt import GPT, ConfigError, NgramTable, Optimizer, Runtime, check_room, state_bytes


def runtime_of(world_size, rank=0):
    """The Runtime of one of several ranks, for code that does not communicate."""
    runtime = Runtime("cpu")
    runtime.world_size, runtime.rank = world_size, rank
    return runtime


# ----- what the weights, gradients and optimizer state of a rank take

def storages(thing, found):
    """{address: bytes} of all memory behind the tensors that a group of parameters holds, wherever it holds them."""
    if isinstance(thing, torch.Tensor):
        memory = thing.untyped_storage()
        if memory.nbytes():
            found[memory.data_ptr()] = memory.nbytes()
    elif isinstance(thing, dict):
        for value in thing.values():
            storages(value, found)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            storages(value, found)
    elif type(thing).__module__ == "train_gpt" and not isinstance(thing, (Runtime, train_gpt.Config)):
        storages(vars(thing), found)
    return found


LAYOUTS = [{}, {"dtype": "bfloat16"}, {"ngram_comms": "sharded"}, {"ngram_comms": "sharded", "ngram_host": True},
           NO_TABLE, {"num_layers": 3, "model_dim": 48, "dtype": "bfloat16"},
           *({"matrix_update": rule, "one_sided_above": 40} for rule in train_gpt.MATRIX_RULES)]


@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
def test_state_bytes_are_those_of_a_real_build(changes):
    config = tiny_config(**changes)
    by_rank = []
    for world_size, rank in ((1, 0), (3, 0), (3, 2)):
        runtime = runtime_of(world_size, rank)
        real = Optimizer(config, GPT(config, "sdpa"), NgramTable(config, runtime), runtime)
        expected = {group.name: sum(storages(group, {}).values()) for group in real.groups}
        expected["ngram_table"] += 8  # its scale
        assert state_bytes(config, runtime) == expected
        by_rank.append(expected)
    assert by_rank[0]["matrices"] > by_rank[1]["matrices"]  # a share is less than the whole


def test_state_bytes_of_a_large_table_are_its_rows():
    sharded, replicated = (tiny_config(ngram_rows=100_000, ngram_comms=comms) for comms in ("sharded", "replicated"))
    tables = [state_bytes(config, runtime_of(4))["ngram_table"] for config in (sharded, replicated)]
    assert tables == [25_000 * (32 + 1) * 4 + 8, 100_000 * 32 * 4 + 25_000 * 4 + 8]


def test_building_the_ghost_takes_neither_memory_nor_random_numbers():
    config = tiny_config(ngram_rows=2**31 - 1, model_dim=8192, mlp_dim=2**20)
    before = torch.get_rng_state()
    sizes = state_bytes(config, Runtime("cpu"))
    assert sizes["ngram_table"] == (2**31 - 1) * 8193 * 4 + 8
    assert sizes["matrices"] > 2**35
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.zeros(1).device.type == "cpu"


# ----- what there is

def test_memory_is_shared_by_the_ranks_of_a_host(monkeypatch):
    alone = train_gpt.available_memory(torch.device("cpu"))
    assert 2**27 < alone <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert train_gpt.available_memory(torch.device("cpu")) == pytest.approx(alone / 4, rel=0.1)


def test_memory_is_all_there_is_where_the_system_does_not_say_more(monkeypatch):
    def missing(path, *words):
        raise FileNotFoundError(path)
    monkeypatch.setattr(train_gpt.Path, "read_text", missing)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert train_gpt.available_memory(torch.device("cpu")) == there


@pytest.fixture
def free(monkeypatch):
    """free(memory, disk): so many bytes are free everywhere."""
    def set_free(memory=2**50, disk=2**50):
        monkeypatch.setattr(train_gpt, "available_memory", lambda device: memory)
        monkeypatch.setattr(train_gpt.shutil, "disk_usage", lambda path: SimpleNamespace(free=disk))
    return set_free


ACTIVATIONS = 256 * (34 * 2 * 32 * 4 + 8 * 257)  # of a micro-batch: channels of the layers, and logits


@pytest.mark.parametrize("world_size, changes", [(1, {}), (2, {}), (2, {"ngram_comms": "sharded"})], ids=str)
def test_a_run_that_just_fits_into_memory_may_start(world_size, changes, free):
    config, runtime = tiny_config(**changes), runtime_of(world_size)
    needed = ACTIVATIONS + sum(state_bytes(config, runtime).values())
    free(memory=needed)
    assert any(line.startswith("memory: ") for line in check_room(config, runtime))
    free(memory=needed - 1)
    with pytest.raises(ConfigError, match=r"^memory: .*ngram_table.*--ngram-rows.*--ngram-comms sharded"):
        check_room(config, runtime)


def test_a_table_in_host_memory_and_the_rest_share_the_memory_of_a_cpu(free):
    config = tiny_config(ngram_comms="sharded", ngram_host=True)
    needed = ACTIVATIONS + sum(state_bytes(config, Runtime("cpu")).values())
    free(memory=needed)
    check_room(config, Runtime("cpu"))
    free(memory=needed - 1)
    with pytest.raises(ConfigError, match="memory: "):
        check_room(config, Runtime("cpu"))


@pytest.mark.parametrize("hosted", [False, True])
def test_beside_a_gpu_the_index_lies_in_host_memory_and_the_table_may(hosted):
    config = tiny_config(ngram_comms="sharded", ngram_host=hosted, index_orders=(4, 5), index_bits=12)
    cpu, gpu = runtime_of(1), runtime_of(1)
    gpu.device = torch.device("cuda")
    index, table = 2 * 2**12 * 4, 1000 * (32 + 1) * 4 + 8
    parts, beside = train_gpt.memory_parts(config, gpu)
    assert beside == index + table * hosted and parts.get("ngram_table", 0) == table * (not hosted)
    both, nothing = train_gpt.memory_parts(config, cpu)
    assert nothing == 0 and sum(both.values()) == sum(parts.values()) + beside
    assert sum(both.values()) == ACTIVATIONS + sum(state_bytes(config, cpu).values())


def test_a_checkpoint_that_just_fits_onto_the_disk_may_be_written(free):
    config = tiny_config(ngram_comms="sharded")
    needed = sum(state_bytes(config, Runtime("cpu")).values())
    for world_size in (1, 2):  # the first rank writes the state of all
        free(disk=needed)
        check_room(config, runtime_of(world_size))
        free(disk=needed - 1)
        with pytest.raises(ConfigError, match="^disk for a checkpoint: .*make room"):
            check_room(config, runtime_of(world_size))


def test_a_checkpoint_is_no_larger_than_was_said(rich_run):
    config = train_gpt.config_of_checkpoint(rich_run.checkpoint())
    said, size = sum(state_bytes(config, Runtime("cpu")).values()), (rich_run.folder / "checkpoint.pt").stat().st_size
    assert said / 2 < size < said + 50_000  # gradients are not saved; a file has its own words for each tensor


def test_a_world_size_must_divide_the_micro_batches_of_every_step(tiny, tmp_path):
    run = ranks.train(tmp_path, {**tiny, "micro_batches": ((0.0, 3), (0.5, 4))}, world_size=3)
    assert run.code == 2 and not (tmp_path / "logs").exists()
    assert re.fullmatch("status:error world size 3: must divide the 4 micro-batches .*--micro-batches\n", run.stdout)


# ----- the command line

@pytest.mark.parametrize("words", [[], ["--check"], ["--ngram-comms", "sharded", "--ngram-host", "true"]], ids=str)
@pytest.mark.parametrize("room", [{"memory": 100_000}, {"disk": 100_000}], ids=str)
def test_a_run_without_room_is_refused_in_one_line(room, words, free, tiny, cli, tmp_path, monkeypatch):
    free(**room)
    monkeypatch.setattr(train_gpt, "Trainer", lambda *words: pytest.fail("this would have been allocated"))
    line = refusal(cli(*words, **tiny))
    assert next(iter(room)) in line and "--ngram-rows" in line and "0.0 GiB free" in line
    assert not list(tmp_path.iterdir())


def test_a_run_far_too_large_is_refused(cli, tiny, tmp_path):
    line = refusal(cli(**{**tiny, "ngram_rows": 2**31 - 1, "model_dim": 8192}))
    assert "memory: " in line and "ngram_table 65" in line  # TiB
    assert not list(tmp_path.iterdir())
