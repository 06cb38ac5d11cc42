"""The jax programs of the GPU benchmark: meshpar, and a page of plain jax."""

import collections
import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import meshpar
from experiments.benchmarks import gpu_kernels, gpu_page
from experiments.benchmarks.gpu_cases import (
    Case,
    emit,
    emit_speed,
    random_batch,
    times_of_a_step,
)
from meshpar import compat
from meshpar.contracts.hlo_text import parse_computations, type_bytes
from meshpar.explain.verify import verify
from meshpar.mesh.platform import GPU, platform_named
from meshpar.ops import attention_kernels

OURS, PAGE = "meshpar", "page of jax"
FLOAT8 = "meshpar, float8"
"""Reported apart: rounding is coarser, and MFU counts FLOPs in bfloat16."""
_LARGE_COPY = 2**24
"""Bytes of copies and transposes that count as a surprise."""


def make_program(
    case: Case, rehearsal: bool, device: jax.Device
) -> meshpar.TrainProgram:
    """Meshpar's program of a case on one device."""
    layout = meshpar.layouts.parse(case.layout)
    return case.config(rehearsal).make_program(layout, [device])


def _place(program: meshpar.TrainProgram, case: Case, rehearsal: bool) -> Any:
    return program.place_batch(random_batch(case.config(rehearsal)))


def run_ours(case: Case, rehearsal: bool, profiles: bool) -> None:
    """Prints the row of meshpar's step.

    Args:
      case: what to train.
      rehearsal: whether its model is tiny.
      profiles: whether to say which kernels take how long.
    """
    device = jax.devices()[0]
    program = make_program(case, rehearsal, device)
    options = case.options if platform_named(device.platform) is GPU else {}
    begin = time.perf_counter()
    compiled = program.lowered.compile(compiler_options=dict(options))
    seconds = time.perf_counter() - begin
    batch = _place(program, case, rehearsal)
    step = _Step(compiled, program.init(0), batch, lambda metrics: metrics["loss"])
    name = FLOAT8 if case.float8 else OURS
    _emit_jax(name, case, rehearsal, step, seconds, profiles)


def run_page(case: Case, rehearsal: bool, profiles: bool) -> None:
    """Prints the row of the page, with the weights that meshpar begins with."""
    device, config = jax.devices()[0], case.config(rehearsal)
    program = make_program(case, rehearsal, device)
    attention = "cudnn" if platform_named(device.platform) is GPU else "xla"
    state = gpu_page.make_state(program.init(0).params)
    batch = _place(program, case, rehearsal)
    begin = time.perf_counter()
    lowered = gpu_page.make_step(config.model, case.remat, case.unroll, attention)
    compiled = lowered.lower(state, batch).compile()
    seconds = time.perf_counter() - begin
    step = _Step(compiled, state, batch, lambda loss: loss)
    _emit_jax(PAGE, case, rehearsal, step, seconds, profiles)


class _Step:
    """A compiled step that keeps its state: () -> the other results."""

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        state: Any,
        batch: Any,
        loss: Callable[[Any], Any],
    ):
        self.compiled, self.loss = compiled, loss
        self._state, self._batch = state, batch

    def __call__(self) -> Any:
        self._state, result = self.compiled(self._state, self._batch)
        return result


def _emit_jax(
    name: str, case: Case, rehearsal: bool, step: _Step, compile_s: float, profiles: Any
) -> None:
    """Measures a step and prints its row."""
    more: dict[str, Any] = {"first_loss": float(step.loss(step()))}
    more |= {"compile_s": compile_s, **facts(step.compiled)}
    times = times_of_a_step(step, jax.block_until_ready)
    more |= gpu_kernels.card_under(step)
    if profiles:
        more["kernel_ms"] = gpu_kernels.by_class(step, times.median)
    kind = jax.devices()[0].device_kind
    emit_speed(name, case, case.config(rehearsal), times, kind, **more)


def compile_ours(
    case: Case, rehearsal: bool, device: jax.Device
) -> jax.stages.Compiled:
    """Meshpar's step, compiled for a device that need not be there."""
    return make_program(case, rehearsal, device).compiled


