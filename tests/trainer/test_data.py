"""Shards and corpora, and the loader's micro-batches."""

import contextlib
import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest

import helpers
import train_gpt
from helpers import EOT
from train_gpt import ConfigError, NgramTable, Runtime, TrainLoader, open_corpus

# ----- shards


def test_a_corpus_joins_its_validation_shards(tmp_path):
    folder = helpers.make_corpus(tmp_path / "corpus", shards=3)
    extra = helpers.byte_documents(300)
    helpers.write_shard(folder / "tiny_val_000001.bin", extra)
    corpus = open_corpus(
        helpers.tiny_config(data=str(helpers.with_manifest(folder)), val_tokens=4096)
    )
    assert len(corpus.shards) == 3
    assert corpus.val.tolist() == (helpers.byte_documents(4000, seed=99) + extra)[:4097]


def test_a_small_corpus_takes_what_it_has(tmp_path):
    folder = helpers.make_corpus(tmp_path / "corpus", train_tokens=30_000, val_tokens=9000)
    config = train_gpt.config_from({"track": "english", "data": str(folder)})
    held = 2 * (15_000 - 1)  # the last token of a shard is only a target
    assert (config.val_tokens, config.index_tokens) == (8192, held // 2)
    assert config.epochs == math.ceil(train_gpt.training_tokens(config) / (held // 2 - 1024))
    assert open_corpus(config).shards
    given = {"track": "english", "data": str(folder), "epochs": 1, "val_tokens": 4096}
    config = train_gpt.config_from(given)
    assert (config.val_tokens, config.epochs) == (4096, 1)


TRAIN, SECOND, VAL = "tiny_train_000000.bin", "tiny_train_000001.bin", "tiny_val_000000.bin"


def shard(name, tokens, **options):
    """Puts another shard in the place of one."""
    return lambda folder: helpers.write_shard(folder / name, tokens, **options)


def change_token(path, at=7):
    content = bytearray(path.read_bytes())
    content[1024 + 2 * at] ^= 1
    path.write_bytes(content)


def exchange(folder):
    contents = [(folder / name).read_bytes() for name in (SECOND, TRAIN)]
    for name, content in zip((TRAIN, SECOND), contents, strict=True):
        (folder / name).write_bytes(content)


def rename(folder):
    (folder / VAL).rename(folder / "another_val_000000.bin")


# What is done to a good corpus, and what the message must say. Afterwards the manifest is made to
# agree with what is wrong.
DAMAGE = {
    "truncated": (
        shard(TRAIN, helpers.byte_documents(44_995), count=45_000),
        ["header says 45000", "44995", "data/text.py"],
    ),
    "header cut": (lambda folder: (folder / TRAIN).write_bytes(b"0" * 100), [TRAIN, "is cut"]),
    "magic": (shard(TRAIN, [EOT] * 100, magic=20240801), [TRAIN, "20240801", "[20240520, 1]"]),
    "no tokens": (shard(TRAIN, []), [TRAIN, "header says 0"]),
    "fewer than there are": (shard(TRAIN, [EOT] * 45_000, count=44_000), ["header says 44000"]),
    "beyond vocabulary": (shard(TRAIN, [EOT, 300] * 5000), [TRAIN, "300", "256", "--eot-token"]),
    "no train": (
        lambda folder: [path.unlink() for path in folder.glob("*_train_*")],
        ["*_train_*.bin", "data/text.py", "--data"],
    ),
    "few val": (shard(VAL, helpers.byte_documents(1024)), ["1,024", "--val-tokens", "768"]),
}
# The same, where the manifest stays as it was built, or is what is wrong.
SHA256 = "sha256 is not the manifest's"
NOT_AS_BUILT = {
    "one token changed": (
        lambda folder: change_token(folder / TRAIN, 20_000),
        [TRAIN, SHA256, "again"],
    ),
    "shards exchanged": (exchange, [TRAIN, SHA256]),
    "a shard that the manifest lacks": (rename, ["another_val_000000.bin", SHA256]),
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
    assert "manifest.json is not the one" in helpers.refusal(cli(resume="first"))


UNREADABLE = [b"", b"[]", b"{}", b'{"shards": [{}]}', b"[" * 100_000, b"9" * 5000, b"\xff"]


@pytest.mark.parametrize(
    "content, words",
    [(content, "cannot be read .*") for content in UNREADABLE]
    + [
        ({"eot_token": None}, r"has vocab_size and eot_token \[257, None\]: .*"),
        ({"eot_token": 7}, r"has vocab_size and eot_token \[257, 7\]: documents start with .*"),
        ({"token_bytes": [1] * 100}, "token_bytes are no 257 whole numbers"),
        ({"token_bytes": ["1"] * 257}, "token_bytes are no 257 whole numbers"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_a_manifest_of_no_corpus_is_refused(content, words, corpus, tmp_path):
    if isinstance(content, dict):
        manifest = json.loads((corpus / "manifest.json").read_text()) | content
        content = json.dumps(manifest).encode()
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"manifest.json: {words}; build it again"):
        open_corpus(helpers.tiny_config(data=str(tmp_path)))


def test_the_vocabulary_comes_with_the_corpus(corpus, tmp_path):
    given = {"track": "english", "data": str(corpus)}
    config = train_gpt.config_from(given)
    assert (config.tokenizer, config.vocab_size, config.eot_token) == ("bytes", 384, 256)
    assert train_gpt.config_from({**given, "vocab_size": 300}).vocab_size == 300
    unknown = train_gpt.config_from({**given, "data": str(tmp_path)})
    assert (unknown.vocab_size, unknown.eot_token) == (1024, 1023)
    with pytest.raises(ConfigError, match="start with 256, and not with eot_token=255"):
        open_corpus(helpers.tiny_config(data=str(corpus), eot_token=255))


def test_remedies_are_worked_out_and_work(tmp_path):
    folder = helpers.make_corpus(tmp_path / "few", train_tokens=2_000, shards=1)
    config = helpers.tiny_config(data=str(folder), steps=9)
    words = "add text, or lower --steps, or take --epochs"
    with pytest.raises(ConfigError, match=words) as refused:
        open_corpus(config)
    epochs = int(re.search(r"--epochs (\d+)", str(refused.value))[1])
    open_corpus(dataclasses.replace(config, epochs=epochs))
    with pytest.raises(ConfigError, match="shards hold"):
        open_corpus(dataclasses.replace(config, epochs=epochs - 1))
    # The index leaves out what training needs.
    for steps, pattern in ((2, r"--index-tokens (\d+)$"), (9, r"-tokens (0) --epochs (\d+)$")):
        config = helpers.tiny_config(data=str(folder), steps=steps, index_order=3)
        with pytest.raises(ConfigError, match=pattern) as refused:
            open_corpus(config)
        index_tokens, *epochs = map(int, re.search(pattern, str(refused.value)).groups())
        changes = {"index_tokens": index_tokens, "epochs": max(epochs, default=1)}
        open_corpus(dataclasses.replace(config, **changes))
    # Less than a micro-batch is none, however often.
    folder = helpers.make_corpus(tmp_path / "less", train_tokens=200, shards=1)
    with pytest.raises(ConfigError, match=r"shards hold 0 in .* beside the index; add text$"):
        open_corpus(helpers.tiny_config(data=str(folder)))
    folder = helpers.make_corpus(tmp_path / "val", val_tokens=200)
    with pytest.raises(ConfigError, match="holds 200; add text to validate on$"):
        open_corpus(helpers.tiny_config(data=str(folder)))


@pytest.mark.parametrize("indexed", [0, 250], ids=["all", "beside the index"])
def test_every_shard_that_a_run_reaches_is_checked_and_no_other(indexed, tmp_path):
    # Of one micro-batch each; the index reads a half of the last one.
    folder = helpers.make_corpus(tmp_path / "corpus", train_tokens=14 * 500, shards=14)
    changes = {"steps": 5, "data": str(folder)}
    helpers.with_manifest(folder)
    change_token(folder / "tiny_train_000012.bin")
    changes |= {"index_order": 3, "index_tokens": indexed}
    open_corpus(helpers.tiny_config(**changes))  # it takes ten of them
    if indexed:
        with pytest.raises(ConfigError, match="tiny_train_000012.bin: its sha256"):
            open_corpus(helpers.tiny_config(**changes | {"index_tokens": 750}))
    for shard in (6, 7, 8):
        tokens = [*helpers.byte_documents(490), *range(300, 310)]
        helpers.write_shard(folder / f"tiny_train_{shard:06d}.bin", tokens)
    with pytest.raises(ConfigError, match="tiny_train_000006.bin: token id 309"):
        open_corpus(helpers.tiny_config(**changes))


# ----- the loader; the tokens of `countable` shards are all different, so that a token tells its
# ----- position

GPT2_EOT = 50256


def countable(tokens, first=0, seed=0, longest=300):
    """A shard of `tokens` tokens, of which the n-th is first + n, but for document starts."""
    shard = np.arange(first, first + tokens, dtype=np.uint16)
    starts = np.cumsum(np.random.default_rng(seed).integers(20, longest, size=tokens))
    shard[0] = GPT2_EOT
    shard[starts[starts < tokens - 2]] = GPT2_EOT
    return shard


def positions(micro_batch, first=0):
    """Where in its countable shard each input stands; a document start is told by its target."""
    inputs, targets = micro_batch.inputs.long().numpy(), micro_batch.targets.numpy()
    return np.where(inputs == GPT2_EOT, targets - 1, inputs) - first


def loader_config(rows=None, **changes):
    """A Config for countable shards, with four micro-batches a step.

    rows: {start: {field: value}} of a schedule's rows, where it has several.
    """
    values = {
        **helpers.TINY,
        "vocab_size": 50304,
        "eot_token": 50256,
        "micro_batches": 4,
        **changes,
    }
    if rows:
        for name in set().union(*rows.values()):
            values.pop(name)
        values["stages"] = tuple({"start": start, **row} for start, row in rows.items())
    return train_gpt.with_values(train_gpt.TRACKS["english"], values)


def load_all(config, shards, first_step=0, state=None):
    """Every Batch from first_step to the end of the run."""
    plan = NgramTable(config, Runtime("cpu")).look_up
    with contextlib.closing(
        TrainLoader(config, shards, Runtime("cpu"), plan, first_step, state)
    ) as loader:
        return [loader.next_batch() for _ in range(first_step, config.steps)]


def test_an_epoch_covers_each_shard_exactly_once():
    firsts = (0, 10_000, 20_000)
    lengths = (5000, 4001, 3333)
    shards = [countable(*it) for it in zip(lengths, firsts, strict=True)]
    shards[1][0] = 10_000  # begins inside a document
    counts = [(length - 1) // 256 for length in lengths]
    # Pieces of the second cap, which the first one splits further.
    caps = {0.0: {"document_cap": 50}, 0.3: {"document_cap": 300}}
    config = loader_config(caps, steps=sum(counts), micro_batches=1)
    stream = (batch for each in load_all(config, shards) for batch in each.passes())
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


def test_the_order_depends_on_the_seed_and_the_epoch_alone():
    shards = [countable(3000)]

    def seen(seed):
        batches = load_all(loader_config(steps=22, micro_batches=1, epochs=2, seed=seed), shards)
        return np.concatenate([positions(*batch.passes()) for batch in batches])

    assert np.array_equal(seen(1), seen(1)) and not np.array_equal(seen(1), seen(2))
    first, second = np.split(seen(1), 2)
    assert len(np.unique(first)) == len(np.unique(second)) == 11 * 256
    assert not np.array_equal(first, second)


def segments(micro_batch):
    """[(start, end)] of the segments, after a comparison of segment_start and segment_bounds."""
    start = micro_batch.segment_start.numpy()
    length = len(start)
    first = np.flatnonzero(start == np.arange(length))
    assert first[0] == 0 and (np.diff(start) >= 0).all() and np.isin(start, first).all()
    bounds = micro_batch.segment_bounds.numpy()
    assert np.array_equal(bounds[: len(first)], first) and (bounds[len(first) :] == length).all()
    assert bounds[-1] == length
    return list(itertools.pairwise([*first, length]))


def test_segments_respect_the_cap_in_force_and_never_join_documents():
    caps = {0.0: 64, 0.5: 160, 0.75: 100}
    config = loader_config({start: {"document_cap": cap} for start, cap in caps.items()}, steps=8)
    longest = []
    for step, batch in enumerate(load_all(config, [countable(12_000, longest=600)])):
        lengths = []
        for micro_batch in batch.passes():
            where = positions(micro_batch)
            for low, high in segments(micro_batch):
                lengths.append(high - low)
                assert (np.diff(where[low:high]) == 1).all()
                assert GPT2_EOT not in micro_batch.inputs[low + 1 : high]
        assert max(lengths) <= train_gpt.training_phase(config, step).max_segment
        longest.append(max(lengths))
    assert longest == [64] * 4 + [160] * 2 + [100] * 2


def test_a_stream_goes_on_from_the_state_of_any_step():
    shards = [countable(2100, longest=900), countable(2500, first=10_000, longest=900)]
    rows = {0.0: {"micro_batches": 2}, 0.5: {"micro_batches": 3}}
    config = loader_config(rows, steps=8, document_cap=150, epochs=2)
    whole = load_all(config, shards)
    assert any(batch.state["offset"] for batch in whole) and whole[-1].state["shard"] >= 1
    assert [batch.tokens // 256 for batch in whole] == [2] * 4 + [3] * 4
    for step in range(1, config.steps):
        rest = load_all(config, shards, first_step=step, state=whole[step - 1].state)
        for one, other in zip(rest, whole[step:], strict=True):
            helpers.assert_bitwise(tuple(one.stack), tuple(other.stack))
            helpers.assert_bitwise(vars(one.rows), vars(other.rows))
            assert one.state == other.state


@pytest.mark.parametrize("steps, opened", [(4, [0]), (8, [0, 1]), (12, [0, 1])])
def test_the_next_shard_is_opened_once_half_of_one_is_read(steps, opened, monkeypatch):
    """Of ten micro-batches each."""
    seen, honest = [], TrainLoader.open_shard

    def recorded(loader, number):
        seen.append(number)
        return honest(loader, number)

    monkeypatch.setattr(TrainLoader, "open_shard", recorded)
    shards = [countable(2600), countable(2600, first=10_000)]
    load_all(loader_config(steps=steps, micro_batches=1), shards)
    assert seen == opened


def test_a_softmax_without_a_row_for_the_rest_of_the_vocabulary_is_refused(monkeypatch):
    """Of one micro-batch, which has 200 different targets, and a prefix that is none of them."""
    tokens = np.array([EOT, *(np.arange(256) % 200)], dtype=np.uint16)
    config = helpers.tiny_config(steps=1, micro_batches=1, document_cap=256, softmax_rows=201)
    load_all(config, [tokens])
    config = train_gpt.with_values(config, {"softmax_rows": 200})
    with pytest.raises(ConfigError, match="softmax_rows=200: .*step 0 has 200 different"):
        load_all(config, [tokens])
    monkeypatch.setattr(
        train_gpt, "prefix_tokens", lambda config: np.minimum(np.arange(257) + 1, 200)
    )
    with pytest.raises(ConfigError, match="step 0 has 201 different"):
        load_all(config, [tokens])
