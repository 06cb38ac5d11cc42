"""What the benchmark on a GPU measures in jax: meshpar, and a page of plain jax."""

import collections
import functools
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import meshpar
from experiments.benchmarks import gpu_page
from experiments.benchmarks.gpu_cases import (
    Budget,
    Case,
    emit,
    emit_speed,
    random_batch,
    seconds_of_a_step,
)
from experiments.recipes import building
from meshpar import compat
from meshpar.contracts.hlo_text import parse_computations, type_bytes
from meshpar.mesh.platform import GPU, platform_named
from meshpar.ops import attention_kernels

OURS, PAGE = "meshpar", "page of jax"
FLOAT8 = "meshpar, float8"
"""Reported apart: rounding is coarser, and MFU counts FLOPs in bfloat16."""
_LARGE_COPY = 2**24
"""Bytes of copies and transposes that count as a surprise."""

_OPTIONS = (
    {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"},
    {"xla_gpu_enable_command_buffer": ""},
    {"xla_gpu_autotune_level": 0},
    {"xla_gpu_enable_triton_gemm": False},
)
"""Compiler options that are tried on the best case."""


def make_program(
    case: Case, rehearsal: bool, device: jax.Device
) -> meshpar.TrainProgram:
    """Meshpar's program of a case on one device."""
    options = f"remat={case.remat},scan_unroll={case.unroll}"
    layout = meshpar.layouts.parse(f"data=1,{options}")
    return building.make_program(case.config(rehearsal), layout, [device])


def _place(program: meshpar.TrainProgram, case: Case, rehearsal: bool) -> Any:
    return program.place_batch(random_batch(case.config(rehearsal)))


def run_ours(cases: Sequence[Case], rehearsal: bool, budget: Budget) -> None:
    """Measures each case, and then what changes of the first one make of it."""
    measure = functools.partial(_measure_ours, rehearsal=rehearsal)
    speeds = [budget.run(OURS, x, functools.partial(measure, x)) for x in cases]
    first, best = cases[0], speeds[0]
    for changed in _changes(first):
        # Each change is tried on the best case so far; one that loses is dropped.
        case = first._replace(**changed)
        speed = budget.run(OURS, case, functools.partial(measure, case))
        if speed > best:
            first, best = case, speed
    for case in cases[1:]:
        rows = max(1, first.rows * first.length // case.length)
        tuned = first._replace(recipe=case.recipe, length=case.length, rows=rows)
        if tuned != case:
            budget.run(OURS, tuned, functools.partial(measure, tuned))
    in_float8 = first._replace(float8=True)
    budget.run(FLOAT8, in_float8, functools.partial(measure, in_float8))


def _changes(case: Case) -> Iterator[dict[str, Any]]:
    """Changes of a case, those that promise most first."""
    yield {"remat": "dots"}
    yield {"rows": 2 * case.rows}
    yield {"remat": "none"}
    yield {"loss_block": 1024}
    yield from ({"options": options} for options in _OPTIONS)
    yield {"rows": 4 * case.rows}


def _measure_ours(case: Case, rehearsal: bool) -> float:
    device = jax.devices()[0]
    program = make_program(case, rehearsal, device)
    options = case.options if platform_named(device.platform) is GPU else {}
    begin = time.perf_counter()
    compiled = program.lowered.compile(compiler_options=dict(options))
    seconds = time.perf_counter() - begin
    state, batch = program.init(0), _place(program, case, rehearsal)

    def step() -> Any:
        nonlocal state
        state, metrics = compiled(state, batch)
        return metrics

    more = {"first_loss": float(step()["loss"]), "compile_s": seconds}
    more |= facts(compiled)
    found = seconds_of_a_step(step, jax.block_until_ready)
    kind, name = device.device_kind, FLOAT8 if case.float8 else OURS
    return emit_speed(name, case, case.config(rehearsal), found, kind, **more)


def run_page(cases: Sequence[Case], rehearsal: bool, budget: Budget) -> None:
    """Measures the page on each case, with the weights that meshpar begins with."""
    measure = functools.partial(_measure_page, rehearsal=rehearsal)
    for case in cases:
        budget.run(PAGE, case, functools.partial(measure, case))


def _measure_page(case: Case, rehearsal: bool) -> float:
    device, config = jax.devices()[0], case.config(rehearsal)
    program = make_program(case, rehearsal, device)
    attention = "cudnn" if platform_named(device.platform) is GPU else "xla"
    state = gpu_page.make_state(program.init(0).params)
    batch = _place(program, case, rehearsal)
    begin = time.perf_counter()
    lowered = gpu_page.make_step(config.model, case.remat, attention)
    compiled = lowered.lower(state, batch).compile()
    more: dict[str, Any] = {"compile_s": time.perf_counter() - begin}

    def step() -> Any:
        nonlocal state
        state, loss = compiled(state, batch)
        return loss

    more = {"first_loss": float(step()), **more, **facts(compiled)}
    found = seconds_of_a_step(step, jax.block_until_ready)
    return emit_speed(PAGE, case, config, found, device.device_kind, **more)


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
    params = building.make_model(config).params
    sharding = SingleDeviceSharding(device)

    def abstract(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def state() -> Any:
        return gpu_page.make_state({k: jnp.zeros(p.shape) for k, p in params.items()})

    attention = "cudnn" if compat.has_cudnn() else "xla"
    step = gpu_page.make_step(config.model, case.remat, attention)
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


def run_checks(rehearsal: bool) -> None:
    """Prints what the device is, and how exact cuDNN's attention is."""
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    emit(
        program="device",
        case=device.device_kind,
        status="ok",
        jax=jax.__version__,
        limit_gb=memory / 1e9,
    )
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