def compile_page(
    case: Case, rehearsal: bool, device: jax.Device
) -> jax.stages.Compiled:
    """The page's step, compiled for a device that need not be there."""
    config = case.config(rehearsal)
    params = config.make_model().params
    sharding = SingleDeviceSharding(device)

    def abstract(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def state() -> Any:
        return gpu_page.make_state({k: jnp.zeros(p.shape) for k, p in params.items()})

    attention = "cudnn" if compat.has_cudnn() else "xla"
    step = gpu_page.make_step(config.model, case.remat, case.unroll, attention)
    batch = abstract(random_batch(config))
    return step.lower(abstract(jax.eval_shape(state)), batch).compile()


def compile_float8(
    case: Case, rehearsal: bool, device: jax.Device
) -> jax.stages.Compiled:
    """Meshpar's step in float8, compiled for a device that need not be there."""
    return compile_ours(case._replace(float8=True), rehearsal, device)


COMPILERS = {OURS: compile_ours, PAGE: compile_page, FLOAT8: compile_float8}
"""{program: (case, rehearsal, device) -> its compiled step}."""


def facts(compiled: jax.stages.Compiled) -> dict[str, Any]:
    """Peak memory, kernels of libraries, and large copies of a compiled program."""
    text = compiled.as_text()
    kernels = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    copies = [
        type_bytes(instruction.type)
        for instructions in parse_computations(text)[0].values()
        for instruction in instructions.values()
        if instruction.opcode in ("copy", "transpose")
    ]
    large = [size for size in copies if size >= _LARGE_COPY]
    return {
        "peak_gb": compiled.memory_analysis().peak_memory_in_bytes / 1e9,
        "kernels": dict(kernels),
        "large_copies": len(large),
        "large_copies_gb": sum(large) / 1e9,
    }


def run_verify() -> None:
    """Prints whether a tiny model trains on this device as a plain loop does."""
    case = Case("llama-1b", 4096, rows=4, remat="full")
    config = dataclasses.replace(case.config(rehearsal=True), compute_dtype="float32")
    layout = meshpar.layouts.parse("data=1,microbatches=2,remat=full")
    program = config.make_program(layout, jax.devices()[:1])
    report = verify(program, None, [random_batch(config)] * 3)
    emit(
        program="verify",
        case=f"a tiny {case.recipe}, {layout}",
        status="ok" if report.ok else f"WRONG: {report}",
    )


def run_checks(rehearsal: bool) -> None:
    """Prints how exact cuDNN's attention is."""
    device = jax.devices()[0]
    is_gpu = platform_named(device.platform) is GPU
    kernel = attention_kernels.cudnn if is_gpu else attention_kernels.reference
    length = 256 if rehearsal else 2048
    for heads, kv_heads, width in ((32, 4, 64), (24, 8, 128)):
        case = f"{length} tokens, {heads} heads of {width}, {kv_heads} of keys"
        own = _attention_errors(kernel, heads, kv_heads, width, length)
        plain = _attention_errors(
            attention_kernels.reference, heads, kv_heads, width, length
        )
        # Twice the error of the plain form in the same dtype is rounding.
        good = all(x <= 2 * y + 1e-3 for x, y in zip(own, plain, strict=True))
        emit(
            program="attention by cuDNN" if is_gpu else "attention",
            case=case,
            status="ok" if good else "WRONG",
            errors=dict(zip(("y", "dq", "dk", "dv"), own, strict=True)),
            plain=dict(zip(("y", "dq", "dk", "dv"), plain, strict=True)),
        )


def _attention_errors(
    kernel: Any, heads: int, kv_heads: int, width: int, length: int
) -> list[float]:
    """Relative errors of output and gradients in bfloat16, against float32."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = heads, kv_heads, kv_heads, heads
    q, k, v, dy = (
        jax.random.normal(key, (2, length, count, width), jnp.float32)
        for key, count in zip(keys, counts, strict=True)
    )

    def all_of(kernel: Any, *arrays: Any) -> list[np.ndarray]:
        def run(q: Any, k: Any, v: Any, dy: Any) -> Any:
            y, pull = jax.vjp(lambda *x: kernel(*x), q, k, v)
            return y, *pull(dy)

        return [np.asarray(x, np.float32) for x in jax.jit(run)(*arrays)]

    half = [x.astype(jnp.bfloat16) for x in (q, k, v, dy)]
    with jax.default_matmul_precision("highest"):
        exact = all_of(
            attention_kernels.reference, *(x.astype(jnp.float32) for x in half)
        )
    found = all_of(kernel, *half)
    return [
        float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for a, b in zip(found, exact, strict=True)
    ]
