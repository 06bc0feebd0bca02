"""benchmarks/cuda_codegen.py: what it reads from generated code."""

import pytest

from benchmarks import cuda_codegen

pytestmark = pytest.mark.slow


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
