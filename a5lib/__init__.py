"""a5lib: reasoning RL on the GPU you own. Start with README.md, or with `a5 train`."""

import warnings

# tqdm says this in a notebook without ipywidgets. Its bars are text then, and nothing is wrong.
warnings.filterwarnings("ignore", message="IProgress not found")

__version__ = "0.1.0"
