"""What an H100 would run for a training step: kernels, bytes, buffers and spills, worked out without a GPU.

    python benchmarks/cuda_codegen.py --setup                 once: its own virtual environment, about 5 GB
    python benchmarks/cuda_codegen.py [--step 0] [--layers 12] [--float8 off] [--stage NAME]

The forward and backward pass of a micro-batch and the updates of the parameters are traced with tensors that have no
content. torch.compile's CUDA code for them is written and assembled for sm_90, never run: there are no times, only
bounds. `kernels` are launches; `other` those of cuBLAS, FlashAttention and torch itself. `GB` is what Triton's kernels
read and write (Inductor's own count), `GB of products` what matrix products do. `memory bound` is the time that all of
it takes at 3.35 TB/s, `compute bound` that of the products at 790 TFLOP/s; attention's operations are not counted.
`MiB at the peak` is of buffers that the code makes, without what FlashAttention returns (a layer's output and sums of
exponentials, 24.4 MiB for 16,384 tokens of 768 channels). Updates that are not compiled count as torch's operations, each of
which is a kernel that reads its arguments and writes its result.
Results: benchmarks/results/NAME.{json,md}. The last line has the figures of forward and backward pass together.
"""
import contextlib
import copy
import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402
import torch.utils._pytree as pytree  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

import train_gpt  # noqa: E402
from benchmarks import common  # noqa: E402

ENVIRONMENT = common.ROOT / ".cache" / "cuda_venv"
BYTES_PER_S, FLOPS_PER_S = 3.35e12, 790e12  # of an H100 SXM: memory; bf16 products as large ones reach them

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}


# ----- the environment

def set_up():
    """Make the virtual environment: what requirements.txt pins, torch as its build for CUDA, which brings triton."""
    pinned = (common.ROOT / "requirements.txt").read_text()
    wanted = ENVIRONMENT.with_suffix(".txt")
    wanted.parent.mkdir(exist_ok=True)
    wanted.write_text(re.sub(r"^torch==", "torch===", pinned, flags=re.MULTILINE))  # === refuses 2.13.0+cpu
    subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
    subprocess.run([ENVIRONMENT / "bin/python", "-m", "pip", "install", "--quiet", "--requirement", wanted], check=True)


def cuda_python():
    """The Python that can generate CUDA code: this one, that of the environment, or None."""
    made = ENVIRONMENT / "bin" / "python"
    return sys.executable if torch.version.cuda else str(made) if made.is_file() else None


# ----- a device that is not there

class Stand(types.SimpleNamespace):
    """What stands in for an object of torch's: its attributes, and an identity, as Dynamo wants."""
    __hash__ = object.__hash__


def pretend_h100():
    """Make torch, Inductor and Triton believe in one H100, far enough to generate code for it."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.runtime.triton_helpers as triton_helpers
    import torch._subclasses.fake_tensor as fake_tensor
    import triton
    from triton.backends.compiler import GPUTarget

    def always(value):
        return lambda *args, **kwargs: value
    card = Stand(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
        shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20, is_integrated=0, clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120,
        gcnArchName="")
    limits = {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32,
              "sm_clock_rate": 1980000, "mem_clock_rate": 2619000, "mem_bus_width": 5120}
    device, state = torch.device("cuda", 0), torch.zeros(16, dtype=torch.uint8)
    stream = Stand(stream_id=0, device_index=0, device=device, device_type=1, cuda_stream=0)
    driver = Stand(
        get_current_target=always(GPUTarget("cuda", 90, 32)), get_current_device=always(0), is_active=always(True),
        get_active_torch_device=always(device), get_device_interface=always(torch.cuda), get_current_stream=always(0),
        get_benchmarker=always(None), utils=Stand(get_device_properties=always(limits)))
    interface = interfaces.CudaInterface
    answers = {
        torch.cuda: {"is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": card,
                     "get_device_capability": (9, 0), "get_device_name": card.name,
                     "mem_get_info": (79 << 30, 80 << 30), "synchronize": None, "set_device": None,
                     "_lazy_init": None, "init": None, "current_stream": stream, "_exchange_device": 0,
                     "_maybe_exchange_device": 0, "get_rng_state": state, "set_rng_state": None},
        torch.cuda.random: {"get_rng_state": state, "set_rng_state": None, "_lazy_init": None},
        torch.accelerator: {"current_device_index": 0, "current_device_idx": 0, "device_count": 1, "is_available": True,
                            "set_device_index": None, "set_device_idx": None, "synchronize": None,
                            "current_stream": stream},
        interface: {"get_device_properties": card, "current_device": 0, "get_compute_capability": 90,
                    "is_available": True, "device_count": 1, "synchronize": None, "get_raw_stream": 0,
                    "current_stream": stream, "exchange_device": 0, "maybe_exchange_device": 0},
        interface.Worker: {"get_device_properties": card, "current_device": 0},
        fake_tensor: {"init_gpu_context": None}, triton_helpers: {"set_driver_to_gpu": None}}
    for place, values in answers.items():
        for name, value in values.items():
            setattr(place, name, staticmethod(always(value)) if isinstance(place, type) else always(value))
    torch._C._ensureCUDADeviceGuardSet()
    triton.runtime.driver.set_active(driver)
    train_gpt.kernels_run = always(True)


# ----- from a function to its code

@dataclasses.dataclass
class Graph:
    """One graph's CUDA code, and what Inductor does not count: matrix products, and other bytes of our own kernels."""
    code: str
    flops: int
    product_bytes: int
    kernel_bytes: int


