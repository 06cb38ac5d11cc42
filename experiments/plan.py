r"""Ranks the layouts of a model on a machine that need not be present.

    python -m experiments.plan --recipe=llama2-7b --topology=v5p:4x4x2 --batch_size=128
    python -m experiments.plan --recipe=llama2-7b --topology=v5e:8x8 --batch_size=64 \
        --memory=12GB --require=zero=3 --forbid=tensor --compile=2 --html=plan.html

It predicts memory, traffic and time of every layout and compiles nothing; --compile=K
compiles the best K, and prints what was predicted beside what was compiled. Exits 0, or
1 if a compiled program breaks its contract or needs more memory than there is.
"""

from experiments.recipes import CATALOG
from meshpar.commands import plan

if __name__ == "__main__":
    plan.start(CATALOG)
