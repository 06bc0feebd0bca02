"""Shards and corpora, and the loader's micro-batches."""

import contextlib
import dataclasses
import itertools
import json
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import helpers
import train_gpt
from helpers import EOT
from train_gpt import ConfigError, Runtime, TrainLoader, open_corpus


def test_a_corpus_of_the_users_own_is_read_as_often_as_needed(tmp_path):
    """Of the text of its validation shards what fills passes is scored, unless the user names a
    number."""
    folder = helpers.make_corpus(tmp_path / "corpus", train_tokens=30_000, val_tokens=8000)
    extra = helpers.byte_documents(1000)
    helpers.write_shard(folder / "tiny_val_000001.bin", extra)
    helpers.with_manifest(folder)
    given = {"track": "english", "data": str(folder)}
    config = train_gpt.config_from(given)
    corpus = open_corpus(config)
    assert corpus.val.tolist() == (helpers.byte_documents(8000, seed=99) + extra)[: 8192 + 1]
    whole = 2 * (14_999 // 1024 * 1024)  # the last token of a shard is only a target
    assert corpus.length == whole
    assert train_gpt.config_from(given | {"val_tokens": 4096}).val_tokens == 4096
    with pytest.raises(ConfigError, match="9,000 validation tokens, val_tokens=12,288"):
        open_corpus(train_gpt.config_from(given | {"val_tokens": 12_288}))
    assert train_gpt.config_from(given | {"vocab_size": 300}).vocab_size == 300
    with pytest.raises(ConfigError, match="its documents do not start with eot_token=255"):
        open_corpus(dataclasses.replace(config, eot_token=255))


def test_a_track_takes_one_pass_over_its_own_corpus(tmp_path, monkeypatch):
    folder = helpers.make_corpus(tmp_path / "corpus", train_tokens=30_000)
    track = helpers.tiny_config(data=str(folder), micro_batches=4, steps=29)
    monkeypatch.setitem(train_gpt.TRACKS, "english", track)
    assert open_corpus(track).length == 29_696  # which 29 steps read, to the last token
    longer = dataclasses.replace(track, steps=30)
    with pytest.raises(ConfigError, match="one pass .* 29,696 tokens, the schedule takes 30,720"):
        open_corpus(longer)
    monkeypatch.setitem(train_gpt.TRACKS, "english", helpers.tiny_config(data="another"))
    assert open_corpus(longer).is_own


TRAIN, SECOND, VAL = "tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"


def shard(name, tokens, **options):
    """Puts another shard in the place of one."""
    return lambda folder: helpers.write_shard(folder / name, tokens, **options)


def change_token(path):
    content = bytearray(path.read_bytes())
    content[1038] ^= 1
    path.write_bytes(content)


# What is done to a good corpus, whose manifest is then made to agree; what the message must say.
DAMAGE = {
    "short": (
        lambda folder: helpers.make_corpus(folder, 200),
        ["no shard", "--micro-batch-tokens"],
    ),
    "truncated": (shard(TRAIN, [EOT] * 95, count=100), ["[20240520, 1, 95] would fit", "build"]),
    "magic": (shard(TRAIN, [EOT] * 100, magic=20240801), [TRAIN, "20240801", "[20240520, 1, 100]"]),
    "no tokens": (shard(TRAIN, []), [TRAIN, "[20240520, 1, 0]"]),
    "beyond vocabulary": (shard(TRAIN, [EOT, 300] * 5000), [TRAIN, "300", "256", "--eot-token"]),
    "no train": (lambda folder: [(folder / name).unlink() for name in (TRAIN, SECOND)], ["--data"]),
    "few val": (shard(VAL, helpers.byte_documents(1024)), ["1,024", "--val-tokens"]),
}
# The same, where the manifest stays as it was built.
SHA256 = "sha256 is not the manifest's"
NOT_AS_BUILT = {
    "one token changed": (lambda folder: change_token(folder / TRAIN), [TRAIN, SHA256]),
    "no training shard": (lambda folder: (folder / TRAIN).unlink(), [TRAIN, "no such file"]),
}


@pytest.mark.parametrize("damage", [*DAMAGE, *NOT_AS_BUILT])
def test_a_damaged_corpus_ends_in_one_line_and_status_2(damage, cli, tiny, tmp_path):
    folder = helpers.make_corpus(tmp_path / "corpus")
    act, words = {**DAMAGE, **NOT_AS_BUILT}[damage]
    act(folder)
    if damage in DAMAGE:
        helpers.with_manifest(folder)
    line = helpers.refusal(cli(**{**tiny, "data": str(folder)}))
    assert all(word in line for word in words), line
    assert not (tmp_path / "logs").exists()


def test_files_that_are_nobodys_data(tmp_path):
    """macOS writes a file of another kind beside each one on a foreign disk; and what a manifest
    does not name is none of its corpus. A name that has both splits is of the last one."""
    folder = helpers.make_corpus(tmp_path / "corpus")
    config = helpers.tiny_config(data=str(folder))
    before = open_corpus(config)
    for path in folder.glob("*.bin"):
        path.rename(folder / f"my_val_{path.name}")
    helpers.with_manifest(folder)
    (folder / f"._my_val_{TRAIN}").write_bytes(b"Mac OS X")
    helpers.write_shard(folder / "tiny_train_000009.bin", [EOT] * 300)
    helpers.write_shard(folder / "a_val_000000.bin", [EOT] * 9000)
    after = open_corpus(config)
    assert [shard.sha256 for shard in after.shards] == [shard.sha256 for shard in before.shards]
    assert np.array_equal(after.val, before.val)


def test_a_shard_that_changes_while_a_run_trains_ends_it(tmp_path):
    """As soon as the loader's thread opens it, whatever its size and its time."""
    folder = helpers.make_corpus(tmp_path / "corpus", train_tokens=2_000)
    config = helpers.tiny_config(data=str(folder), steps=40)
    loader = TrainLoader(config, open_corpus(config).shards, Runtime("cpu"))
    before = (folder / SECOND).stat()
    change_token(folder / SECOND)
    os.utime(folder / SECOND, ns=(before.st_atime_ns, before.st_mtime_ns))
    with contextlib.closing(loader), pytest.raises(ConfigError, match=f"{SECOND}: its {SHA256}"):
        while loader.next_batch():
            pass


def test_a_run_is_resumed_on_the_corpus_that_it_began_with(cli, tiny, tmp_path):
    folder = helpers.make_corpus(tmp_path / "corpus")
    values = {**tiny, "steps": 2, "data": str(folder), "run_id": "first", "save_every": 1}
    assert cli(**values).code == 0
    (tmp_path / "logs/first/checkpoint.pt").unlink()
    change_token(folder / TRAIN)
    line = helpers.refusal(cli(resume="first"))
    assert TRAIN in line and SHA256 in line
    helpers.with_manifest(folder)
    assert "manifest.json is not the one" in helpers.refusal(cli(resume="first"))
    (folder / "manifest.json").unlink()
    assert "manifest.json: no such file" in helpers.refusal(cli(resume="first"))


UNREADABLE = [
    *((content, "") for content in (b"", b"[]", b'{"shards": [{}]}', b"[" * 100_000, b"\xff")),
    ({"vocab_size": "257"}, "'<' not supported"),
    ({"eot_token": 7}, "eot_token is not the last id of vocab_size=257"),
    ({"token_bytes": [1] * 100}, "token_bytes are not 257 numbers"),
]


@pytest.mark.parametrize("content, words", UNREADABLE, ids=lambda case: str(case)[:30])
def test_a_manifest_of_no_corpus_is_refused(content, words, corpus, tmp_path):
    if isinstance(content, dict):
        manifest = json.loads((corpus / "manifest.json").read_text()) | content
        content = json.dumps(manifest).encode()
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"manifest.json: cannot be read .*{words}.*; build"):
        open_corpus(helpers.tiny_config(data=str(tmp_path)))


