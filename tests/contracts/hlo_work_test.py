"""FLOPs of compiled programs: as counted by hand, with every round of loops."""

import jax
import jax.numpy as jnp
import pytest

from meshpar.contracts.hlo_work import matmul_flops, work_of

N = 16


def compiled(fn, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(fn).lower(*args).compile()


def looped(length):
    def run(w, x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=length)[0]

    return compiled(run, (N, N), (N, N))


def test_every_round_of_a_loop_counts():
    one = 2 * N**3
    text = looped(5).as_text()
    assert matmul_flops(text) == 5 * one
    assert matmul_flops(text, loops_once=True) == one


def test_work_grows_with_the_rounds_as_a_loop_written_out():
    def work(length):
        program = looped(length)
        return work_of(program.as_text(), program.cost_analysis())

    few, many = work(4), work(8)
    assert many.flops - few.flops == pytest.approx(4 * 2 * N**3)
    assert 1.8 < many.moved / few.moved < 2.1
    analysis = looped(4).cost_analysis()
    assert few.flops > 3 * analysis["flops"]  # XLA's own counts one round.


def test_a_program_without_loops_is_as_its_compiler_says():
    program = compiled(lambda x, y: jnp.tanh(x @ y), (N, 8), (8, N))
    analysis = program.cost_analysis()
    work = work_of(program.as_text(), analysis)
    assert work == (analysis["flops"], analysis["bytes accessed"])
    assert matmul_flops(program.as_text()) == 2 * N * N * 8
    assert work_of(program.as_text(), {}) == (0.0, 0.0)


@pytest.mark.parametrize(
    "options",
    [
        dict(window_strides=(1, 1), padding="SAME"),
        dict(window_strides=(2, 3), padding=[(1, 2), (0, 1)]),
        dict(window_strides=(1, 1), padding=[(-1, 3), (5, 5)]),
        dict(window_strides=(1, 1), padding=[(3, 3), (2, 2)], lhs_dilation=(2, 3)),
        dict(window_strides=(2, 1), padding="VALID", rhs_dilation=(2, 1)),
        dict(window_strides=(1, 1), padding="SAME", feature_group_count=2),
    ],
    ids=["same", "strides", "wide", "holes", "spread", "groups"],
)
def test_convolutions_count_products_with_numbers_of_the_image(options):
    """As XLA's own analysis of this program, and as ones that are added up."""
    groups = options.get("feature_group_count", 1)

    def run(x, k):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, dimension_numbers=dims, **options)

    shapes = (2, 8, 9, 4), (3, 3, 4 // groups, 6)
    program = compiled(run, *shapes)
    products = run(*map(jnp.ones, shapes)).sum()
    assert matmul_flops(program.as_text()) == 2 * products
    assert matmul_flops(program.as_text()) == program.cost_analysis()["flops"]


def test_matmuls_that_tpus_write_as_convolutions():
    """Taps are heads; each place of the window meets one head, the others padding."""
    text = """
ENTRY main (x: bf16[256,512], w: bf16[512,4,128]) -> bf16[256,4,128] {
  %x = bf16[256,512]{1,0} parameter(0)
  %w = bf16[512,4,128]{2,0,1} parameter(1)
  %b = bf16[256,512,1]{1,0,2} bitcast(%x)
  ROOT %c = bf16[256,4,128]{2,0,1} convolution(%b, %w), \
window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_i0o->b0f
}
"""
    assert matmul_flops(text) == 2 * 256 * 512 * 4 * 128


BRANCHES = """
small (p: f32[4,8]) -> f32[4,4] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %d = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}
large (p: f32[4,8]) -> f32[4,4] {
  %p = f32[4,8]{1,0} parameter(0)
  %d = f32[4,4]{1,0} dot(%p, %p), lhs_contracting_dims={1}
  ROOT %e = f32[4,4]{1,0} dot(%d, %d), lhs_contracting_dims={1}
}
ENTRY main (x: f32[4,8], i: s32[]) -> f32[4,4] {
  %x = f32[4,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %g = (f32[4,4]{1,0}, s8[64]{0}) custom-call(%x, %x), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"]}}}
  ROOT %c = f32[4,4]{1,0} conditional(%i, %x, %x), branch_computations={%small, %large}
}
"""


def test_branches_count_the_most_and_calls_of_libraries_as_matmuls():
    matmul, square = 2 * 4 * 4 * 8, 2 * 4 * 4 * 4
    assert matmul_flops(BRANCHES) == matmul + (matmul + square)
