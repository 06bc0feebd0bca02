"""What an H100 would run for a training step of fineweb: kernels, bytes, buffers, spills.

    python -m venv .cache/cuda_venv                          once: 5 GB, with the versions pinned
    .cache/cuda_venv/bin/pip install torch===2.13.0 numpy numba
    .cache/cuda_venv/bin/python benchmarks/cuda_codegen.py [--step 0] [--stage NAME]

It needs torch's build for CUDA, and no GPU. The forward and backward pass of a micro-batch and the
updates of the parameters are traced with tensors that have no content. torch.compile's CUDA code
for them is written and assembled for sm_90, never run: there are no times, only bounds. `kernels`
are launches; `other` those of cuBLAS, FlashAttention and torch itself. `GB` is what Triton's
kernels read and write (Inductor's own count), `GB of products` what matrix products do. `memory
bound` is the time that all of it takes at 3.35 TB/s, `compute bound` that of the products at 790
TFLOP/s; attention's operations are not counted. `MiB at the peak` is of buffers that the code
makes, without what FlashAttention returns (a layer's output and sums of exponentials, 24.4 MiB for
16,384 tokens of 768 channels). Nor is counted what an update does outside of compiled code: divide
sums of gradients by tokens, and zero them. Results: benchmarks/results/cuda_codegen.{json,md}, in
which each --stage has a row. The last line has the figures of forward and backward pass together.
"""

import copy
import dataclasses
import json
import math
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import flop_registry

import train_gpt
from benchmarks import common

NAME = "cuda_codegen"
BYTES_PER_S = 3.35e12  # of an H100 SXM's memory
FLOPS_PER_S = 790e12  # of its bf16 products, as large ones reach them
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
# Figures of a graph's code that add up over graphs.
SUMS = ("triton", "other", "gigabytes", "product_gigabytes", "teraflops")


# ----- a device that is not there


class Stand(types.SimpleNamespace):
    """What stands in for an object of torch's: its attributes, and an identity, as Dynamo wants."""

    __hash__ = object.__hash__


CARD = {  # what Inductor asks of it
    "name": "NVIDIA H100 80GB HBM3",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 80 << 30,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block_optin": 232448,
    "L2_cache_size": 50 << 20,
}
LIMITS = {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132}
LIMITS |= {"warpSize": 32}  # what Triton asks


def always(value):
    """A function that returns a value, whatever it is given."""
    return lambda *args, **kwargs: value


def pretend_h100():
    """Make torch, Inductor and Triton believe in one H100, far enough to generate code for it."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.runtime.triton_helpers as triton_helpers
    import triton
    from triton.backends.compiler import GPUTarget

    card = Stand(**CARD)
    device = torch.device("cuda", 0)
    state = torch.zeros(16, dtype=torch.uint8)
    present = {"is_available": True, "current_device": 0, "get_device_properties": card}
    random = {"get_rng_state": state, "_lazy_init": None}
    exchange = {"_exchange_device": 0, "_maybe_exchange_device": 0}
    answers = {
        torch.cuda: {**present, **random, **exchange},
        torch.cuda.random: random,
        torch.accelerator: {"is_available": True},
        interfaces.CudaInterface: present,
        interfaces.CudaInterface.Worker: present,
        triton_helpers: {"set_driver_to_gpu": None},
    }
    for place, values in answers.items():
        for name, value in values.items():
            answer = always(value)
            if isinstance(place, type):
                answer = staticmethod(answer)
            setattr(place, name, answer)
    torch._C._ensureCUDADeviceGuardSet()
    triton.runtime.driver.set_active(
        Stand(
            get_current_target=always(GPUTarget("cuda", 90, 32)),
            get_current_device=always(0),
            is_active=always(True),
            get_active_torch_device=always(device),
            get_device_interface=always(torch.cuda),
            get_current_stream=always(0),
            get_benchmarker=always(None),
            utils=Stand(get_device_properties=always(LIMITS)),
        )
    )


# ----- from a function to its code


@dataclasses.dataclass
class Graph:
    """One graph's CUDA code, and its matrix products, which Inductor does not count."""

    code: str
    flops: int
    product_bytes: int


class Generated(Exception):
    """Ends a compilation once the code is written."""