def test_every_shard_that_a_run_reaches_is_checked_and_no_other(tmp_path):
    folder = helpers.make_corpus(tmp_path / "corpus", train_tokens=14 * 500, shards=14)
    config = helpers.tiny_config(steps=5, data=str(folder))
    change_token(folder / "tiny_train_000012.bin")
    open_corpus(dataclasses.replace(config, steps=6))  # it takes the twelve ahead of that one
    with pytest.raises(ConfigError, match="tiny_train_000012.bin: its sha256"):
        open_corpus(dataclasses.replace(config, steps=7))
    tokens = [*helpers.byte_documents(490), *range(300, 310)]
    helpers.write_shard(folder / "tiny_train_000006.bin", tokens)
    helpers.with_manifest(folder)
    with pytest.raises(ConfigError, match="tiny_train_000006.bin: token id 309"):
        open_corpus(config)


# ----- the loader

GPT2_EOT = 50256


def countable(tokens, first=0, longest=300):
    """A shard in which a token tells its position: the n-th is first + n, but for document
    starts."""
    shard = np.arange(first, first + tokens, dtype=np.uint16)
    starts = np.cumsum(np.random.default_rng(0).integers(20, longest, size=tokens))
    shard[0] = GPT2_EOT
    shard[starts[starts < tokens - 2]] = GPT2_EOT
    return shard


