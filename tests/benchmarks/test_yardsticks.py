"""benchmarks/yardsticks.py: what compressors are charged for.

It is each document on its own, token by token as the track counts."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

REASON = "requirements.txt has it, and only benchmarks/yardsticks.py needs it"
pyppmd = pytest.importorskip("pyppmd", reason=f"no pyppmd: {REASON}")
pytest.importorskip("zstandard", reason=f"no zstandard: {REASON}")

import train_gpt
from benchmarks import common, yardsticks
from records.log import Point

pytestmark = pytest.mark.slow


def training_text():
    """Python sources, each after end-of-text."""
    documents = common.python_documents(60_000)
    return b"".join(b"\0" + document.astype(np.uint8).tobytes() for document in documents)


def noise(seed, size):
    """Random bytes without end-of-text."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, 256, size=size).astype(np.uint8).tobytes()


TEXT = training_text()
NOISE = noise(0, 3000)
DOCUMENTS = [
    TEXT[20_000:23_000] + b"\0",
    b"x = 1\n\0",
    b"\0",
    b"def new(argument):\n    return argument ** 2\n" * 9,
    NOISE,
]
SETTINGS = {
    "PPMd H": yardsticks.ppmd("H", 16, 64),
    "PPMd I": yardsticks.ppmd("I", 16, 64),
    "xz": yardsticks.xz(len(TEXT)),
    "zstd": yardsticks.zstd(19, len(TEXT)),
}


@pytest.fixture(params=SETTINGS)
def setting(request):
    return SETTINGS[request.param]


@pytest.fixture
def stream(setting):
    """A stream that has read the training text."""
    stream = setting.start()
    yardsticks.read(stream, TEXT)
    return stream


def output(setting, *texts):
    """The whole output for the texts one after the other, in this process."""
    stream = setting.start()
    parts = []
    for text in texts:
        for low in range(0, len(text), yardsticks.PIECE):
            parts.append(stream.compress(text[low : low + yardsticks.PIECE]))
    parts.append(stream.flush())
    return b"".join(parts)


# ----- documents


def test_size_in_a_fork_is_that_of_text_and_document_less_that_of_the_text(setting, stream):
    alone = len(output(setting, TEXT, b"\0"))
    expected = [len(output(setting, TEXT, b"\0", document)) - alone for document in DOCUMENTS]
    assert yardsticks.document_sizes(stream, DOCUMENTS) == expected


def test_documents_do_not_help_one_another(stream):
    sizes = yardsticks.document_sizes(stream, DOCUMENTS)
    assert yardsticks.document_sizes(stream, DOCUMENTS[::-1]) == sizes[::-1]
    assert yardsticks.document_sizes(stream, [NOISE, NOISE]) == [sizes[-1]] * 2


def test_a_document_that_repeats_training_text_costs_far_less_than_noise(stream):
    sizes = yardsticks.document_sizes(stream, DOCUMENTS)
    assert sizes[0] < 0.05 * len(DOCUMENTS[0])
    assert sizes[-1] > 0.99 * len(NOISE)


def test_what_is_counted_for_ppmd_can_be_decoded():
    """The text is noise, whose output is long: pyppmd drops bytes of a call's beyond 32 KiB."""
    text = noise(1, 80_000)
    content = output(SETTINGS["PPMd H"], text)
    assert len(content) > 2 * 32 * 1024
    assert pyppmd.Ppmd7Decoder(16, 64 << 20).decode(content, len(text)) == text


def test_a_failing_copy_is_an_error(capfd):
    def fail():
        raise MemoryError

    with pytest.raises(ChildProcessError, match="memory"):
        yardsticks.in_a_fork(fail)


# ----- tokens


def test_every_scored_token_is_one_byte():
    tokens = np.array([256, 97, 98, 256, 256, 99, 256], dtype=np.uint16)
    text = yardsticks.text_of(tokens, 256)
    assert text == b"\0ab\0\0c\0"
    assert yardsticks.documents_of(text) == [b"ab\0", b"\0", b"c\0"]
    within = text[:-1]  # as validation ends within a document
    assert yardsticks.documents_of(within) == [b"ab\0", b"\0", b"c"]
    with pytest.raises(train_gpt.ConfigError, match="zero byte"):
        yardsticks.text_of(np.array([256, 0], dtype=np.uint16), 256)