def cost_of_node(node):
    """(floating-point operations, bytes) of a graph's matrix product; (0, 0) of other nodes."""
    packet = getattr(node.target, "overloadpacket", None)
    if getattr(packet, "__name__", "") not in PRODUCTS:
        return 0, 0
    words = node.args, node.kwargs
    args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda x: x.meta["val"], words)
    result = node.meta["val"]
    leaves = pytree.tree_leaves([args, kwargs, result])
    moved = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    return flop_registry[packet](*args, **kwargs, out_val=result), moved


torch_compile = torch.compile


class Generator:
    """torch.compile's stand-in.

    `compile` returns a function that leaves the CUDA code of its graphs in `graphs` when it is
    called with fake tensors, in the order of compilation: forward, then backward."""

    def __init__(self):
        from torch._inductor import compile_fx
        from torch._inductor.graph import GraphLowering

        self.graphs = []
        self.compile_fx = compile_fx
        # Inductor then writes each kernel's bytes beside it.
        torch._inductor.config.benchmark_kernel = True
        torch._inductor.config.compile_threads = 1
        torch._inductor.config.fx_graph_cache = False
        torch._functorch.config.enable_autograd_cache = False
        torch._dynamo.config.recompile_limit = 64

        def keep_code(lowering):
            self.code, _ = lowering.codegen()
            raise Generated

        GraphLowering.compile_to_module = keep_code

    def lower(self, graph, example, **options):
        """Inductor's inner compiler.

        It writes the code of a graph, traced on the CPU, as if its tensors were on CUDA. It returns
        the graph itself, to go on tracing with: autograd cannot run on fake tensors of a device
        without one."""
        from functorch.compile import make_boxed_func
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        moved = copy.deepcopy(graph)
        mode = torch._guards.detect_fake_mode(example)
        cuda = torch.device("cuda", 0)

        def on_cuda(value):
            if isinstance(value, torch.Tensor):
                size = value.shape, value.stride()
                return torch.empty_strided(*size, dtype=value.dtype, device=cuda)
            return cuda if isinstance(value, torch.device) else value

        for node in moved.graph.nodes:
            node.args, node.kwargs = pytree.tree_map(on_cuda, (node.args, node.kwargs))
        with mode:
            inputs = [on_cuda(value) for value in example]
        moved.recompile()
        FakeTensorProp(moved, mode).propagate_dont_convert_inputs(*inputs)
        costs = [cost_of_node(node) for node in moved.graph.nodes if node.op == "call_function"]
        self.code = None
        try:
            self.compile_fx.compile_fx_inner(moved, inputs, **options)
        except Exception:  # Inductor wraps the one that ends it
            if self.code is None:
                raise
        self.graphs.append(Graph(self.code.value, *map(sum, zip(*costs, strict=True))))
        return make_boxed_func(graph)

    def compile(self, function, dynamic=False, **options):
        """What torch.compile returns, but for the code."""

        def backend(graph, example):
            return self.compile_fx.compile_fx(graph, example, inner_compile=self.lower)

        return torch_compile(function, backend=backend, dynamic=dynamic, **options)


# ----- reading the code

KERNEL = re.compile(
    r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)", re.DOTALL
)

MADE = re.compile(r"\s+(buf\d+) = empty_strided_cuda\(\((.*?)\), \(.*?\), torch\.(\w+)\)")
AGAIN = re.compile(r"\s+(buf\d+) = (?:reinterpret_tensor\()?(\w+).*# (?:reuse|alias)")
GONE = re.compile(r"\s+del (\w+)$")


def peak_bytes(body):
    """The most bytes that the buffers which a graph's `call` makes take at once."""
    live = {}
    peak = 0
    for line in body.splitlines():
        made = MADE.match(line)
        again = AGAIN.match(line)
        gone = GONE.match(line)
        if made:
            sides = [int(side) for side in made[2].split(",") if side.strip()]
            live[made[1]] = math.prod(sides) * getattr(torch, made[3]).itemsize
        elif again and again[2] in live:
            live[again[1]] = live.pop(again[2])
        elif gone:
            live.pop(gone[1], None)
        peak = max(peak, sum(live.values()))
    return peak


