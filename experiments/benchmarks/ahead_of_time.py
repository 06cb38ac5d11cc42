r"""Compiles a training step ahead of time, and compares it with one written by hand.

    python -m experiments.benchmarks.ahead_of_time --recipe=llama2-7b \
        --topology=v5e:4x4 --layout=fsdp=16,remat=full --batch_size=16

The hand-written step is a plain jit or a plain shard_map, as in `step_overhead`. Prints
the CPU time of the compiler, and of both steps the peak memory, the exposed bytes and
the estimated time. Aim: at most 1.1 of the hand-written step's compile time.
"""

import dataclasses
import time
from collections.abc import Sequence

import jax
from absl import flags
from jax.sharding import Mesh

import meshpar
from experiments import recipes
from experiments.benchmarks import by_hand
from meshpar import mesh
from meshpar.commands import command_line
from meshpar.layouts.axes import FSDP
from meshpar.lowering.inspection import read_collectives, read_time

TOPOLOGY = flags.DEFINE_string(
    "topology", "v5e:2x4", "Machine to compile for, as in explain."
)


def compile_timed(name: str, lowered: jax.stages.Lowered, mesh: Mesh) -> float:
    """Compiles a step, prints its figures, and returns seconds of CPU.

    Args:
      name: printed in front of the figures.
      lowered: the step.
      mesh: that it is compiled for.
    """
    start = time.process_time()
    compiled = lowered.compile()
    seconds = time.process_time() - start
    collectives = read_collectives(compiled, mesh)
    exposed = sum(c.wire_bytes for c in collectives if not c.overlapped) / 1e9
    wire = sum(c.wire_bytes for c in collectives) / 1e9
    peak = compiled.memory_analysis().peak_memory_in_bytes / 1e9
    estimated = ""
    if found := read_time(compiled, mesh):
        milliseconds, cycles = 1e3 * found.seconds, found.cycles / 1e9
        estimated = f", estimated {milliseconds:.0f} ms ({cycles:.3f} Gcycles)"
    print(
        f"{name}: compiled in {seconds:.1f} s of CPU, peak {peak:.2f} GB, "
        f"exposed {exposed:.2f} of {wire:.2f} GB{estimated}",
        flush=True,
    )
    return seconds


def main(_: Sequence[str]) -> int:
    """Prints the figures of both steps and the ratio of their compile times."""
    config = recipes.of_decoder(command_line.config_from_flags())
    model = dataclasses.replace(config.model, vocab=config.model.vocab or 256)
    config = dataclasses.replace(config, model=model)
    meshpar.simulate(1)
    devices = mesh.topology(TOPOLOGY.value)
    layout = meshpar.layouts.parse(config.layout or f"{FSDP}={len(devices)}")
    program = config.make_program(layout, devices)
    step, init = by_hand.step_and_init(config, program)
    hand_written = step.lower(init.eval_shape(), program.abstract_batch)
    program_seconds = compile_timed("program.step", program.lowered, program.mesh)
    hand_seconds = compile_timed("by hand", hand_written, program.mesh)
    print(f"ratio: {program_seconds / hand_seconds:.3f}")
    return 0


if __name__ == "__main__":
    command_line.run(
        main,
        command_line.of_config_but(
            command_line.OPTIMIZER_MODE,
            command_line.DATA,
            command_line.TOKENIZER,
            command_line.SEED,
        ),
        known=recipes.CATALOG,
    )
