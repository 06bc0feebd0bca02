"""logs/runs.jsonl: which runs of which code were started for records. Every start counts, whatever
came out.

The first run of a batch fixes how many it has; when all of them are begun, the next run begins
another batch. A run that is started again keeps its place. Both runs of a pair have the place of
one: they count for the code that is compared with its parent, and never for the parent's.
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


def parse_entry(line):
    """One start of a run: {code: [track, sha256], place: [batch, counter, declared], run: id}.
    It raises ValueError, KeyError or TypeError for what is none."""
    entry = json.loads(line)
    place = [int(value) for value in entry["place"]]
    if len(place) != 3:
        raise ValueError("a place is a batch, a counter and a number of runs")
    return {"code": entry["code"], "place": place, "run": str(entry["run"])}


class Ledger:
    """The file of all starts. It is read and written as a whole each time."""

    def __init__(self, path):
        """Nothing is read or written yet."""
        self.path = path

    def read(self):
        """Every entry. What a killed writer left of a last line is none: the run that it was for
        did not begin."""
        if not self.path.exists():
            return []
        entries = []
        lines = self.path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                entries.append(parse_entry(line))
            except (ValueError, KeyError, TypeError):
                shown = ascii(line[:60])[1:]
                if number < len(lines):
                    raise RecordError(
                        f"{self.path}: line {number} is no entry: {shown}; put it right, for every "
                        f"run counts"
                    ) from None
                if line:
                    print(f"note: {self.path}: the last line is incomplete and is ignored: {shown}")
        return entries

    def write(self, entries):
        """Replace the file by these entries."""
        write_whole(self.path, "".join(json.dumps(entry) + "\n" for entry in entries))

    def batch_of(self, track, code_sha256, experiment):
        """The number of the batch that an experiment has begun with this code, or else is going to
        begin."""
        own = entries_of(self.read(), track, code_sha256)
        begun = [entry["place"][0] for entry in own if experiment_of(entry["run"]) == experiment]
        if begun:
            return begun[-1]
        return max((entry["place"][0] for entry in own), default=0) + 1

    def start(self, track, code_sha256, declared, run_id):
        """Note that a run starts now, for the code whose batch it belongs to. Returns its Batch."""
        entries = self.read()
        own = entries_of(entries, track, code_sha256)
        there = [entry for entry in own if pair_of(entry["run"]) == pair_of(run_id)]
        if there:
            last = there[-1]
        else:
            last = max(own, key=place_of, default={"place": [0, 0, 0], "run": ""})
        batch, counter, size = last["place"]
        # Runs of one batch under the names of two commands could not be submitted together.
        other = size != declared or experiment_of(last["run"]) != experiment_of(run_id)
        if other and (there or counter < size):
            raise RecordError(
                f"--runs {declared} for {run_id}: batch {batch} of this code has {size} runs, "
                f"{counter} begun (last {last['run']}); finish it first, with the command that "
                f"began it"
            )
        if not there:
            batch, counter = following(batch, counter, size)
        place = [batch, counter, declared]
        self.write([*entries, {"code": [track, code_sha256], "place": place, "run": run_id}])
        begun = sum(entry["run"] == run_id for entry in own)
        return Batch(batch, counter, declared, begun + 1)

    def take_back(self, run_id):
        """Forget the last start of a run, which did not come to its log's header: the script
        refused something."""
        entries = self.read()
        del entries[max(at for at, entry in enumerate(entries) if entry["run"] == run_id)]
        self.write(entries)


def entries_of(entries, track, code_sha256):
    """The starts that count for one code on one track."""
    return [entry for entry in entries if entry["code"] == [track, code_sha256]]


def place_of(entry):
    """What sorts the entries of one code: batch, counter, declared number of runs."""
    return entry["place"]


def following(batch, counter, size):
    """The place after one: the next in its batch, or the first of another batch."""
    if counter < size:
        return batch, counter + 1
    return batch + 1, 1
