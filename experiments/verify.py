r"""Proves that a layout trains the same model as one device, and keeps its contract.

    python -m experiments.verify --recipe=tiny --layout="fsdp=4,tensor=2"

Prints a table and a last line; exits 0 if every tensor is equal within rounding and the
compiled program moves what the layout declares, and 1 with the first tensor that
differs or the collectives that are wrong.
"""

import dataclasses
import json
from collections.abc import Sequence

import jax
import rich.console
import rich.table
from absl import flags

import meshpar
from experiments import building, command_line, data
from experiments.config import ConfigError
from meshpar.explain import verify

flags.adopt_module_key_flags(command_line)
VERIFY_STEPS = flags.DEFINE_integer("verify_steps", 3, "Steps to compare.")
MAX_ERROR = flags.DEFINE_float(
    "tolerance", None, "Largest relative error; what rounding explains by default."
)
JSON = flags.DEFINE_bool("json", False, "Print JSON for programs.")

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest relative error that rounding explains, by compute dtype."""


def _table(report: verify.VerifyReport) -> rich.table.Table:
    """The worst error of every tensor over all steps."""
    worst: dict[tuple[str, str], verify.Comparison] = {}
    for c in report.comparisons:
        key = (c.kind, c.tensor)
        if key not in worst or not c.error <= worst[key].error:
            worst[key] = c
    tensor = rich.table.Column("tensor", overflow="fold")
    table = rich.table.Table("kind", tensor, "relative error", "step", "equal")
    for (kind, tensor), c in worst.items():
        verdict = "yes" if c.ok else "[bold red]NO"
        table.add_row(kind, tensor, f"{c.error:.1e}", str(c.step), verdict)
    return table


def main(_: Sequence[str]) -> int:
    """Verifies, and returns the exit code."""
    config = command_line.config_from_flags()
    if config.optimizer_mode != "synchronous":
        raise ConfigError(
            "replicas that train apart do not equal one device: verify the layout with "
            "data in place of replica, without --optimizer_mode"
        )
    layout, devices = command_line.start_devices(config)
    jax.config.update("jax_default_matmul_precision", "highest")
    corpus = data.load(config.data)
    config = building.fit_vocabulary(config, corpus)
    program = building.make_program(config, layout, devices)
    # Dropout draws anew for every microbatch, so the reference then has them too.
    microbatches = layout.microbatches if config.model.dropout else 1
    alone = dataclasses.replace(meshpar.Layout(), microbatches=microbatches)
    reference = building.make_program(config, alone, devices[:1])
    batches = data.training_batches(
        corpus,
        length=config.model.length,
        batch_size=config.batch_size,
        seed=config.seed,
        rows=program.batch_rows,
        position=0,
    )
    report = verify.verify(
        program,
        reference,
        (next(batches) for _ in range(VERIFY_STEPS.value)),
        config.seed,
        TOLERANCE[config.compute_dtype] if MAX_ERROR.value is None else MAX_ERROR.value,
    )
    first = report.first_difference
    if JSON.value:
        found = {
            "layout": str(layout),
            "equal": report.ok,
            "violations": report.violations,
            "first_difference": first and dataclasses.asdict(first),
            "comparisons": [dataclasses.asdict(c) for c in report.comparisons],
        }
        print(json.dumps(found))
        return 0 if report.ok else 1
    console = rich.console.Console(highlight=False)
    console.print(_table(report))
    for violation in report.violations:
        console.print(f"CONTRACT BROKEN: {violation}", soft_wrap=True)
    if report.ok:
        console.print(
            f"EQUAL: {layout} trains the same model as one device "
            f"({VERIFY_STEPS.value} steps, {len(report.comparisons)} comparisons) and "
            f"keeps its contract ({len(program.collectives)} collectives)",
            soft_wrap=True,
        )
        return 0
    if first is None:
        return 1
    console.print(
        f"DIFFERENT: first {first.kind} {first.tensor} at step {first.step}, relative "
        f"error {first.error:.1e} above {first.tolerance:.0e}",
        soft_wrap=True,
    )
    return 1


if __name__ == "__main__":
    command_line.run(main)