class Generated(Exception):
    """Ends a compilation once the code is written."""


def size_of(values):
    return sum(value.nbytes for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor))


def cost_of_product(function, args, kwargs, result):
    """(floating-point operations, bytes) of an operation of torch's where that is a matrix product, else (0, 0)."""
    packet = getattr(function, "overloadpacket", None)
    if getattr(packet, "__name__", "") not in PRODUCTS:
        return 0, 0
    return flop_registry[packet](*args, **kwargs, out_val=result), size_of([args, kwargs, result])


def cost_of_node(node):
    """(floating-point operations of products, their bytes, other bytes of kernels of chapter 11) of a graph's node."""
    args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda x: x.meta["val"], (node.args, node.kwargs))
    if getattr(node.target, "__name__", "") == "triton_kernel_wrapper_functional":  # all of them are products
        given = dict(kwargs["kwargs"])
        left, right = given["left"], given["right"]
        product = size_of([given.pop(name) for name in ("left", "right", "out")])
        return 2 * len(left) * len(right) * left.size(1), product, size_of(given)
    return *cost_of_product(node.target, args, kwargs, node.meta.get("val")), 0


class Generator:
    """torch.compile's stand-in: `compile` returns a function that leaves the CUDA code of its graphs in `graphs` when
    it is called with fake tensors, in the order of compilation: forward, then backward."""
    def __init__(self):
        from torch._inductor import compile_fx
        from torch._inductor.graph import GraphLowering
        self.graphs, self.counting, self.compile_fx = [], False, compile_fx
        torch._inductor.config.benchmark_kernel = True  # Inductor then writes each kernel's bytes beside it
        torch._inductor.config.compile_threads, torch._inductor.config.fx_graph_cache = 1, False
        torch._functorch.config.enable_autograd_cache = False
        torch._dynamo.config.recompile_limit = 64

        def keep_code(lowering):
            self.code, _ = lowering.codegen()
            raise Generated
        GraphLowering.compile_to_module = keep_code

    def lower(self, graph, example, **options):
        """Inductor's inner compiler: writes the code of a graph, traced on the CPU, as if its tensors were on CUDA.
        Returns the graph itself, to go on tracing with: autograd cannot run on fake tensors of a device without one."""
        from functorch.compile import make_boxed_func
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp
        moved, mode, cuda = copy.deepcopy(graph), torch._guards.detect_fake_mode(example), torch.device("cuda", 0)
        for node in moved.graph.nodes:
            node.args, node.kwargs = pytree.tree_map(lambda value: cuda if isinstance(value, torch.device) else value,
                                                     (node.args, node.kwargs))
        with mode:
            inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=cuda)
                      if isinstance(x, torch.Tensor) else x for x in example]
        moved.recompile()
        FakeTensorProp(moved, mode).propagate_dont_convert_inputs(*inputs)
        costs = [cost_of_node(node) for node in moved.graph.nodes if node.op == "call_function"]
        try:
            self.compile_fx.compile_fx_inner(moved, inputs, **options)
        except Exception as error:  # Inductor wraps what is raised inside
            cause = error
            while not isinstance(cause, Generated):
                cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
                if cause is None:
                    raise
        self.graphs.append(Graph(self.code.value, *map(sum, zip(*costs))))
        return make_boxed_func(graph)

    def compile(self, function=None, **options):
        """What torch.compile returns, but for the code; the launches of its graphs are not counted as eager ones."""
        def backend(graph, example):
            return self.compile_fx.compile_fx(graph, example, inner_compile=self.lower)
        options = {key: value for key, value in options.items() if key in ("dynamic", "fullgraph")}
        compiled = torch_compile(function, backend=backend, **options)

        @functools.wraps(function)
        def call(*args, **kwargs):
            with _pop_mode_temporarily() if self.counting else contextlib.nullcontext():  # or torch would not compile
                return compiled(*args, **kwargs)
        return call


