r"""Explains a model under a layout: specs, memory, collectives, warnings.

    python -m experiments.explain --recipe=llama2-7b --layout="fsdp=16,remat=full" \
        --batch_size=16 --topology=v5e:4x4 --html=report.html

It compiles the step, or with --generate prefill and decoding, and runs nothing;
--topology compiles for machines that are not present. Exits 0, or 1 if the compiled
program breaks its contract.
"""

from experiments.recipes import CATALOG
from meshpar.commands import explain

if __name__ == "__main__":
    explain.start(CATALOG)
