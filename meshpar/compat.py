"""Functions of jax that differ between its supported versions, or are not public."""

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def prepare_cpu_threads() -> None:
    """Keeps simulated devices from deadlocking on few cores (jaxlib before 0.12).

    Collectives of several programs in flight wait for each other in one thread pool.
    XLA sizes it from NPROC when the CPU backend starts, so call this before.
    """
    if (os.cpu_count() or 1) < 16:
        os.environ.setdefault("NPROC", "16")


def quicken_cpu_compiler() -> None:
    """Lets XLA:CPU compile faster: a step in half of the time with jax 0.10.

    It skips passes of LLVM that change little here, and generates a program's code in
    one piece. Steps of the default recipe take no longer. What XLA_FLAGS says stays.
    XLA reads them when its first backend starts, so call this before.
    """
    quick = {
        "xla_backend_optimization_level": 1,
        "xla_llvm_disable_expensive_passes": "true",
        "xla_cpu_parallel_codegen_split_count": 1,
    }
    if jaxlib.__version__.startswith("0.10."):  # Later ones have no other emitters.
        quick["xla_cpu_use_fusion_emitters"] = "false"
    given = os.environ.get("XLA_FLAGS", "")
    added = (f"--{name}={value}" for name, value in quick.items() if name not in given)
    os.environ["XLA_FLAGS"] = " ".join((given, *added)).strip()


def quiet_absent_tpus() -> None:
    """Keeps libtpu from printing errors about a machine that has no TPU.

    jax looks for TPUs wherever their compiler is installed, and libtpu prints what it
    misses in the description of the machine. Call it before jax starts its backends.
    """
    from jax._src import cloud_tpu_init, hardware_utils

    chips, _ = hardware_utils.num_available_tpu_chips_and_device_id()
    if not chips and not cloud_tpu_init.jax_force_tpu_init():
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def coordination_client():
    """The key-value store of jax.distributed; None in a single process."""
    from jax._src import distributed

    return distributed.global_state.client


def has_cudnn() -> bool:
    """Whether cuDNN is installed, which programs for NVIDIA GPUs are compiled with."""
    from jax._src.lib import cuda_versions

    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # The library is not found.
        return False


def backends_started() -> bool:
    """Whether jax has started its backends, after which settings have no effect."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def compilation_cache_folder() -> str:
    """The folder of jax's persistent compilation cache; "" if it is not used."""
    enabled = jax.config.jax_enable_compilation_cache
    return (enabled and jax.config.jax_compilation_cache_dir) or ""


def use_compilation_cache(folder: str) -> None:
    """Keeps everything that is compiled in a folder, unless the user named one."""
    if not compilation_cache_folder():
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def disable_compilation_cache() -> None:
    """Compiles all programs anew; call it before the first is compiled."""
    jax.config.update("jax_enable_compilation_cache", False)


def is_whole_cache_entry(content: bytes) -> bool:
    """Whether a file of the compilation cache holds all that jax wrote to it."""
    from jax._src import compilation_cache

    try:
        compilation_cache.decompress_executable(content)
    except Exception:  # The kind depends on how jax compresses here.
        return False
    return True


def compilation_cache_identity() -> str:
    """A text that processes share exactly if they find the same cached programs.

    It is the part of the cache's keys that depends on the devices; on some platforms
    they include the process.
    """
    from jax._src import cache_key

    digest = hashlib.sha256()
    cache_key._hash_accelerator_config(digest, np.array(jax.devices()))
    return digest.hexdigest()


def set_simulated_devices(count: int) -> None:
    """Sets the number of devices that the CPU backend of this process will have."""
    jax.config.update("jax_num_cpu_devices", count)


def translate_constraints(translate: Callable[[Any], Any]) -> None:
    """Lets what users give to `with_sharding_constraint` pass a function first.

    Models import the function itself, so that another one in its place is not seen.

    Args:
      translate: a PartitionSpec or a sharding -> one that jax goes on with.
    """
    from jax._src import pjit

    create = pjit._create_sharding_for_array

    def translated(mesh: Any, x: Any, name: str, api_name: str) -> Any:
        if api_name == "with_sharding_constraint":
            x = translate(x)
        return create(mesh, x, name, api_name)

    pjit._create_sharding_for_array = translated