torch_compile = torch.compile


class EagerKernels(TorchDispatchMode):
    """Counts torch's operations outside of compiled graphs: launches, and the bytes that they read and write."""
    def __init__(self, generator):
        super().__init__()
        self.generator, self.launches, self.bytes, self.flops, self.product_bytes = generator, 0, 0, 0, 0

    def __enter__(self):
        self.generator.counting = True
        return super().__enter__()

    def __exit__(self, *error):
        self.generator.counting = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        returns = function._schema.returns
        view = returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        free = view or function.namespace == "prim" or function.overloadpacket.__name__.startswith(("empty", "detach"))
        if not free:
            self.launches += 1
            flops, product_bytes = cost_of_product(function, args, kwargs or {}, result)
            self.flops, self.product_bytes = self.flops + flops, self.product_bytes + product_bytes
            self.bytes += 0 if product_bytes else size_of([args, kwargs, result])
        return result


# ----- reading the code

KERNEL = re.compile(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


def peak_bytes(body):
    """The most bytes that the buffers which a graph's `call` makes take at once."""
    live, now, peak = {}, 0, 0
    for line in body.splitlines():
        made = re.match(r"\s+(buf\d+) = empty_strided_cuda\(\((.*?)\), \(.*?\), torch\.(\w+)\)", line)
        again = re.match(r"\s+(buf\d+) = (?:reinterpret_tensor\()?(\w+).*# (?:reuse|alias)", line)
        gone = re.match(r"\s+del (\w+)$", line)
        if made:
            sides = [int(side) for side in made[2].split(",") if side.strip()]
            live[made[1]] = math.prod(sides) * getattr(torch, made[3]).itemsize
            now += live[made[1]]
            peak = max(peak, now)
        elif again and again[2] in live:
            live[again[1]] = live.pop(again[2])
        elif gone:
            now -= live.pop(gone[1], 0)
    return peak


def read_graph(graph):
    """{triton, other: launches; gigabytes, product_gigabytes, teraflops, peak_mib; kernels: [(GB, calls, name)]}."""
    body = graph.code[graph.code.find("def call(self, args)"):].partition("\nrunner =")[0]
    moved = {}
    for name, text in KERNEL.findall(graph.code):
        figure = re.search(r"'kernel_num_gb': ([\d.e-]+)", text)
        moved[name] = float(figure[1]) if figure else 0.0
    calls = [name for name in re.findall(r"(\w+)\.run\(", body) if name in moved]
    other = len(re.findall(r"^(?!\s*assert).*(?:extern_kernels|torch\.ops)\.", body, re.MULTILINE))
    kernels = sorted(((moved[name] * calls.count(name), calls.count(name), name) for name in {*calls}), reverse=True)
    return {"triton": len(calls), "other": other, "gigabytes": sum(moved[name] for name in calls) + graph.kernel_bytes / 1e9,
            "product_gigabytes": graph.product_bytes / 1e9, "teraflops": graph.flops / 1e12,
            "peak_mib": peak_bytes(body) / 2**20, "kernels": kernels}


def registers_and_spills(kernel):
    """(registers of a thread, bytes that it spills) of a compiled kernel."""
    import triton.backends.nvidia as nvidia
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        path = getattr(kernel, "cubin_path", None)
        file.write(Path(path).read_bytes() if path else kernel.asm["cubin"])
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return tuple(map(int, re.search(r"REG:(\d+) STACK:\d+ SHARED:\d+ LOCAL:(\d+)", told.stdout).groups()))


def assemble(graph):
    """Assemble a graph's Triton kernels, in their first configuration, for sm_90: [(kernel, registers, spills)]."""
    from torch._inductor.codecache import PyCodeCache
    rows = []
    for text in {text for _, text in KERNEL.findall(graph.code)}:
        name, kernel = next((name, value) for name, value in vars(PyCodeCache.load(text)).items()
                            if hasattr(value, "configs") and hasattr(value, "_precompile_config"))
        made = kernel._precompile_config(kernel.configs[0])
        rows.append((name, *registers_and_spills(made.kernel)))
    return sorted(rows)


# ----- what is measured

def shape_of_run(track, layers, **overrides):
    """The track's Config, with fewer layers on demand."""
    config = dataclasses.replace(train_gpt.TRACKS[track], seed=1, **overrides)
    if layers != config.num_layers:
        config = dataclasses.replace(config, num_layers=layers, long_layers=(layers - 1,),
                                     value_embedding_layers=tuple({min(1, layers - 1), layers - 1}))
    return config


def passes(config, step):
    """[(what, Graph)]: forward and backward pass of one micro-batch. To be called with fake tensors."""
    generator, length, columns = Generator(), config.micro_batch_tokens, config.columns
    dtype, int32 = getattr(torch, config.dtype), {"dtype": torch.int32}
    model = train_gpt.GPT(config, "varlen" if config.dtype == "bfloat16" else "sdpa", drawn=False,
                          float8=config.float8)
    micro_batch = train_gpt.MicroBatch(
        torch.empty(length, **int32), torch.empty(length, dtype=torch.int64), torch.empty(length, **int32),
        torch.empty(train_gpt.BOUNDS + 1, **int32), torch.empty(length, columns, **int32), torch.empty(length, columns))
    ngram = torch.empty(length, config.model_dim, dtype=dtype, requires_grad=True)
    rotary = train_gpt.rotary_tables(length, config.head_dim, train_gpt.windows_until(config, step), "cpu", dtype)
    context = train_gpt.Context(train_gpt.phase_at(config, step), rotary, {})
    loss, *_ = generator.compile(model, dynamic=False, fullgraph=True)(micro_batch, ngram, context)
    torch.autograd.grad(loss, [*model.parameters(), ngram], allow_unused=True)
    return list(zip(("forward", "backward"), generator.graphs))


def updates(config, step, compiled):
    """(EagerKernels, [Graph]): the updates of all parameters but the n-gram table, at world size 1."""
    generator = Generator()
    torch.compile = generator.compile
    try:
        runtime = train_gpt.Runtime("cpu", workers=1)
        model = train_gpt.GPT(config, "sdpa", drawn=False)
        optimizer = train_gpt.Optimizer(config, model, train_gpt.NgramTable(config, runtime), runtime)
        groups = [group for group in optimizer.groups if group.name != "ngram_table"]
        for group in groups:
            group.take_step = train_gpt.compiled_updates() if compiled else group.take_step
            group.reduce(step)
        with EagerKernels(generator) as eager:
            for group in groups:
                group.update(step, 1.0)
            for group in groups:
                group.receive(step)
    finally:
        torch.compile = torch_compile
    return eager, generator.graphs


def measure(config, step):
    """{"forward" | "backward" | "updates" | "updates, not compiled": figures}, see row_of."""
    due, nothing = step + config.adam_every - 1, types.SimpleNamespace(launches=0, bytes=0, flops=0, product_bytes=0)
    with FakeTensorMode():
        parts = [(what, nothing, [graph]) for what, graph in passes(config, step)]
        parts += [(what, *updates(config, due, compiled))  # at a step at which all parameters are due
                  for what, compiled in (("updates", True), ("updates, not compiled", False))]
    figures = {}
    for what, eager, graphs in parts:
        read = [read_graph(graph) for graph in graphs]
        total = {key: sum(one[key] for one in read) for key in
                 ("triton", "other", "gigabytes", "product_gigabytes", "teraflops")}
        total["other"] += eager.launches
        total["gigabytes"] += eager.bytes / 1e9
        total["product_gigabytes"] += eager.product_bytes / 1e9
        total["teraflops"] += eager.flops / 1e12
        figures[what] = {**total, "peak_mib": max([one["peak_mib"] for one in read], default=0),
                         "spilling": [row for graph in graphs for row in assemble(graph) if row[2]],
                         "kernels": sorted((kernel for one in read for kernel in one["kernels"]), reverse=True)[:8]}
    return figures


def row_of(what, figure):
    memory = (figure["gigabytes"] + figure["product_gigabytes"]) * 1e9 / BYTES_PER_S
    compute = figure["teraflops"] * 1e12 / FLOPS_PER_S
    return [what, figure["triton"], figure["other"], f"{figure['gigabytes']:.2f}",
            f"{figure['product_gigabytes']:.2f}", f"{figure['teraflops']:.2f}", f"{figure['peak_mib']:,.0f}",
            len(figure["spilling"]), f"{1000 * memory:.2f}", f"{1000 * compute:.2f}"]


def totals(figures):
    """The last line's figures: of forward and backward pass together."""
    both = [figures["forward"], figures["backward"]]
    return {"gigabytes": sum(one["gigabytes"] for one in both), "peak_mib": max(one["peak_mib"] for one in both),
            "kernels": sum(one["triton"] + one["other"] for one in both),
            "spills": sum(len(one["spilling"]) for one in both),
            "updates": figures["updates"]["triton"] + figures["updates"]["other"],
            "update_gigabytes": figures["updates"]["gigabytes"]}


def main(argv=None):
    parser = common.parser(__doc__, track="fineweb", step=0, layers=12, float8="off", stage="now", name="cuda_codegen",
                           setup=False)
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    if arguments.setup:
        return set_up()
    if not (python := cuda_python()):
        sys.exit(f"error: torch {torch.__version__} has no CUDA; run `python benchmarks/cuda_codegen.py --setup` once")
    if python != sys.executable:
        return subprocess.run([python, __file__, *argv]).returncode
    pretend_h100()
    config = shape_of_run(arguments.track, arguments.layers, float8=arguments.float8)
    figures = measure(config, arguments.step)
    found = totals(figures)
    header = ["", "Triton", "other", "GB", "GB of products", "TFLOP", "MiB at the peak", "spilling",
              "memory bound, ms", "compute bound, ms"]
    detail = common.markdown_table(header, [row_of(*item) for item in figures.items()])
    kernels = common.markdown_table(["pass", "GB", "launches", "kernel"], [
        [what, f"{gigabytes:.2f}", calls, f"`{name[:90]}`"] for what, figure in figures.items()
        for gigabytes, calls, name in figure["kernels"][:5]])
    path = Path(arguments.results) / f"{arguments.name}.json"
    stages = json.loads(path.read_text())["stages"] if path.is_file() else {}
    stages[arguments.stage] = found
    history = common.markdown_table(
        ["version", "GB", "MiB at the peak", "kernels", "spilling", "kernels of the updates", "GB of the updates"],
        [[stage, f"{one['gigabytes']:.1f}", f"{one['peak_mib']:,.0f}", one["kernels"], one["spills"], one["updates"],
          f"{one['update_gigabytes']:.1f}"] for stage, one in stages.items()])
    text = (f"Of the {arguments.track} track at step {arguments.step}, {config.num_layers} layers, "
            f"{config.micro_batch_tokens:,} tokens:\n\n{detail}\n\nThe kernels that move most:\n\n{kernels}\n\n"
            f"Forward and backward pass together, version by version:\n\n{history}")
    common.write_results(arguments.results, arguments.name, common.environment("cpu"),
                         {"config": dataclasses.asdict(config), "figures": figures, "stages": stages}, text)
    print(text)
    print(f"gigabytes:{found['gigabytes']:.2f} peak_mib:{found['peak_mib']:.0f} kernels:{found['kernels']} "
          f"spills:{found['spills']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
