"""benchmarks/records_verify.py: what it makes up are records."""

import re

from benchmarks import records_verify


def test_every_log_is_verified(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["records_verify.py", "--records", "2", "--runs", "9"])
    assert records_verify.main() == 0
    verdict, last = capsys.readouterr().out.splitlines()[-2:]
    assert verdict == "verify: ok, 2 records"
    assert re.fullmatch(r"records: 2 logs: 18 size: \d+ MiB verify: \d+\.\d\d s", last)
