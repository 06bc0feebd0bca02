"""logs/runs.jsonl: which runs of which code were started for records. Every start counts, whatever came out.

The first run of a batch fixes how many it has; when all of them are begun, the next run begins another batch. A run
that is started again keeps its place. Older scripts, which are told `--runs N`, write these lines themselves.
"""
import json

from records.files import RecordError, write_whole


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

    def start(self, track, code_sha256, declared, run_id):
        """Note that a run starts now. Returns what its script is told with --run-of: BATCH:COUNTER/RUNS:START."""
        entries, code = self.read(), [track, code_sha256]
        own = [entry for entry in entries if entry["code"] == code]
        again = [entry for entry in own if entry["run"] == run_id]
        last = again[-1] if again else max(own, key=lambda entry: entry["place"], default={"place": [0, 0, 0]})
        batch, counter, size = last["place"]
        # runs of one batch under the names of two commands could not be submitted together
        if (again or counter < size) and (
                size != declared or last["run"].rpartition("-")[0] != run_id.rpartition("-")[0]):
            raise RecordError(f"--runs {declared} for {run_id}: batch {batch} of this code has {size} runs, {counter} "
                              f"begun (last {last['run']}); finish it first, with the command that began it")
        if not again:
            batch, counter = (batch, counter + 1) if counter < size else (batch + 1, 1)
        self.write([*entries, {"code": code, "place": [batch, counter, declared], "run": run_id}])
        return f"{batch}:{counter}/{declared}:{len(again) + 1}"

    def take_back(self, run_id):
        """Forget the last start of a run, which did not come to its log's header: the script refused something."""
        entries = self.read()
        del entries[max(at for at, entry in enumerate(entries) if entry["run"] == run_id)]
        self.write(entries)
