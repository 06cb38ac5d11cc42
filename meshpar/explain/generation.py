"""Explains prefill and decoding: memory, collectives, host transfers, as compiled."""

from meshpar.contracts.contract import Contract
from meshpar.contracts.host_transfers import host_violations
from meshpar.explain.report import Explanation, describe
from meshpar.generation.floor import floor, resident_bytes
from meshpar.generation.generate import Generator
from meshpar.layouts.layout import Layout
from meshpar.lowering.inspection import Inspection


def explain_generation(generator: Generator) -> tuple[Explanation, Explanation]:
    """Compiles prefill and decoding and explains both, in this order.

    Args:
      generator: from `meshpar.generator`; its devices may be a topology.
    """
    programs, rows = generator.programs, generator.batch_size
    lowering = generator.program.lowering
    free = Contract(tuple(lowering.declared_freely()), host=programs.host)

    def explained(
        name: str,
        inspection: Inspection,
        layout: Layout,
        contract: Contract,
        text: str,
    ) -> Explanation:
        return describe(
            inspection,
            generator.program.plan,
            contract,
            inspection.collectives,
            layout=str(layout),
            lowering=lowering.name,
            why_auto="",
            predicted=None,
            state_bytes=resident_bytes(programs),
            violations=(
                *contract.violations(inspection.collectives),
                *host_violations(contract.host, inspection.host_transfers),
            ),
            warnings=(),
            mode=text,
            name=name,
        )

    decoding = f"one token of {rows} sequences"
    if (least := floor(programs)) is not None:
        decoding += f", at least {1e3 * least.seconds:.1f} ms to {least.why}"
    layouts = programs.layouts
    prefill = f"{programs.block} tokens of {rows} sequences"
    return (
        explained("prefill", programs.prefill, layouts.prefill, free, prefill),
        explained(
            "decoding",
            programs.decode,
            layouts.decode,
            programs.contract or free,
            decoding,
        ),
    )
