"""a5lib: reasoning RL on the GPU you own. Start with README.md, or with `a5 train`."""

__version__ = "0.1.0"
