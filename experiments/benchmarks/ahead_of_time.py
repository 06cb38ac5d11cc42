r"""What compilers make of a training step, against one written by hand.

    python -m experiments.benchmarks.ahead_of_time --recipe=llama2-7b \
        --topology=v5e:4x4 --layout=fsdp=16,remat=full --batch_size=16

By hand is a plain jit or a plain shard_map, as in `step_overhead`. Prints the CPU time
of the compiler, which goes first to the one and then to the other, the peak of memory
and the exposed bytes of both. Aim: at most 1.1 of the hand-written program's time.
"""

import time
from collections.abc import Sequence

import jax
from absl import flags

import meshpar
from experiments import building, command_line
from experiments.benchmarks import by_hand
from meshpar import mesh
from meshpar.contracts import hlo

flags.adopt_module_key_flags(command_line)
TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x4", "As in experiments.explain.")


def compile_timed(name: str, lowered: jax.stages.Lowered, sizes: dict) -> float:
    """Compiles, prints what came of it, and returns seconds of CPU."""
    start = time.process_time()
    made = lowered.compile()
    seconds = time.process_time() - start
    found = hlo.parse_hlo(made.as_text(), sizes)
    exposed = sum(one.wire_bytes for one in found if not one.overlapped) / 1e9
    wire = sum(one.wire_bytes for one in found) / 1e9
    peak = made.memory_analysis().peak_memory_in_bytes / 1e9
    print(
        f"{name}: compiled in {seconds:.1f} s of CPU, peak {peak:.2f} GB, "
        f"exposed {exposed:.2f} of {wire:.2f} GB",
        flush=True,
    )
    return seconds


def main(_: Sequence[str]) -> int:
    """Prints the figures of both and the ratio of their times."""
    config = command_line.config_from_flags()
    meshpar.simulate(1)
    devices = mesh.topology(TOPOLOGY.value)
    layout = meshpar.layouts.parse(config.layout or f"fsdp={len(devices)}")
    program = building.make_program(config, layout, devices)
    sizes = dict(program.mesh.shape)
    step, init = by_hand.step_and_init(config, program)
    own = step.lower(init.eval_shape(), program.abstract_batch)
    ours = compile_timed("program.step", program.lowered, sizes)
    theirs = compile_timed("by hand", own, sizes)
    print(f"ratio: {ours / theirs:.3f}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
