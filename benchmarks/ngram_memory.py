"""Show that sharing the n-gram table's rows among ranks buys a table as many times larger in the same memory.

    python benchmarks/ngram_memory.py [--rows 1048576] [--world-size 4] [--steps 20]

Trains the nano track with n-grams alone on the CPU: with a replicated table of --rows rows, then with a sharded one of
world size times as many. Results: benchmarks/results/ngram_memory.{json,md}; the last line is
`sharded_over_replicated:<ratio of the largest rank's peak memory>`.
"""
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import common  # noqa: E402


def main():
    corpus = common.ROOT / "data/python"
    arguments = common.parser(__doc__, rows=2**20, world_size=4, steps=20, data=corpus).parse_args()
    rows, data, peaks = [], {}, []
    with tempfile.TemporaryDirectory() as folder:
        for comms, factor in (("replicated", 1), ("sharded", arguments.world_size)):
            result = common.train(folder, comms, [
                "--track", "nano", "--data", str(arguments.data.resolve()), "--device", "cpu", "--compile", "false",
                "--steps", str(arguments.steps), "--val-tokens", "8192", "--seed", "1", "--ngram-comms", comms,
                "--ngram-rows", str(factor * arguments.rows), *common.words_of(common.N_GRAMS_ALONE)],
                arguments.world_size)
            peak = result["peak_memory_mib_by_rank"]
            values = factor * arguments.rows * result["config"]["model_dim"]
            rows.append([comms, f"{factor * arguments.rows:,}", f"{values * 4 / 2**20:,.0f}", f"{max(peak):,}",
                         f"{min(peak):,}", f"{result['val_loss']:.4f}"])
            final = re.findall(r"^(?:comms|final).*$", common.log_tail(folder, comms), re.MULTILINE)
            data[comms] = {"result": result, "log": final}
            peaks.append(max(peak))
    table = common.markdown_table(["comms", "table rows", "table, MiB", "peak memory of a rank, MiB: largest",
                                   "smallest", "validation loss"], rows)
    common.write_results(arguments.results, "ngram_memory", common.environment("cpu"), {"runs": data},
                         f"{table}\n\n{arguments.world_size} ranks on one CPU host, {arguments.steps} steps, without "
                         f"torch.compile; peak of the whole process, up to the end of training.")
    print(table)
    print(f"sharded_over_replicated:{peaks[1] / peaks[0]:.3f}")


if __name__ == "__main__":
    main()
