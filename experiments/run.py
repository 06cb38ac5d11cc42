r"""Trains a model under a layout.

    python -m experiments.run --layout="data=2,fsdp=2,tensor=2" --steps=300

The same command resumes the run where it stopped, also under another layout.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # Imports make objects that stay; `Startup` ends this.

from experiments.recipes import CATALOG
from meshpar.commands import run

if __name__ == "__main__":
    run.start(CATALOG)
