"""logs/runs.jsonl: which runs of which code were started for records. Every start counts, whatever came out.

The first run of a batch fixes how many it has; when all of them are begun, the next run begins another batch. A run
that is started again keeps its place. Both runs of a pair have the place of one: they count for the code that is
compared with its parent, and never for the parent's.
"""
import json
import re

from records.files import RecordError, write_whole
from records.log import Batch


def experiment_of(run_id):
    """The name that the runs of one command share."""
    return run_id.rpartition("-")[0]


def pair_of(run_id):
    """What a run's id and that of its partner have in common."""
    return re.sub(r"(?<=\d)[ab]$", "", run_id)


class Ledger:
    def __init__(self, path):
        self.path = path

    def read(self):
        """Every entry. What a killed writer left of a last line is none: the run that it was for did not begin."""
        lines, entries = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""], []
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                place = batch, counter, declared = [int(value) for value in entry["place"]]
                entries.append({"code": entry["code"], "place": place, "run": str(entry["run"])})
            except (ValueError, KeyError, TypeError):
                if number < len(lines):
                    raise RecordError(f"{self.path}: line {number} is no entry: {ascii(line[:60])[1:]}; put it right, "
                                      f"for every run counts") from None
                if line:
                    print(f"note: {self.path}: the last line is incomplete and is ignored: {ascii(line[:60])[1:]}")
        return entries

    def write(self, entries):
        write_whole(self.path, "".join(json.dumps(entry) + "\n" for entry in entries))

    def batch_of(self, track, code_sha256, experiment):
        """The number of the batch that an experiment has begun with this code, or else is going to begin."""
        own = [entry for entry in self.read() if entry["code"] == [track, code_sha256]]
        begun = [entry["place"][0] for entry in own if experiment_of(entry["run"]) == experiment]
        return begun[-1] if begun else max((entry["place"][0] for entry in own), default=0) + 1

    def start(self, track, code_sha256, declared, run_id):
        """Note that a run starts now, for the code whose batch it belongs to. Returns its Batch."""
        entries = self.read()
        own = [entry for entry in entries if entry["code"] == [track, code_sha256]]
        there = [entry for entry in own if pair_of(entry["run"]) == pair_of(run_id)]
        last = there[-1] if there else max(own, key=lambda entry: entry["place"], default={"place": [0, 0, 0]})
        batch, counter, size = last["place"]
        # runs of one batch under the names of two commands could not be submitted together
        if (there or counter < size) and (size != declared or experiment_of(last["run"]) != experiment_of(run_id)):
            raise RecordError(f"--runs {declared} for {run_id}: batch {batch} of this code has {size} runs, {counter} "
                              f"begun (last {last['run']}); finish it first, with the command that began it")
        if not there:
            batch, counter = (batch, counter + 1) if counter < size else (batch + 1, 1)
        place = [batch, counter, declared]
        self.write([*entries, {"code": [track, code_sha256], "place": place, "run": run_id}])
        return Batch(*place, sum(entry["run"] == run_id for entry in own) + 1)

    def take_back(self, run_id):
        """Forget the last start of a run, which did not come to its log's header: the script refused something."""
        entries = self.read()
        del entries[max(at for at, entry in enumerate(entries) if entry["run"] == run_id)]
        self.write(entries)