def constrain_out_shardings(
    translate: Callable[[Any], Any], applies: Callable[[], bool]
) -> None:
    """Makes `out_sharding=` and `reshard` constraints, which automatic axes take.

    jax itself takes them on explicit axes alone. Those of matmuls and einsums, of
    `x.at[i]`, of `reshape`, `zeros` and its kin, `arange`, `broadcast_to` and random
    numbers, of `auto_axes` and `reshard`; jax refuses others.

    Args:
      translate: as in `translate_constraints`.
      applies: whether to do so now.
    """
    from jax._src import source_info_util
    from jax._src.lax import lax
    from jax._src.numpy import array_methods, einsum, indexing, util
    from jax._src.ops import scatter
    from jax._src.random import core as random

    source_info_util.register_exclusion(__file__)  # No operation is written here.

    def constrained(fn: Callable) -> Callable:
        @functools.wraps(fn)
        def run(*args: Any, out_sharding: Any = None, **kwargs: Any) -> Any:
            # Derivatives give a sharding without axes themselves.
            named = isinstance(out_sharding, P) or any(
                getattr(out_sharding, "spec", ())
            )
            if not named or not applies():
                return fn(*args, out_sharding=out_sharding, **kwargs)
            y = fn(*args, **kwargs)
            return jax.lax.with_sharding_constraint(y, out_sharding)

        return run

    def accepting(canonicalize: Callable) -> Callable:
        def run(sharding: Any, name: str, **kwargs: Any) -> Any:
            if sharding is None or not applies():
                return canonicalize(sharding, name, **kwargs)
            own, mesh = translate(sharding), jax.sharding.get_abstract_mesh()
            if mesh.empty or AxisType.Auto not in mesh.axis_types:
                return None  # One device, or a shard of an array.
            return NamedSharding(mesh, getattr(own, "spec", own))

        return run

    def ended(auto_axes: Callable) -> Callable:
        @functools.wraps(auto_axes)
        def run(fn: Callable | None = None, /, **options: Any) -> Callable:
            if fn is None:
                return functools.partial(run, **options)
            explicit = auto_axes(fn, **options)

            @functools.wraps(fn)
            def call(*args: Any, **kwargs: Any) -> Any:
                if not applies():
                    return explicit(*args, **kwargs)
                end = options.get("out_sharding") or kwargs.pop("out_sharding")
                return jax.lax.with_sharding_constraint(fn(*args, **kwargs), end)

            return call

        return run

    # Libraries hold the functions that call these.
    fillers = "broadcast_in_dim", "broadcasted_iota", "empty"
    for name in ("dot", "reshape", "reduce_sum", *fillers):
        function = constrained(getattr(lax, name))
        setattr(lax, name, function)
        setattr(jax.lax, name, function)
    indexing.rewriting_take = constrained(indexing.rewriting_take)
    for module in (array_methods, einsum, random, scatter, util):
        module.canonicalize_sharding = accepting(module.canonicalize_sharding)
    for module in (jax.sharding, einsum, random, scatter):
        module.auto_axes = ended(module.auto_axes)
    reshard = jax.sharding.reshard

    def resharded(xs: Any, out_shardings: Any) -> Any:
        constrain = jax.lax.with_sharding_constraint if applies() else reshard
        return constrain(xs, out_shardings)

    jax.reshard = jax.sharding.reshard = functools.wraps(reshard)(resharded)


def has_side_effects(eqn: Any) -> bool:
    """Whether an equation does more than compute its results, such as print."""
    from jax._src.core import NamedAxisEffect

    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


def bind(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an equation of a jaxpr: the values of its output variables."""
    params, functions = eqn.primitive.get_bind_params(eqn.params), ()
    if not isinstance(params, dict):
        functions, params = params
    with written_at(eqn.source_info), eqn.ctx.manager:
        outputs = eqn.primitive.bind(*functions, *values, **params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def bind_on(
    eqn: Any, values: Sequence[Any], swap: Callable[[Any], Any]
) -> Sequence[Any]:
    """`bind`, where swap(mesh) gives the abstract mesh for that of the equation."""
    params, functions = eqn.primitive.get_bind_params(eqn.params), ()
    if not isinstance(params, dict):
        functions, params = params
    mesh = swap(eqn.ctx.cur_abstract_mesh)
    with written_at(eqn.source_info), eqn.ctx.manager:
        with jax.sharding.use_abstract_mesh(mesh):
            outputs = eqn.primitive.bind(*functions, *values, **params)
    return outputs if eqn.primitive.multiple_results else [outputs]


def written_at(source: Any) -> contextlib.AbstractContextManager:
    """Gives operations traced inside the source line and name of an equation."""
    from jax._src import source_info_util

    names = source_info_util.current_name_stack() + source.name_stack
    return source_info_util.user_context(source.traceback, name_stack=names)


def named_inside(eqn: Any, call: Any) -> Any:
    """An equation of a called jaxpr, with the names around the call before its own."""
    own, around = eqn.source_info, call.source_info.name_stack
    return eqn.replace(source_info=own.replace(name_stack=around + own.name_stack))


def detected_cluster() -> tuple[str, int, int] | None:
    """(coordinator address, number of processes, own rank) of the cluster.

    None outside of the clusters that jax detects, and for a single process.
    """
    from jax._src.clusters import ClusterEnv

    for kind in ClusterEnv._cluster_types:
        if kind.opt_in_only_method or not kind.is_env_present():
            continue
        num = int(kind.get_process_count())
        if num == 1:
            return None
        port = os.environ.get("JAX_COORDINATOR_PORT")
        address = kind.get_coordinator_address(
            timeout_secs=60, override_coordinator_port=port
        )
        return address, num, int(kind.get_process_id())
    return None


def scan_counts(eqn: Any) -> tuple[int, int]:
    """(number of constants, number of carried values) of a scan in a jaxpr."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:jax|flax|optax)[/\\]")
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def user_line(eqn: Any) -> str:
    """The line of a user's code that made an equation, "file:line"; "" if unknown.

    The innermost one outside of jax, flax, optax and this library, if there is any.
    """
    from jax._src import source_info_util

    frames = source_info_util.user_frames(eqn.source_info.traceback)
    return users_own([f"{frame.file_name}:{frame.start_line}" for frame in frames])


def defined_at(jaxpr: Any) -> str:
    """The "file:line" at which the function of a jaxpr is defined; "" if unknown.

    That of its first decorator, if it has any.
    """
    info = getattr(jaxpr, "debug_info", None)
    known = re.search(r" at (.+:\d+)$", getattr(info, "func_src_info", None) or "")
    line = known.group(1) if known else ""
    return "" if _LIBRARIES.search(line) or line.startswith(_HERE) else line


def users_own(stack: Sequence[str]) -> str:
    """The innermost "file:line" of a user's code, or of all; "" if there are none.

    Args:
      stack: "file:line" of the frames, innermost first.
    """
    for line in stack:
        if not _LIBRARIES.search(line) and not line.startswith(_HERE):
            return line
    return stack[0] if stack else ""
