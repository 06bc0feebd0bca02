"""What an H100 would run in a run of fineweb: kernels, bytes, and what it costs to compile them.

    python -m venv .cache/cuda_venv                          once: 5 GB, with the versions pinned
    .cache/cuda_venv/bin/pip install torch===2.13.0 numpy
    .cache/cuda_venv/bin/python benchmarks/cuda_codegen.py

It needs torch's build for CUDA, and no GPU. One rank of eight makes the passes that the trainer's
warm_up makes, with tensors that have no content. torch.compile's CUDA code for them is written for
sm_90, never run: so there are no times of a GPU. `graphs` are those compiled anew for a row, and
the other figures are of these. `Triton` and `other` are launches; the latter are those of cuBLAS,
FlashAttention and torch itself. `GB` is what Triton's kernels read and write (Inductor's own
count), without matrix products and attention; `bound` is the time that an H100's memory takes for
it. What an update does outside of compiled code is not counted. `seconds` are this processor's,
for tracing and for writing the code, without Triton's compiler.
Results: benchmarks/results/cuda_codegen.{json,md}. The last line is of stage 1 and of all graphs.
"""

import copy
import dataclasses
import functools
import re
import sys
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensorMode

import train_gpt
from benchmarks import common

BYTES_PER_S = 3.35e12  # of an H100 SXM's memory
DISTINCT = 6000  # tokens of a pass, about as many as on FineWeb


# ----- a device that is not there


class Stand(types.SimpleNamespace):
    """An object in place of one of torch's: its attributes, and a hash, which Dynamo wants."""

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
    torch._subclasses.fake_tensor.init_gpu_context = always(None)  # torch 2.11 asks for a driver
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


class Generated(Exception):
    """Ends a compilation once the code is written."""


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
        self.code = None
        try:
            self.compile_fx.compile_fx_inner(moved, inputs, **options)
        except Exception:  # Inductor wraps the one that ends it
            if self.code is None:
                raise
        self.graphs.append(self.code.value)
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


def read_graph(code):
    """The figures of a graph's code: {"triton", "other": launches; "gigabytes"}."""
    body = code[code.find("def call(self, args)") :].partition("\nrunner =")[0]
    moved = {}
    for name, text in KERNEL.findall(code):
        figure = re.search(r"'kernel_num_gb': ([\d.e-]+)", text)
        moved[name] = float(figure[1]) if figure else 0.0
    calls = [name for name in re.findall(r"(\w+)\.run\(", body) if name in moved]
    other = re.findall(r"^(?!\s*assert).*(?:extern_kernels|torch\.ops)\.", body, re.MULTILINE)
    return {
        "triton": len(calls),
        "other": len(other),
        "gigabytes": sum(moved[name] for name in calls),
    }


# ----- what is measured


def norm_on_gpu(x, eps):
    """train_gpt.norm as it is for tensors on a GPU."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


class Passes:
    """The model of a rank of eight, and its passes over tensors without content."""

    rank = 0
    world_size = 8

    def __init__(self, config, generator):
        self.config = config
        self.model = train_gpt.GPT(config, train_gpt.VarlenAttention())
        torch.compiler.config.dynamic_sources = train_gpt.ANY_SIZE
        self.forward = generator.compile(self.model, dynamic=False, fullgraph=True)

    def make(self, step, length, phase, loss_weights):
        """The summed loss of a pass over `length` tokens before a step."""
        config = self.config
        dtype = config.torch_dtype
        micro_batch = train_gpt.MicroBatch(
            inputs=torch.empty(length, dtype=torch.int32),
            targets=torch.empty(length, dtype=torch.int64),
            segment_start=torch.empty(length, dtype=torch.int32),
            segment_bounds=torch.empty(length // 400, dtype=torch.int32),
            guesses=torch.empty(length, len(config.copy_orders), dtype=torch.int32),
            tokens=torch.empty(DISTINCT, dtype=torch.int64),
            slots=torch.empty(length, 1 + len(config.copy_orders), dtype=torch.int32),
        )
        ngram = torch.empty(length, config.model_dim, dtype=dtype, requires_grad=True)
        windows = train_gpt.long_windows_until(config, step)
        rotary = train_gpt.rotary_tables(2 * length, config.head_dim, windows, "cpu", dtype)
        weights = torch.empty(len(loss_weights))
        rows = self.model.token_rows(micro_batch.tokens)
        loss, *_ = self.forward(micro_batch, ngram, phase, weights, rotary, rows)
        return loss

    def train(self, step):
        config = self.config
        count = train_gpt.micro_batches_of_pass(config, step, self)
        phase = train_gpt.training_phase(config, step)
        weights = train_gpt.loss_weights_at(config, step)
        self.make(step, count * config.micro_batch_tokens, phase, weights).backward()

    @torch.no_grad()
    def validate(self, step):
        length = self.config.val_batch_tokens
        self.make(step, length, train_gpt.evaluation_phase(self.config, step, length), (1.0,))


def update(config, generator):
    """Update all parameters but the table's, at world size 1."""
    torch.compile = generator.compile
    try:
        model = train_gpt.GPT(config, train_gpt.BlockedAttention(is_fused=True))
        optimizer = train_gpt.Optimizer(config, model, None, train_gpt.Runtime("cpu"))
        step = config.adam_every - 1  # at which all parameters are due
        for group, pending in optimizer.reduce_whole(optimizer.parameter_groups, step).items():
            group.take_step = train_gpt.compiled_updates()
            group.receive(step, group.update(step, 1.0, pending))
    finally:
        torch.compile = torch_compile