def test_held_out_text_begins_a_document_and_is_not_read():
    train, held_out = yardsticks.hold_out(TEXT, 5000)
    assert train + held_out == TEXT and held_out[:1] == b"\0" and len(held_out) > 5000
    assert 0 not in held_out[1:-5000]  # no later document would do


def test_nats_by_hand():
    one_bit = yardsticks.nats_per_token([600, 400], [bytes(7000), bytes(1000)])
    assert one_bit == pytest.approx(math.log(2))
    four_bits = yardsticks.nats_per_token([1], [bytes(2)])
    assert four_bits == pytest.approx(4 * 0.69314718)


def test_amounts_double_and_hold_the_tracks_own():
    amounts = yardsticks.amounts_of(3_000_000, 1_300_000)
    assert amounts == [500_000, 1_000_000, 1_300_000, 2_000_000, 3_000_000]
    assert yardsticks.amounts_of(400, 1000) == [400]


def test_more_training_text_helps_and_scoring_leaves_no_trace():
    setting = SETTINGS["PPMd H"]
    document = [TEXT[-2000:]]
    points = yardsticks.measure(setting, TEXT, [10_000, 30_000, len(TEXT)], document)
    assert [point["tokens"] for point in points] == [10_000, 30_000, len(TEXT)]
    assert points[0]["loss"] > points[1]["loss"] > 10 * points[2]["loss"]
    (alone,) = yardsticks.measure(setting, TEXT, [len(TEXT)], document)
    assert alone["loss"] == points[2]["loss"]


def test_the_setting_of_the_lowest_loss_is_chosen():
    arms = {"PPMd": [yardsticks.ppmd("H", order, 64) for order in (2, 12)], "xz": [SETTINGS["xz"]]}
    chosen, tried = yardsticks.choose(arms, TEXT, 2000)
    assert chosen == {"PPMd": arms["PPMd"][1], "xz": arms["xz"][0]}
    settings = [*arms["PPMd"], *arms["xz"]]
    assert [trial["setting"] for trial in tried] == [setting.words for setting in settings]
    assert tried[1]["loss"] < tried[0]["loss"]


# ----- results


def test_curves_are_means_over_seeds(tmp_path):
    def result(arm, *points):
        points = [{"seconds": seconds, "loss": loss} for seconds, loss in points]
        return {"arm": arm, "points": points}

    first = result("a", (0, 5), (1, 3))
    second = result("a", (0, 5), (3, 4))
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"results": [first, result("b", (2, 2)), second]}))
    assert yardsticks.arm_curves(path) == {"a": [(2, 3.5)], "b": [(2, 2)]}


def test_curves_of_records(monkeypatch):
    first = SimpleNamespace(curves={"val": [Point(9, 0.5, 1000)]})
    second = SimpleNamespace(curves={"val": [Point(9, 0.7, 3000)]})
    record = SimpleNamespace(name="2026-01-01_Some-record", runs=[first, second])

    def repository():
        return SimpleNamespace(records={"nano": [record]})

    monkeypatch.setattr(yardsticks.Repository, "at", repository)
    curves = yardsticks.record_curves()
    assert list(curves) == ["Some-record"]
    assert curves["Some-record"] == [(2.0, pytest.approx(0.6))]


def test_yardsticks_leave_their_results(tmp_path, capsys):
    assert yardsticks.main(["--tiny", "--repeats", "1", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("ppmd_loss:")
    data = json.loads((tmp_path / "yardsticks.json").read_text())
    text = (tmp_path / "yardsticks.md").read_text()
    assert {result["arm"] for result in data["results"]} == set(yardsticks.candidates(1))
    for result in data["results"]:
        assert result["points"][-1]["tokens"] == data["settings"]["train_tokens"]
        assert 0 < result["points"][-1]["loss"] < result["points"][0]["loss"]
        assert f"| {result['arm']} | {result['setting']} |" in text
    curve = yardsticks.arm_curves(tmp_path / "yardsticks.json")["PPMd"]
    assert len(curve) == len(data["results"][0]["points"])
    picture = tmp_path / "yardsticks.png"
    assert picture.stat().st_size > 10_000
    picture.unlink()
    assert yardsticks.main(["--draw", "--results", str(tmp_path)]) == 0 and picture.is_file()


def test_without_a_corpus_it_ends_in_one_line(tmp_path, capsys):
    assert yardsticks.main(["--data", str(tmp_path), "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
