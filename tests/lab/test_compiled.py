"""lab.experiments.compiled: parts of a model compiled, and a GPU's kernels by kind."""

import mlx.core as mx
import pytest

from moelab import DATA
from moelab.lab.experiments import compiled

TINY = DATA / "models" / "tiny-moe"


def test_fewer_operations_write_the_same_text():
    made = compiled.compiled(TINY, tokens=4, rounds=1).set_index("variant")
    plain, moe, layers = made.operations[[compiled.PLAIN, compiled.MOE, compiled.LAYERS]]
    assert plain > moe > layers
    if not mx.cuda.is_available():  # in bfloat16 a fused operation can round to another token
        assert (made.same_tokens == 4).all()


@pytest.mark.parametrize(
    "name, kind",
    [
        ("void mlx::core::cu::qmm_sm80_kernel<64, cutlass::bfloat16_t>", "products of experts"),
        ("void mlx::core::cu::qmv_kernel<8, 16, 64, true>(float*)", "other products"),
        ("void mlx::core::cu::copy_g_nd<unsigned int, unsigned int>", "copies"),
        ("void mlx::core::cu::unary_v<mlx::core::cu::Sigmoid, __nv_bfloat16>", compiled.OTHER_KIND),
    ],
)
def test_a_kernel_is_of_the_kind_that_its_name_says(name, kind):
    assert compiled.kind(name) == kind


def test_what_cannot_be_measured_is_refused(tmp_path):
    if not mx.cuda.is_available():
        with pytest.raises(OSError, match="kernels: "):
            compiled.kernels(TINY)
    with pytest.raises(ValueError, match="expected kernels or nothing, got more"):
        compiled.main(str(tmp_path / "r.json"), str(TINY), "more")
