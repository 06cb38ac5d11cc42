"""FlexFlow: a search over layouts of single operators (Jia et al., 2019)."""

from meshpar.methods.flexflow.search import search as search