def positions(micro_batch, first=0):
    """Where in its countable shard each input stands; a document start is told by its target."""
    inputs, targets = micro_batch.inputs.long().numpy(), micro_batch.targets.numpy()
    return np.where(inputs == GPT2_EOT, targets - 1, inputs) - first


def loader_config(field="micro_batches", schedule=(), **changes):
    """A Config for countable shards; schedule: {start of a stage: its value of the field}."""
    if schedule:
        changes["stages"] = [{"start": start, field: schedule[start]} for start in schedule]
    return helpers.tiny_config(vocab_size=50304, eot_token=GPT2_EOT, **changes)


def batches_of(loader):
    """Every Batch of a loader, to the end of the run."""
    with contextlib.closing(loader):
        return list(iter(loader.next_batch, None))


def load_all(config, shards, first_step=0):
    """Every Batch from first_step to the end of the run, of shards that are in memory."""
    shards = [SimpleNamespace(read=each.copy, length=len(each)) for each in shards]
    return batches_of(TrainLoader(config, shards, Runtime("cpu"), first_step))


def test_an_epoch_covers_each_shard_exactly_once():
    firsts = 0, 10_000, 20_000
    lengths = 5000, 4001, 3333
    shards = [countable(*it) for it in zip(lengths, firsts, strict=True)]
    shards[1][0] = 10_000  # begins inside a document
    counts = [(length - 1) // 256 for length in lengths]
    # Pieces of the second cap, which the first one splits further.
    config = loader_config("document_cap", {0: 50, 0.3: 300}, steps=sum(counts), micro_batches=1)
    stream = (batch for each in load_all(config, shards) for batch in each.passes)
    for shard, count, first in zip(shards, counts, firsts, strict=True):
        micro_batches = list(itertools.islice(stream, count))
        seen = np.concatenate([positions(micro_batch, first) for micro_batch in micro_batches])
        # Each position at most once, and all but the end that fills no micro-batch.
        assert len(np.unique(seen)) == len(seen) == count * 256
        assert len(shard) - 1 - len(seen) < 256
        assert not (np.diff(seen) == 1).all()  # pieces are shuffled
        for micro_batch in micro_batches:
            where = positions(micro_batch, first)
            assert np.array_equal(shard[where], micro_batch.inputs.numpy())
            assert np.array_equal(shard[where + 1], micro_batch.targets.numpy())


def test_a_pass_has_each_token_that_it_reads_once():
    """Where there is no guess, it reads the input."""
    text = np.random.default_rng(0).integers(0, 3, 300).astype(np.uint16)
    passages = [train_gpt.contiguous_passage(text, helpers.EOT, low, 128) for low in (0, 150)]
    read = train_gpt.make_pass(passages, helpers.tiny_config(), torch.device("cpu"))
    ids = torch.cat([read.inputs[:, None], read.guesses], dim=1)
    assert (ids == 0).any(0).all() and (ids[:, 1:] < 0).any(0).all()
    assert torch.equal(read.tokens, ids[ids >= 0].unique())
    assert torch.equal(read.tokens[read.slots], ids.where(ids >= 0, ids[:, :1]).long())


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    shards = [countable(3000)]

    def seen(seed):
        batches = load_all(loader_config(steps=22, micro_batches=1, seed=seed), shards)
        return np.concatenate([positions(*batch.passes) for batch in batches])

    assert np.array_equal(seen(1), seen(1)) and not np.array_equal(seen(1), seen(2))
    first, second = np.split(seen(1), 2)
    assert len(np.unique(first)) == len(np.unique(second)) == 11 * 256
    assert not np.array_equal(first, second)


def segments(micro_batch):
    """[(start, end)] of the segments, after a comparison of segment_start and segment_bounds."""
    start = micro_batch.segment_start.numpy()
    bounds = micro_batch.segment_bounds.numpy()
    first, lengths = np.unique(start, return_counts=True)
    assert np.array_equal(start, np.repeat(first, lengths)) and first[0] == 0
    assert np.array_equal(bounds, [*first, len(start)])
    return list(zip(first, first + lengths, strict=True))


def test_segments_respect_the_cap_in_force_and_never_join_documents():
    caps = {0: 64, 0.5: 160, 0.75: 100}
    config = loader_config("document_cap", caps, steps=8, micro_batches=4)
    longest = []
    for step, batch in enumerate(load_all(config, [countable(12_000, longest=600)])):
        lengths = []
        for micro_batch in batch.passes:
            where = positions(micro_batch)
            for low, high in segments(micro_batch):
                lengths.append(high - low)
                assert (np.diff(where[low:high]) == 1).all()
                assert GPT2_EOT not in micro_batch.inputs[low + 1 : high]
        assert max(lengths) <= train_gpt.training_phase(config, step).max_segment
        longest.append(max(lengths))
    assert longest == [64] * 4 + [160] * 2 + [100] * 2


def test_a_stream_goes_on_from_any_step():
    """In later passes, too, and over a shard that fills no micro-batch."""
    shards = [countable(1100, longest=900), countable(200), countable(1500, 10_000, longest=900)]
    config = loader_config("micro_batches", {0: 2, 0.5: 3}, steps=8, document_cap=150)
    whole = load_all(config, shards)
    assert [batch.tokens // 256 for batch in whole] == [2] * 4 + [3] * 4
    for step in range(1, config.steps):
        rest = load_all(config, shards, first_step=step)
        for one, other in zip(rest, whole[step:], strict=True):
            helpers.assert_bitwise(one.passes, other.passes)
            helpers.assert_bitwise(vars(one.rows), vars(other.rows))


def test_the_next_shard_is_opened_while_one_is_read():
    """Batches of the first do not wait for it; and they are those of a loader that opens a shard
    where it needs it."""
    texts = [countable(3000), countable(2000)]
    is_asked, may_go_on = threading.Event(), threading.Event()

    def read_late():
        is_asked.set()
        assert may_go_on.wait(20)
        return texts[1]

    config = loader_config(steps=12, micro_batches=2)
    reads = texts[0].copy, read_late
    shards = [SimpleNamespace(read=reads[n], length=len(texts[n])) for n in range(2)]
    loader = TrainLoader(config, shards, Runtime("cpu"))
    assert loader.opened[0].done() and is_asked.wait(20)
    first = loader.next_batch()
    assert not loader.opened[1].done()
    may_go_on.set()
    ahead = [first, *batches_of(loader)]
    loader = TrainLoader(config, shards, Runtime("cpu"))
    loader.open = loader.open_shard
    for one, other in zip(ahead, batches_of(loader), strict=True):
        helpers.assert_bitwise([one.passes, vars(one.rows)], [other.passes, vars(other.rows)])
