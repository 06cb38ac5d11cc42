r"""Proves that a layout trains the same model as one device, and keeps its contract.

    python -m experiments.verify --recipe=tiny --layout="fsdp=4,tensor=2"

Prints a table and a verdict. Exits 0 if every tensor is equal within rounding and the
compiled program moves what the layout declares; otherwise exits 1 with the first tensor
that differs or the collectives that are wrong.
"""

import dataclasses
import json
from collections.abc import Sequence

import jax
from absl import flags

import meshpar
from experiments import command_line, data
from experiments.recipes import building
from experiments.recipes.errors import ConfigError
from experiments.recipes.modes import SYNCHRONOUS
from experiments.reports import verification
from meshpar.explain import verify

flags.adopt_module_key_flags(command_line)
VERIFY_STEPS = flags.DEFINE_integer("verify_steps", 3, "Steps to compare.")
MAX_ERROR = flags.DEFINE_float(
    "tolerance", None, "Largest relative error; the rounding error by default."
)
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest relative error that rounding explains, by compute dtype."""


def main(_: Sequence[str]) -> int:
    """Verifies, and returns the exit code."""
    config = command_line.config_from_flags()
    if config.optimizer_mode != SYNCHRONOUS:
        raise ConfigError(
            "replicas that train apart do not equal one device: verify the layout with "
            "data in place of replica, without --optimizer_mode"
        )
    layout, devices = command_line.start_devices(config)
    jax.config.update("jax_default_matmul_precision", "highest")
    corpus = data.load(config.data)
    config = building.fit_vocabulary(config, corpus)
    program = building.make_program(config, layout, devices)
    # Dropout draws a mask per microbatch: the reference needs the same microbatches.
    microbatches = layout.microbatches if config.model.dropout else 1
    one_device = dataclasses.replace(meshpar.Layout(), microbatches=microbatches)
    reference = building.make_program(config, one_device, devices[:1])
    batches = data.training_batches(
        corpus,
        length=config.model.length,
        batch_size=config.batch_size,
        seed=config.seed,
        rows=program.batch_rows,
        position=0,
    )
    tolerance = TOLERANCE[config.compute_dtype]
    report = verify.verify(
        program,
        reference,
        (next(batches) for _ in range(VERIFY_STEPS.value)),
        config.seed,
        tolerance if MAX_ERROR.value is None else MAX_ERROR.value,
    )
    if JSON.value:
        print(json.dumps(verification.as_dict(report, layout)))
    else:
        num_collectives = len(program.collectives)
        verification.print_report(report, layout, VERIFY_STEPS.value, num_collectives)
    return 0 if report.ok else 1


if __name__ == "__main__":
    command_line.run(main)
