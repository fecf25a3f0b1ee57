"""Progress bars, made in one place: widgets in a notebook, text where ipywidgets is missing, none in CI."""

from __future__ import annotations

import os
from typing import Any

from tqdm.auto import tqdm


def bars_are_off() -> bool:
    """Whether the environment variable CI is set: bars would then stand in a log, or in a notebook's stored output."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def progress_bar(*args: Any, **options: Any) -> Any:
    """A `tqdm.auto.tqdm` with these arguments, which shows nothing where bars are off."""
    return tqdm(*args, **options, **({"disable": True} if bars_are_off() else {}))