def read_graph(graph):
    """The figures of a graph's code.

    {triton, other: launches; gigabytes, product_gigabytes, teraflops, peak_mib; kernels: [(GB,
    calls, name)]}"""
    body = graph.code[graph.code.find("def call(self, args)") :].partition("\nrunner =")[0]
    moved = {}
    for name, text in KERNEL.findall(graph.code):
        figure = re.search(r"'kernel_num_gb': ([\d.e-]+)", text)
        moved[name] = float(figure[1]) if figure else 0.0
    calls = [name for name in re.findall(r"(\w+)\.run\(", body) if name in moved]
    other = len(re.findall(r"^(?!\s*assert).*(?:extern_kernels|torch\.ops)\.", body, re.MULTILINE))
    kernels = [(moved[name] * calls.count(name), calls.count(name), name) for name in {*calls}]
    return {
        "triton": len(calls),
        "other": other,
        "gigabytes": sum(moved[name] for name in calls),
        "product_gigabytes": graph.product_bytes / 1e9,
        "teraflops": graph.flops / 1e12,
        "peak_mib": peak_bytes(body) / 2**20,
        "kernels": kernels,
    }


def spilled_bytes(kernel):
    """Bytes that a thread of a compiled kernel spills."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        path = getattr(kernel, "cubin_path", None)
        file.write(Path(path).read_bytes() if path else kernel.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.search(r"LOCAL:(\d+)", told.stdout)[1])


def assemble(graph):
    """Assemble a graph's Triton kernels, in their first configuration, for sm_90.

    Returns {kernel: bytes that a thread spills}."""
    from torch._inductor.codecache import PyCodeCache

    found = {}
    for text in {text for _, text in KERNEL.findall(graph.code)}:
        for name, value in vars(PyCodeCache.load(text)).items():
            if hasattr(value, "configs") and hasattr(value, "_precompile_config"):
                found[name] = spilled_bytes(value._precompile_config(value.configs[0]).kernel)
    return found


# ----- what is measured


def passes(config, step):
    """[(what, Graph)]: forward and backward pass of one micro-batch, of fake tensors."""
    generator = Generator()
    length, dtype = config.micro_batch_tokens, config.torch_dtype
    back_end = train_gpt.VarlenAttention()
    model = train_gpt.GPT(config, back_end)
    micro_batch = train_gpt.MicroBatch(
        inputs=torch.empty(length, dtype=torch.int32),
        targets=torch.empty(length, dtype=torch.int64),
        segment_start=torch.empty(length, dtype=torch.int32),
        segment_bounds=torch.empty(train_gpt.SEGMENT_ROOM, dtype=torch.int32),
        guesses=torch.empty(length, len(config.copy_orders), dtype=torch.int32),
        prior=torch.empty(length),
    )
    ngram = torch.empty(length, config.model_dim, dtype=dtype, requires_grad=True)
    windows = train_gpt.long_windows_until(config, step)
    phase = train_gpt.training_phase(config, step)
    shape = 2 * length, config.head_dim, config.attention_scale, windows, "cpu", dtype
    rotary = train_gpt.rotary_tables(*shape)
    forward = generator.compile(model, dynamic=False, fullgraph=True)
    weights = torch.empty(len(train_gpt.loss_weights_at(config, step)))
    prefixes = torch.empty(config.vocab_size, dtype=torch.int64)
    loss, *_ = forward(micro_batch, ngram, phase, weights, prefixes, rotary)
    torch.autograd.grad(loss, [*model.parameters(), ngram], allow_unused=True)
    return list(zip(("forward", "backward"), generator.graphs, strict=True))


def updates(config, step):
    """[Graph]: the updates of all parameters but the table's, at world size 1."""
    generator = Generator()
    torch.compile = generator.compile
    try:
        runtime = train_gpt.Runtime("cpu")
        model = train_gpt.GPT(config, train_gpt.BlockedAttention())
        for group in train_gpt.Optimizer(config, model, None, runtime).parameter_groups:
            group.take_step = train_gpt.compiled_updates()
            group.receive(group.update(step, 1.0, group.reduce(step)))
    finally:
        torch.compile = torch_compile
    return generator.graphs