def measure(config):
    """{what: figures}: those of read_graph, graphs, processor seconds."""
    generator = Generator()
    starts = {train_gpt.stage_at(config, step): step for step in reversed(range(config.steps))}
    starts = sorted(starts.values())
    figures = {}
    with FakeTensorMode():
        passes = Passes(config, generator)
        calls = {f"stage {n}": (passes.train, step) for n, step in enumerate(starts, 1)}
        calls["the last step"] = passes.train, config.steps - 1
        calls |= {f"validation in stage {n}": (passes.validate, s) for n, s in enumerate(starts, 1)}
        calls["validation at the end"] = passes.validate, config.steps
        calls["updates"] = functools.partial(update, config), generator
        for what, (work, argument) in calls.items():
            generator.graphs.clear()
            began = time.process_time()
            work(argument)
            figures[what] = {"graphs": len(generator.graphs), **sums_of(generator.graphs)}
            figures[what]["seconds"] = time.process_time() - began
            print(what, figures[what], flush=True)
    return figures


def sums_of(graphs):
    """What read_graph says of graphs, summed."""
    figures = dict.fromkeys(("triton", "other", "gigabytes"), 0)
    for code in graphs:
        for name, value in read_graph(code).items():
            figures[name] += value
    return figures


def report(figures):
    """(the table in Markdown, the last line)."""
    rows = []
    for what, figure in figures.items():
        bound = 1000 * figure["gigabytes"] * 1e9 / BYTES_PER_S
        sizes = [f"{figure['gigabytes']:.2f}", f"{bound:.2f}", f"{figure['seconds']:.0f}"]
        rows.append([what, figure["graphs"], figure["triton"], figure["other"], *sizes])
    header = ["", "graphs", "Triton", "other", "GB", "bound, ms", "seconds"]
    first = figures["stage 1"]
    launches = first["triton"] + first["other"]
    graphs = sum(figure["graphs"] for figure in figures.values())
    seconds = sum(figure["seconds"] for figure in figures.values())
    line = f"gigabytes:{first['gigabytes']:.2f} kernels:{launches} "
    line += f"graphs:{graphs} seconds:{seconds:.0f}"
    return f"{common.markdown_table(header, rows)}\n\n`{line}`", line


def main(argv=None):
    arguments = common.parser(__doc__).parse_args(argv)
    if not torch.version.cuda:
        remedy = "take its build for CUDA, as the top of this file says"
        sys.exit(f"error: torch {torch.__version__} has no CUDA; {remedy}")
    pretend_h100()
    # Tensors of no content are on the CPU, and what a GPU runs is traced on them.
    train_gpt.LOSS_CHUNK["cpu"] = train_gpt.LOSS_CHUNK["cuda"]
    train_gpt.norm = functools.partial(norm_on_gpu, eps=train_gpt.NORM_EPS)
    train_gpt.draw_parameters = always(None)
    config = dataclasses.replace(train_gpt.TRACKS["fineweb"], seed=1)
    figures = measure(config)
    page, line = report(figures)
    tokens = f"{config.micro_batch_tokens:,} tokens a micro-batch"
    text = f"The track fineweb, {len(config.layers)} layers, {tokens}:\n\n{page}"
    data = {"config": dataclasses.asdict(config), "figures": figures}
    common.write_results(arguments.results, "cuda_codegen", common.environment("cpu"), data, text)
    print(f"{text}\n{line}")


if __name__ == "__main__":
    main()
