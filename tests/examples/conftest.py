"""The examples can be imported by their names, as by a script beside them."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