def measure(config, step):
    """{"forward" | "backward" | "updates": figures}, see row_of."""
    due = step + config.adam_every - 1  # a step at which all parameters are due
    with FakeTensorMode():
        parts = {what: [graph] for what, graph in passes(config, step)}
        parts["updates"] = updates(config, due)
    figures = {}
    for what, graphs in parts.items():
        read = [read_graph(graph) for graph in graphs]
        spills = [spilled for graph in graphs for spilled in assemble(graph).values()]
        figures[what] = {
            **{name: sum(one[name] for one in read) for name in SUMS},
            "peak_mib": max(one["peak_mib"] for one in read),
            "spilling": sum(spilled > 0 for spilled in spills),
            "kernels": sorted(sum((one["kernels"] for one in read), []), reverse=True)[:5],
        }
    return figures


def row_of(what, figure):
    """A row of the first table."""
    names = (*SUMS, "peak_mib", "spilling")
    memory = (figure["gigabytes"] + figure["product_gigabytes"]) * 1e9 / BYTES_PER_S
    compute = figure["teraflops"] * 1e12 / FLOPS_PER_S
    return [what, *map(cell, [*[figure[name] for name in names], 1000 * memory, 1000 * compute])]


def cell(value):
    """A figure with as many digits as mean something."""
    return f"{value:,.0f}" if value == int(value) or value > 100 else f"{value:.2f}"


def totals(figures):
    """The last line's figures: of forward and backward pass together."""
    both = [figures["forward"], figures["backward"]]
    return {
        "gigabytes": sum(one["gigabytes"] for one in both),
        "peak_mib": max(one["peak_mib"] for one in both),
        "kernels": sum(one["triton"] + one["other"] for one in both),
        "spills": sum(one["spilling"] for one in both),
        "updates": figures["updates"]["triton"] + figures["updates"]["other"],
        "update_gigabytes": figures["updates"]["gigabytes"],
    }


def report(figures, stages):
    """The three tables of the page."""
    header = ["", "Triton", "other", "GB", "GB of products", "TFLOP", "MiB at the peak", "spilling"]
    header += ["memory bound, ms", "compute bound, ms"]
    detail = common.markdown_table(header, [row_of(*item) for item in figures.items()])
    kernels = [
        [what, f"{gigabytes:.2f}", calls, f"`{name[:90]}`"]
        for what, figure in figures.items()
        for gigabytes, calls, name in figure["kernels"]
    ]
    kernels = common.markdown_table(["pass", "GB", "launches", "kernel"], kernels)
    rows = [[stage, *map(cell, one.values())] for stage, one in stages.items()]
    header = ["version", "GB", "MiB at the peak", "kernels", "spilling", "kernels of the updates"]
    history = common.markdown_table([*header, "GB of the updates"], rows)
    return (
        f"{detail}\n\nThe kernels that move most:\n\n{kernels}\n\n"
        f"Forward and backward pass together, version by version:\n\n{history}"
    )


def main(argv=None):
    arguments = common.parser(__doc__, step=0, stage="now").parse_args(argv)
    if not torch.version.cuda:
        remedy = "take its build for CUDA, as the top of this file says"
        sys.exit(f"error: torch {torch.__version__} has no CUDA; {remedy}")
    pretend_h100()
    train_gpt.LOSS_CHUNK["cpu"] = train_gpt.LOSS_CHUNK["cuda"]  # where tensors of no content are
    config = dataclasses.replace(train_gpt.TRACKS["fineweb"], seed=1)
    figures = measure(config, arguments.step)
    found = totals(figures)
    path = arguments.results / f"{NAME}.json"
    stages = json.loads(path.read_text())["stages"] if path.is_file() else {}
    stages[arguments.stage] = found
    text = f"""Of the fineweb track at step {arguments.step}, {len(config.layers)} layers,
{config.micro_batch_tokens:,} tokens:\n\n{report(figures, stages)}"""
    data = {"config": dataclasses.asdict(config), "figures": figures, "stages": stages}
    common.write_results(arguments.results, NAME, common.environment("cpu"), data, text)
    print(text)
    print(
        f"gigabytes:{found['gigabytes']:.2f} peak_mib:{found['peak_mib']:.0f} "
        f"kernels:{found['kernels']} spills:{found['spills']}"
    )


if __name__ == "__main__":
    main()
