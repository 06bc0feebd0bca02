"""benchmarks/cuda_codegen.py: what it reads from generated code.

A test that generates some needs a CUDA build of torch, and is skipped without."""

import json
import subprocess

import pytest

from benchmarks import cuda_codegen
from helpers import ROOT

pytestmark = pytest.mark.slow

CUDA_PYTHON = ROOT / ".cache/cuda_venv/bin/python"
needs_cuda_build = pytest.mark.skipif(
    not CUDA_PYTHON.is_file(), reason="no CUDA build of torch; cuda_codegen.py says how to get one"
)


def test_peak_counts_what_lives_at_once():
    body = """
        buf0 = empty_strided_cuda((1024, 1024), (1024, 1), torch.float32)
        buf1 = empty_strided_cuda((1024, ), (1, ), torch.bfloat16)
        triton_a.run(arg0_1, buf0, buf1, 1024, stream=stream0)
        del arg0_1
        buf2 = buf0; del buf0  # reuse
        buf3 = reinterpret_tensor(buf1, (32, 32), (32, 1), 0); del buf1  # reuse
        del buf2
        buf4 = empty_strided_cuda((), (), torch.float64)
        del buf3
    """
    assert cuda_codegen.peak_bytes(body) == 4 * 1024**2 + 2 * 1024


def test_launches_are_counted_without_what_is_asserted_of_their_results():
    body = """def call(self, args):
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        buf1 = torch.ops.torch_attn._varlen_attn.default(buf0, buf0, buf0)
        assert_size_stride(buf2, (6, 128), (128, 1), 'torch.ops.torch_attn._varlen_attn.default')
        assert_alignment(buf2, 16, 'torch.ops.torch_attn._varlen_attn.default')
        triton_a.run(buf0, 1024, stream=stream0)
    """
    read = cuda_codegen.read_graph(cuda_codegen.Graph(body, 0, 0))
    assert (read["triton"], read["other"]) == (0, 2)  # that of Triton is not defined in this text


def test_without_cudas_build_it_says_so(monkeypatch):
    monkeypatch.setattr(cuda_codegen.torch.version, "cuda", None)
    with pytest.raises(SystemExit, match="has no CUDA; take its build for CUDA"):
        cuda_codegen.main([])


SCRIPT = """
import json, torch
from benchmarks import cuda_codegen as codegen
codegen.pretend_h100()
generator = codegen.Generator()
with codegen.FakeTensorMode():
    a, b = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((256, 128), (128, 64)))
    def function(a, b):
        return torch.relu(a @ b).square()
    generator.compile(function)(a, b)
read, = map(codegen.read_graph, generator.graphs)
print(json.dumps([read, codegen.assemble(generator.graphs[0])]))
"""


@needs_cuda_build
def test_launches_bytes_and_products_of_a_small_function():
    command = [CUDA_PYTHON, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read, spills = json.loads(done.stdout.splitlines()[-1])
    product = 2 * 256 * 64  # bytes
    assert (read["triton"], read["other"]) == (1, 1)
    assert read["gigabytes"] == pytest.approx(2 * product / 1e9, rel=0.1)
    moved = product + 2 * 256 * 128 + 2 * 128 * 64
    assert read["product_gigabytes"] == pytest.approx(moved / 1e9)
    assert read["teraflops"] == pytest.approx(2 * 256 * 128 * 64 / 1e12)
    assert read["peak_mib"] in (product / 2**20, 2 * product / 2**20)
    ((name, spilled),) = spills.items()
    assert "relu" in name and spilled == 0
