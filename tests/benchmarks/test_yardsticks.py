"""benchmarks/yardsticks.py: what compressors are charged for.

It is each document on its own, token by token as the track counts."""

import json
import math

import numpy as np
import pytest

REASON = "requirements.txt has it, and only benchmarks/yardsticks.py needs it"
pyppmd = pytest.importorskip("pyppmd", reason=f"no pyppmd: {REASON}")

import train_gpt
from benchmarks import common, yardsticks

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


def test_nats_by_hand():
    one_bit = yardsticks.nats_per_token([600, 400], [bytes(7000), bytes(1000)])
    assert one_bit == pytest.approx(math.log(2))
    four_bits = yardsticks.nats_per_token([1], [bytes(2)])
    assert four_bits == pytest.approx(4 * 0.69314718)


def test_more_training_text_helps_and_scoring_leaves_no_trace(monkeypatch):
    setting = SETTINGS["PPMd H"]
    document = [TEXT[-2000:]]
    monkeypatch.setattr(yardsticks, "AMOUNTS", (10_000, 30_000, len(TEXT) + 1))
    points = yardsticks.measure(setting, TEXT, document)
    assert [point["tokens"] for point in points] == [10_000, 30_000, len(TEXT)]
    assert points[0]["loss"] > points[1]["loss"] > 10 * points[2]["loss"]
    assert points[0]["seconds"] < points[1]["seconds"] < points[2]["seconds"]
    monkeypatch.setattr(yardsticks, "AMOUNTS", ())
    (alone,) = yardsticks.measure(setting, TEXT, document)
    assert alone["loss"] == points[2]["loss"]


# ----- results


def test_records_ends_are_means_over_their_runs(monkeypatch):
    losses = {"slow": (0.5, 0.7), "fast": (0.6,)}

    def runs_of(name):
        seconds = 9 if name == "slow" else 3
        return [{"seconds": seconds + i, "loss": loss} for i, loss in enumerate(losses[name])]

    monkeypatch.setattr(common, "record_folders", lambda track: list(losses))
    monkeypatch.setattr(common, "runs_of_record", runs_of)
    (fast, slow) = yardsticks.record_ends()
    assert fast == (3, 0.6) and slow == (9.5, pytest.approx(0.6))


def test_a_curve_is_below_another_from_the_point_on_after_which_it_stays_there():
    def curve(*points):
        return [{"seconds": seconds, "loss": loss} for seconds, loss in points]

    bound = curve((1, 0.9), (3, 0.8), (9, 0.7))
    assert yardsticks.below_from(curve((0.5, 0.8), (2, 0.85), (2.5, 0.79), (4, 0.6)), bound) == 2.5
    assert yardsticks.below_from(curve((2, 0.79), (10, 0.7)), bound) is None
    assert yardsticks.below_from(curve((2, 0.79), (10, 0.69)), bound) == 2


def test_yardsticks_leave_their_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(yardsticks, "AMOUNTS", (100_000,))
    assert yardsticks.main(["--tiny", "--results", str(tmp_path)]) == 0
    assert " nano_below_it_from:" in capsys.readouterr().out.splitlines()[-1]
    data = json.loads((tmp_path / "yardsticks.json").read_text())
    text = (tmp_path / "yardsticks.md").read_text()
    assert [result["arm"] for result in data["results"]] == ["PPMd", "PPMd of order 16", "xz"]
    for points in data["nano"].values():
        assert points[-1]["steps"] == common.TINY["steps"] and 0 < points[-1]["loss"] < 6
    for result in data["results"]:
        assert result["points"][-1]["tokens"] == data["settings"]["train_tokens"]
        assert 0 < result["points"][-1]["loss"] < result["points"][0]["loss"]
        assert f"| {result['arm']}, {result['setting']} | 100,000 |" in text
    picture = tmp_path / "yardsticks.png"
    assert picture.stat().st_size > 10_000
    picture.unlink()
    assert yardsticks.main(["--draw", "--results", str(tmp_path)]) == 0 and picture.is_file()


def test_without_a_corpus_it_ends_in_one_line(tmp_path, capsys):
    assert yardsticks.main(["--data", str(tmp_path), "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
